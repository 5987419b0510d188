"""Speed of grading beside bare math-verify, in the same run: integers, right and wrong expressions, in processor time.

Ours includes the extraction from a response. A fifth of the expressions holds a function, which needs math-verify in the process that can
be killed; `function` pairs all do. Bare math-verify parses the answer alone and verifies it in this process, with its own alarm, as it
comes. Neither sees a pair twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple

from benchmarks.measurement import Measurement
from parallel_r1 import symbolic
from parallel_r1.grading import grade

Kind = Literal["integer", "symbolic", "wrong_symbolic", "function"]
Pair = tuple[str, str]
PAIRS = {"integer": 2000, "symbolic": 250, "wrong_symbolic": 250, "function": 100}
WORK = "Let us count. First we add the parts, then we take away what is left over, which gives the number that was asked for.\n" * 8
FORMS: tuple[tuple[str, str, str], ...] = (
    ("(x+{a})(x-{b})", "x^2+({a}-{b})x-{a}\\cdot {b}", "x^2+({a}+{b})x-{a}\\cdot {b}"),
    ("\\frac{{{a}}}{{\\sqrt{{{b}}}}}", "\\frac{{{a}\\sqrt{{{b}}}}}{{{b}}}", "\\frac{{{b}\\sqrt{{{b}}}}}{{{a}}}"),
    ("{a}\\pi - {b}", "-{b} + \\pi\\cdot {a}", "-{a} + \\pi\\cdot {b}"),
    ("{a}\\sin({b}) + x", "x + {a}\\sin({b})", "x + {a}\\cos({b})"),
    ("\\frac{{x}}{{{a}}} + {b}y", "{b}y + \\frac{{1}}{{{a}}}x", "{b}y + \\frac{{1}}{{{a}}}x^2"),
)
"""Answer, an equal gold, an unequal gold."""
FUNCTION = FORMS[3]


class Speeds(NamedTuple):
    """Pairs per second on one core."""

    ours: float
    bare: float


def _pairs(kind: Kind) -> list[Pair]:
    """(answer, gold) pairs, all different."""
    if kind == "integer":
        return [(str(7 * n + 3), str(7 * n + 3 + (n % 2))) for n in range(PAIRS[kind])]
    chosen = 2 if kind == "wrong_symbolic" else 1
    first = 100 if kind == "function" else 2
    numbers = [(n // len(FORMS) + first, n // len(FORMS) + first + 1 + n % 7) for n in range(PAIRS[kind])]
    forms = [FUNCTION if kind == "function" else FORMS[n % len(FORMS)] for n in range(PAIRS[kind])]
    return [(form[0].format(a=a, b=b), form[chosen].format(a=a, b=b)) for form, (a, b) in zip(forms, numbers, strict=True)]


def _bare(answer: str, gold: str) -> bool:
    import math_verify

    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${answer}$"))


def _timed(judge: Callable[[str, str], bool], pairs: Sequence[Pair], expected: Sequence[bool]) -> float:
    """Processor seconds for the pairs, those of the child processes too; raises AssertionError where a verdict isn't what it must be."""
    start = time.process_time() + symbolic.POOL.processor_seconds()
    verdicts = [judge(*pair) for pair in pairs]
    seconds = time.process_time() + symbolic.POOL.processor_seconds() - start
    assert verdicts == list(expected), f"wrong verdicts among {pairs}"
    return seconds


@cache
def speeds(kind: Kind) -> Speeds:
    """Both speeds."""
    pairs = _pairs(kind)
    expected = [gold == answer for answer, gold in pairs] if kind == "integer" else [kind != "wrong_symbolic"] * len(pairs)
    for judge in (_ours, _bare):
        judge("\\sin(y)", "\\sin(y)+0")  # sympy is loaded before the clock starts
    found = Speeds(*(len(pairs) / _timed(judge, pairs, expected) for judge in (_ours, _bare)))
    print(f"  {kind}: {found.ours:,.0f} pairs/s, bare math-verify {found.bare:,.0f}")
    return found


def _ours(answer: str, gold: str) -> bool:
    return grade(f"{WORK}Final Answer: ${answer}$", gold).correct


def ratio(kind: Kind) -> Callable[[list[str]], Measurement]:
    """A benchmark: how many times faster than bare math-verify."""
    return lambda _: Measurement(round(speeds(kind).ours / speeds(kind).bare, 2), "x", "higher")


def per_second(kind: Kind) -> Callable[[list[str]], Measurement]:
    """A benchmark: pairs per second on one core."""
    return lambda _: Measurement(round(speeds(kind).ours, 1), "pairs/s", "higher")


BENCHMARKS: dict[str, Callable[[list[str]], Measurement]] = {
    "grade_integer_vs_math_verify": ratio("integer"),
    "grade_symbolic_vs_math_verify": ratio("symbolic"),
    "grade_wrong_symbolic_vs_math_verify": ratio("wrong_symbolic"),
    "grade_function_vs_math_verify": ratio("function"),
    "grade_integer_per_second": per_second("integer"),
    "grade_symbolic_per_second": per_second("symbolic"),
    "grade_wrong_symbolic_per_second": per_second("wrong_symbolic"),
}
