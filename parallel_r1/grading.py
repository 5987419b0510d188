"""Is the answer right? Extraction of a response's answer, and its equivalence to the gold.

Extraction. Only the main thread after the last closed summary counts, and no block may be open there. The last `Final Answer:` wins (any
case, bold, as a heading, full-width colon); without one, the last `\\boxed{}`, if it is closed; without either, the last line, if it names
its answer ("The answer is 42.", "Answer: 42", "#### 42") or is nothing but a number.

Decision, the first that can: the same text; residues; exact numbers; collections of numbers; words; the values of
plain algebra at a few points (`parallel_r1/sampling.py`); math-verify (`parallel_r1/symbolic.py`).

| policy | verdict |
|---|---|
| two answers ("41 or 42", "41, 42") for one gold | wrong |
| a rounded decimal for an exact gold (0.333 for 1/3) | wrong; 0.5 for 1/2 is right |
| unevaluated but equal (3*14, 2^{10}, 5!) | right |
| `50%` for 0.5 or for 50 | right; 50% for 0.5% is wrong |
| units, currency, degrees | not compared: $18, 18 dollars and 18 are alike |
| an equation (x=5, 6*7=42, 42=6*7) for a value | its value is taken |
| a list without brackets, a set | order doesn't matter; tuples and intervals keep order and brackets |
| a number of another base (52_8) | the base must be written |
| 5 (mod 7) for 12 (mod 7), for 5, and 5 for it | right; with another modulus, or 12 for it, wrong |
| an inequality for its interval and the other way round (x >= 3 for [3, oo)) | right, if it is one interval |
| times, ratios (3:30) | as text |
| an explanation in brackets after the answer | dropped |
| None, nan, [INVALID] | no answer, whatever the gold |
| longer than 1000 characters, beyond 10^6000, or too slow to compare | wrong |
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from parallel_r1 import symbolic
from parallel_r1.markup import CLOSE_SUMMARY, EOS_TEXTS, OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY
from parallel_r1.numbers import TooLarge, read_number, without_thousands
from parallel_r1.sampling import same_value

MAX_ANSWER_CHARS = 1000

Method = Literal["none", "text", "residue", "number", "collection", "values", "symbolic"]


@dataclass(frozen=True)
class Grade:
    """A verdict: what was taken for the answer (None: nothing), how it was compared, and why it is right or wrong."""

    correct: bool
    extracted: str | None
    method: Method
    reason: str


def grade(prediction: str | None, gold: str) -> Grade:
    """Judge a response against the gold. Never raises for odd input; safe in threads, and bounded in time."""
    extracted = extract(prediction or "")
    return _judge(extracted, gold) or _judge_symbolically(extracted, gold)


def grade_many(pairs: Sequence[tuple[str | None, str]], workers: int | None = None) -> list[Grade]:
    """Judge many (prediction, gold) pairs; only those that need math-verify are spread over `workers` (all cores when left out)."""
    extracted = [extract(prediction or "") for prediction, _ in pairs]
    grades = [_judge(answer, gold) for answer, (_, gold) in zip(extracted, pairs, strict=True)]
    hard = [index for index, verdict in enumerate(grades) if verdict is None]
    if hard:
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            verdicts = pool.map(lambda index: _judge_symbolically(extracted[index], pairs[index][1]), hard)
            for index, verdict in zip(hard, verdicts, strict=True):
                grades[index] = verdict
    return grades


# --- extraction -----------------------------------------------------------------------------------------------------------

_MARK = re.compile(r"final[ _]answer[ \t]{0,9}(?:\*\*|__)?[ \t]{0,9}(?:[:：]|\n)", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed\s{0,3}\{")
_NO_ANSWER = {"", "none", "nan", "null", "n/a", "[invalid]", "unknown"}


def extract(response: str) -> str | None:
    """The answer of a response as it stands there, or None."""
    tail = response.rpartition(CLOSE_SUMMARY)[2]
    if any(opener in tail for opener in (OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY)):
        return None
    for eos in EOS_TEXTS:
        tail = tail.partition(eos)[0]
    marks = list(_MARK.finditer(tail))
    answer = _statement(tail[marks[-1].end() :]) if marks else ""
    box = last_box(answer or tail)
    if box == "":
        return None
    answer = (box or answer or ("" if marks else _last_line(tail))).strip()
    return answer if answer.strip("*_ .").lower() not in _NO_ANSWER else None


_NAMED = re.compile(r"(?:\banswer\b(?:\s+[a-z]+){0,4}?\s*(?:\bis\b|:|=)|^####)[:\s]*(\S.*)$", re.IGNORECASE)


def _last_line(text: str) -> str:
    """What the last line names as the answer, or the line itself where it is a number; else nothing."""
    line = text.rstrip()[-MAX_ANSWER_CHARS:].rpartition("\n")[2].strip().strip("*_")
    if named := _NAMED.search(line):
        return named[1]
    try:
        return line if _number(_bare(_clean(line))) is not None else ""
    except TooLarge:
        return ""


def _statement(text: str) -> str:
    """The first line with something in it; a display or a box that it opens is read to its end."""
    text = text[: 4 * MAX_ANSWER_CHARS].lstrip(" \t\r\n*_")
    for opener, closer in (("\\[", "\\]"), ("$$", "$$")):
        if text.startswith(opener) and closer in text[2:]:
            return text[2:].partition(closer)[0]
    end = text.find("\n")
    while end >= 0 and (text.count("{", 0, end) > text.count("}", 0, end) or text.count("\\begin", 0, end) > text.count("\\end", 0, end)):
        end = text.find("\n", end + 1)
    return text if end < 0 else text[:end]


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{}`; None where there is none, "" where it is cut off or empty."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return ""


# --- spelling -------------------------------------------------------------------------------------------------------------

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_UNICODE = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "÷": "\\div ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "√": "\\sqrt ",
    "∪": "\\cup ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "±": "\\pm ",
    "≡": "\\equiv ",
}
_ALIKE = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "bmatrix": "pmatrix", "\\%": "%", "\\ ": " ", "~": " "}
_LAYOUT = ("\\$", "$", "\\(", "\\)", "\\[", "\\]", "\\displaystyle", "\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "`", "**", *"€£¥₹")
_SYMBOLS = {**_UNICODE, **_ALIKE, **dict.fromkeys(_LAYOUT, "")}
_SYMBOL = re.compile(
    "|".join(re.escape(symbol) + r"(?![a-z])" * symbol[-1].isalpha() for symbol in sorted(_SYMBOLS, key=len, reverse=True))
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b")
_WORDING = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT_WORDING = re.compile(_WORDING.pattern + r"(?:\s*\^\s*\{?\d\}?)?")
_INTRODUCTION = re.compile(
    r"^(?:so |thus |therefore |hence )?,?\s*(?:the |my )?(?:final )?(?:answer|result|value)(?: is|:|=)?[: ]+|^it is |^is ", re.IGNORECASE
)
_EXPLANATION = re.compile(r"\s+\(([^()]*)\)$")
_SCALES = {"thousand": "000", "million": "000000", "billion": "000000000"}
_UNIT = re.compile(r"(?:(?<=[\d})!%])|(?<=\\pi)\s)\s*(?:[A-Za-z][A-Za-z./]*\s*){1,4}(?:\^\s*\{?\d\}?)?$")
_CURRENCY = re.compile(r"^(?:USD|US|EUR|GBP|RMB|CNY|Rs\.?)\s*(?=[\d.])", re.IGNORECASE)
_NO_UNIT = re.compile(
    r"\b(?:or|and|if|not|to|plus|minus|times|than|but|with|more|less|mod|pi|sqrt|dozen|hundred)\b|(?<!/)\b[a-z]\b", re.IGNORECASE
)
_WORDY_SEPARATOR = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*(and|or)\s*\}")


def _clean(text: str) -> str:
    """One spelling for what is written in many: Unicode, LaTeX layout, markdown, currency and mathematics signs."""
    text = re.sub(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = without_thousands(unicodedata.normalize("NFKC", text).replace("⁄", "/"))
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match[0]], text)
    return " ".join(_DEGREES.sub(" ", text).split()).rstrip(" .,;:。，").lstrip(" :,")


def _bare(text: str) -> str:
    """An answer without what surrounds it: introduction, explanation, units, wrappers of text."""
    text = _CURRENCY.sub("", _INTRODUCTION.sub("", text))
    explanation = _EXPLANATION.search(text)
    if explanation and _is_prose(explanation[1]):
        text = text[: explanation.start()]
    text = _WORDY_SEPARATOR.sub(r" \1 ", text)
    without_wording = _UNIT_WORDING.sub(" ", text).strip()
    text = without_wording if re.search(r"\d", without_wording) else _WORDING.sub(r"\1", text)
    text = re.sub(r"(?<=\d)\s*(thousand|million|billion)\b", lambda match: _SCALES[match[1]], text)
    unit = _UNIT.search(text)
    if unit and not _NO_UNIT.search(unit[0]):
        text = text[: unit.start()]
    return text.strip(" .,;:")


_COMMANDS = re.compile(
    r"\\[A-Za-z]+|\b(?:arc|a)?(?:sin|cos|tan|cot|sec|csc)h?\b|\b(?:log|ln|exp|max|min|gcd|lcm|mod|sqrt|inf|frac|pmatrix|cases)\b"
)
_PROSE = re.compile(r"[A-Za-z]{3,}|[^\W\d_a-zA-Z]")


def _is_prose(text: str) -> bool:
    """Whether there are words in it that aren't mathematics."""
    return bool(_PROSE.search(_COMMANDS.sub(" ", text)))


# --- decision -------------------------------------------------------------------------------------------------------------


_WHOLE = re.compile(r"\s*\$?\s*(-?[0-9]{1,18})\s*\$?\s*\.?\s*")


def _judge(extracted: str | None, gold: str) -> Grade | None:
    """The verdict, where it needs no algebra; None where it does."""
    if extracted is None or gold.strip().lower() in _NO_ANSWER:
        return Grade(False, extracted, "none", "the response has no answer" if extracted is None else f"no usable gold: {gold!r}")
    if max(len(extracted), len(gold)) > MAX_ANSWER_CHARS:
        return Grade(False, extracted[:MAX_ANSWER_CHARS], "none", f"longer than {MAX_ANSWER_CHARS} characters")
    if (plain := _WHOLE.fullmatch(extracted)) and (target := _WHOLE.fullmatch(gold)):
        same = int(plain[1]) == int(target[1])
        return Grade(same, extracted, "number", f"{plain[1]} {'=' if same else 'is not'} {target[1]}")
    answer, right = _aligned(extracted, gold)
    if _squeezed(answer) == _squeezed(right):
        return Grade(True, extracted, "text", "the same text")
    try:
        decided = _by_residue(extracted, answer, right) or _by_number(extracted, answer, right)
        decided = decided or _by_collection(extracted, answer, right) or _by_words(extracted, answer, right)
        return decided or _by_values(extracted, answer, right)
    except TooLarge:
        return Grade(False, extracted, "number", "beyond all bounds")


def _judge_symbolically(extracted: str | None, gold: str) -> Grade:
    answer, right = _aligned(extracted or "", gold)
    try:
        same = symbolic.equal(answer, right)
    except symbolic.TooSlow as error:
        return Grade(False, extracted, "symbolic", str(error))
    return Grade(same, extracted, "symbolic", f"math-verify finds {answer} {'equal' if same else 'unequal'} to {right}")


def canonical(answer: str) -> str:
    """One spelling for an answer that is written in many, as far as no algebra is needed: for counting votes."""
    bare = _bare(_clean(answer[:MAX_ANSWER_CHARS]))
    try:
        number = _number(_value_of(bare))
    except TooLarge:
        number = None
    return str(number) if number is not None else _squeezed(bare)


def _aligned(extracted: str, gold: str) -> tuple[str, str]:
    """Answer and gold, cleaned, with an equation reduced to its value where the other is a value."""
    answer, right = _bare(_clean(extracted)), _bare(_clean(gold))
    if "=" in answer and "=" not in right:
        return _value_of(answer), right
    if "=" in right and "=" not in answer and re.match(r"[A-Za-z](?:\([a-z]\))?\s*=", right):
        return answer, right.partition("=")[2].strip()
    return answer, right


def _value_of(equation: str) -> str:
    """The value that an equation ends in, or begins with; an equation that isn't one stays."""
    sides = [side.strip() for side in equation.split("=")]
    if not all(sides) or re.search(r"[<>!]=|,|\b(?:and|or)\b", equation):
        return equation
    return sides[0] if _number(sides[-1]) is None and _number(sides[0]) is not None else sides[-1]


def _squeezed(text: str) -> str:
    """Without the spaces that don't part words or digits."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text).casefold()


def _number(text: str) -> Fraction | None:
    value = read_number(text.removesuffix("%"))
    return value / 100 if value is not None and text.endswith("%") else value


_RESIDUE = re.compile(r"^(?:[A-Za-z]\s*\\equiv\s*)?(-?\d+)\s*(?:\(?\s*\\?[pb]?mod\s*\{?\s*(\d+)\s*\}?\s*\)?)?$")


def _by_residue(extracted: str, answer: str, right: str) -> Grade | None:
    """Whole numbers of which at least one names its modulus."""
    one, other = _RESIDUE.match(answer), _RESIDUE.match(right)
    if not one or not other or not (one[2] or other[2]):
        return None
    if one[2] and other[2]:
        same = int(one[2]) == int(other[2]) > 0 and (int(one[1]) - int(other[1])) % int(other[2]) == 0
    else:
        same = int(one[1]) == int(other[1])
    return Grade(same, extracted, "residue", f"{answer} is {'' if same else 'not '}{right}")


def _by_number(extracted: str, answer: str, right: str) -> Grade | None:
    """Both are numbers: equal or not, exactly. A percentage may stand for its share or for its count."""
    value, target = _number(answer), _number(right)
    if value is None or target is None:
        return None
    same = value == target
    if answer.endswith("%") != right.endswith("%"):
        same = same or (value * 100 == target if answer.endswith("%") else value == target * 100)
    return Grade(same, extracted, "number", f"{answer} {'=' if same else 'is not'} {right}")


def _by_collection(extracted: str, answer: str, right: str) -> Grade | None:
    """Lists, sets, tuples and intervals of numbers; a single number beside several is wrong."""
    one, other = _collection(answer), _collection(right)
    if one is None or other is None:
        return None
    if len(one.values) != len(other.values):
        return Grade(False, extracted, "collection", f"{len(one.values)} values, {len(other.values)} are right")
    if len(one.values) == 1:
        return None
    if one.brackets != other.brackets:
        return Grade(False, extracted, "collection", f"{answer} and {right} differ in their brackets")
    same = one.values == other.values if one.brackets else sorted(one.values) == sorted(other.values)
    return Grade(same, extracted, "collection", f"the values {'are the same' if same else 'differ'}")


@dataclass(frozen=True)
class _Collection:
    """Numbers in a row; `brackets` is empty where their order doesn't matter."""

    brackets: str
    values: list[Fraction]


def _collection(text: str) -> _Collection | None:
    inner, brackets = text, ""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text:
        inner, brackets = text[1:-1], text[0] + text[-1]
    pieces = re.split(r"\s+(?:and|or)\s+|,(?:\s*(?:and|or)\s)?|;", inner)
    values = [_number(re.sub(r"^[A-Za-z]\s*=", "", piece.strip()).strip()) for piece in pieces]
    return None if None in values else _Collection(brackets, values)


def _by_values(extracted: str, answer: str, right: str) -> Grade | None:
    """Plain algebra: equal or different at random points."""
    same = same_value(answer, right)
    if same is None:
        return None
    return Grade(same, extracted, "values", f"{answer} and {right} {'agree' if same else 'differ'} in their values")


_VERBATIM = re.compile(r"^\d+(?::\d+)+$|^\(?\d+\)?_\{?\d+\}?$")


def _by_words(extracted: str, answer: str, right: str) -> Grade | None:
    """Words, times, ratios and numbers of another base are compared as text, and they weren't the same text."""
    if "==" in answer or not answer:
        return Grade(False, extracted, "text", "not an answer")
    if not any(_VERBATIM.match(text) or _is_prose(text) for text in (answer, right)):
        return None
    one, other = (re.sub(r"[\s{}()\\.]", "", text).casefold() for text in (answer, right))
    same = one == other
    return Grade(same, extracted, "text", f"{answer!r} is {'' if same else 'not '}{right!r}")
