r"""What happens to raw problems before anybody learns from them or is measured on them. Every step is counted and listed.

| step | counted as |
|---|---|
| a template around the problem is taken off (verl's are known, others by `template`) | repaired_template |
| LaTeX whose backslash was read as an escape gets it back (form feed + `rac`: `\frac`); tabs become spaces | repaired_control |
| any other control character: the text is damaged | dropped_control |
| no problem, no answer | dropped_no_problem, dropped_no_answer |
| a gold of more than 15 digits, which a float can't hold | dropped_huge_gold |
| a gold that went through a float: an exponent, or ten decimals and more | dropped_rounded_gold |
| more than a tenth of the letters in another script (option), too long (option) | dropped_script, dropped_too_long |
| the same problem with different golds: all of them | dropped_conflicting_golds |
| the same problem again | dropped_duplicates |
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from parallel_r1.config import RowsSource
from parallel_r1.grading import last_box
from parallel_r1.numbers import TooLarge, read_number, without_thousands

MAX_GOLD_DIGITS = 15
MAX_GOLD_DECIMALS = 9
MAX_FOREIGN_SHARE = 0.1
LISTED_PER_REASON = 1000
LISTED_CHARS = 300

TEMPLATES = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) "
    'where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".',
    '{problem} Let\'s think step by step and output the final answer after "####".',
    "{problem} Let's think step by step and output the final answer within \\boxed{}.",
)
"""What verl writes around the problems of DAPO, GSM8K and MATH."""


@dataclass
class Log:
    """How many rows were repaired or dropped for which reason, and the first dropped ones of each."""

    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[dict[str, str | int]] = field(default_factory=list)

    def repair(self, what: str) -> None:
        """Count a row that was put right."""
        self.counts[f"repaired_{what}"] += 1

    def drop(self, reason: str, row_id: str, problem: str, answer: str, rows: int = 1) -> None:
        """Count `rows` dropped rows, and list one."""
        self.counts[f"dropped_{reason}"] += rows
        if sum(row["reason"] == reason for row in self.dropped) < LISTED_PER_REASON:
            self.dropped.append({"reason": reason, "id": row_id, "problem": problem[:LISTED_CHARS], "answer": answer, "rows": rows})


# --- text -----------------------------------------------------------------------------------------------------------------

_LOST = {"\a": "a", "\b": "b", "\f": "f", "\v": "v"}
_LOST_COMMAND = re.compile(
    r"[\a\b\f\v](?=[A-Za-z])"
    r"|\t(?=(?:imes|ext(?:bf|it|rm)?|heta|frac|riangle|ilde|au)(?![a-z]))"
    r"|\r(?=(?:ight|ho|angle|floor|ceil|vert|brace)(?![a-z]))"
    r"|\n(?=(?:eq|abla|otin|subseteq)(?![a-z]))"
)
_DAMAGE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile("[\u200b\u2060\ufeff]")


def mend(text: str) -> str:
    """The text with lost commands restored, and with plain line ends and spaces. What is broken beyond that stays in it."""
    text = _LOST_COMMAND.sub(lambda match: "\\" + {"\t": "t", "\r": "r", "\n": "n", **_LOST}[match[0]], text)
    return _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " "))


def unwrap(text: str, template: str | None) -> str:
    """The problem inside a known template, or inside `template`; any other text as it is."""
    for known in (template, *TEMPLATES) if template else TEMPLATES:
        before, _, after = (part.strip() for part in known.partition("{problem}"))
        if len(text) > len(before) + len(after) and text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)].strip()
    return text


def tidy(text: str, value: object, source: RowsSource, log: Log) -> tuple[str, str]:
    """Problem and gold as they are meant."""
    mended, gold = mend(text), mend(value) if isinstance(value, str) else value
    if (mended, gold) != (text, value):
        log.repair("control")
    bare = unwrap(mended.strip(), source.template)
    if bare != mended.strip():
        log.repair("template")
    return bare, clean_answer(gold)


def fault(problem: str, answer: str, source: RowsSource) -> str | None:
    """Why a row can't be used."""
    checks: dict[str, bool] = {
        "no_problem": not problem,
        "no_answer": not answer,
        "control": bool(_DAMAGE.search(problem + answer)),
        "huge_gold": bool(re.fullmatch(rf"-?\d{{{MAX_GOLD_DIGITS + 1},}}(\.\d*)?", without_thousands(answer))),
        "rounded_gold": bool(re.fullmatch(rf"-?\d*\.\d{{{MAX_GOLD_DECIMALS + 1},}}|-?\d+(\.\d*)?[eE][+-]?\d+", answer)),
        "too_long": source.max_chars is not None and len(problem) > source.max_chars,
        "script": source.script == "latin" and _foreign_share(problem) > MAX_FOREIGN_SHARE,
    }
    return next((reason for reason, found in checks.items() if found), None)


def _foreign_share(text: str) -> float:
    """Share of the letters that are neither Latin nor Greek (mathematics)."""
    letters = [letter for letter in unicodedata.normalize("NFKC", text) if letter.isalpha()]
    return sum(ord(letter) > 0x3FF or 0x250 <= ord(letter) < 0x370 for letter in letters) / max(1, len(letters))


# --- golds ----------------------------------------------------------------------------------------------------------------


def clean_answer(value: object) -> str:
    """The gold of a row as text: a number without needless decimals; of a solution what stands behind `####` (GSM8K) or in its
    last box (MATH)."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    _, mark, final = text.rpartition("####")
    answer = final.strip()
    if mark:
        return answer.replace(",", "") if re.fullmatch(r"-?\d[\d,]*(\.\d+)?", answer) else answer
    return last_box(text) or answer


def gold_key(answer: str) -> str:
    """What two spellings of one gold have in common."""
    plain = re.sub(r"\\[dt]frac", r"\\frac", answer.replace("$", "")).strip()
    try:
        number = read_number(without_thousands(plain))
    except TooLarge:
        number = None
    return str(number) if number is not None else re.sub(r"\s", "", plain).casefold()


# --- the same problem -----------------------------------------------------------------------------------------------------

_LAYOUT = re.compile(r"\$|\\[,;!:() \[\]]|\\(?:left|right|displaystyle)(?![a-z])|\\(?=[dt]frac)")
_LOOSE_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")


def normalise(text: str) -> str:
    """What two spellings of one problem have in common: compatible characters, case, white space, maths delimiters and the layout
    commands of LaTeX don't count, nor does a full stop at the end."""
    text = _LAYOUT.sub(" ", unicodedata.normalize("NFKC", text)).replace("dfrac", "\\frac").replace("tfrac", "\\frac")
    return _LOOSE_SPACE.sub("", " ".join(text.split())).casefold().rstrip(".:")


@dataclass
class Same:
    """Rows that are one problem: the first of them, its golds, and how many follow."""

    row_id: str
    problem: str
    answer: str
    golds: dict[str, str]
    repeats: int = 0


class Gathering:
    """Collects clean rows; the same problem becomes one."""

    def __init__(self) -> None:
        self._by_text: dict[str, Same] = {}

    def add(self, row_id: str, problem: str, answer: str) -> None:
        """Take a row."""
        same = self._by_text.get(key := normalise(problem))
        if same is None:
            self._by_text[key] = Same(row_id, problem, answer, {gold_key(answer): answer})
        else:
            same.repeats += 1
            same.golds.setdefault(gold_key(answer), answer)

    def distinct(self, log: Log) -> Iterator[Same]:
        """Each problem once, in order; those whose golds contradict each other are left out."""
        for same in self._by_text.values():
            if len(same.golds) > 1:
                log.drop("conflicting_golds", same.row_id, same.problem, " | ".join(same.golds.values()), same.repeats + 1)
                continue
            if same.repeats:
                log.drop("duplicates", same.row_id, same.problem, same.answer, same.repeats)
            yield same
