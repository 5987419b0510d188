r"""Are two expressions equal? Most answers are small algebra (`\frac{3\sqrt{2}}{2}`, `2\pi r`): their values at a few points tell.

Two expressions that agree to ten digits at three random points are equal; two that differ in the sixth are not. Whatever isn't plain
algebra (functions, subscripts, decimals, ambiguous spellings such as 1/2x), and whatever lies between, is left to math-verify. `e` and `i`
may be constants or variables: as variables they can only show that expressions are equal. Nothing is evaluated as code.
"""

from __future__ import annotations

import cmath
import random
import re
from collections.abc import Mapping

MAX_CHARS = 300
MAX_DEPTH = 30
MAX_EXPONENT = 60
TRIALS = 3
SAME, DIFFERENT = 1e-10, 1e-6
"""Relative differences up to the one are rounding; beyond the other they are real."""

_TOKEN = re.compile(
    r"\s*(\d+|\\(?:frac|sqrt|pi|cdot|times|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)(?![a-z])|[A-Za-z]|[-+*/^(){}\[\]])"
)
_GREEK = {"\\alpha", "\\beta", "\\gamma", "\\delta", "\\theta", "\\lambda", "\\mu", "\\phi", "\\omega"}
_TIMES = ("*", "\\cdot", "\\times")
_OPENERS = {"(": ")", "{": "}"}
_WORD = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|ln|or)")
_FUNCTION_NAMES = "fgh"
_CONSTANTS = "ei"


class NotAlgebra(Exception):
    """The text isn't plain algebra, or could be read in two ways."""


def same_value(one: str, other: str) -> bool | None:
    """Whether two expressions in LaTeX are equal; None where their values can't tell."""
    try:
        readers = [_tokens(one), _tokens(other)]
        pairs = [tuple(_Reader(tokens, _Point(trial)).whole() for tokens in readers) for trial in range(TRIALS)]
    except (NotAlgebra, ArithmeticError, ValueError):
        return None
    gaps = [abs(a - b) for a, b in pairs]
    if all(gap <= SAME * max(abs(a), abs(b)) for gap, (a, b) in zip(gaps, pairs, strict=True)):
        return True
    may_be_constants = any(token in _CONSTANTS for tokens in readers for token in tokens)
    if not may_be_constants and all(gap > DIFFERENT * max(abs(a), abs(b), 1.0) for gap, (a, b) in zip(gaps, pairs, strict=True)):
        return False
    return None


class _Point(dict[str, complex]):
    """A value for every variable, the same in every process; the last trial has negative ones too."""

    def __init__(self, trial: int) -> None:
        super().__init__()
        self.trial = trial

    def __missing__(self, name: str) -> complex:
        rng = random.Random(f"{self.trial}/{name}")
        value = rng.uniform(0.6, 2.6) * (rng.choice((1, -1)) if self.trial == TRIALS - 1 else 1)
        return self.setdefault(name, value)


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARS or _WORD.search(text):
        raise NotAlgebra
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if not match:
            raise NotAlgebra
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Reader:
    """sum = [+-] product ([+-] product)*; product = power ((times | /)? power)*; power = atom (^ exponent)?"""

    def __init__(self, tokens: list[str], point: Mapping[str, complex]) -> None:
        self.tokens, self.point = tokens, point
        self.at = self.depth = 0

    def whole(self) -> complex:
        """The value of all tokens."""
        value = self._sum()
        if self._next():
            raise NotAlgebra
        return value

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._next()
        if not token or (expected and token != expected):
            raise NotAlgebra
        self.at += 1
        return token

    def _sum(self) -> complex:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAlgebra
        value = self._signed()
        while self._next() in ("+", "-") and self._next():
            value = value + self._product() if self._take() == "+" else value - self._product()
        self.depth -= 1
        return value

    def _signed(self) -> complex:
        if self._next() in ("+", "-") and self._next():
            return self._product() if self._take() == "+" else -self._product()
        return self._product()

    def _product(self) -> complex:
        value = self._power()
        divided = False
        while token := self._next():
            if token in _TIMES:
                self._take()
                value *= self._power()
            elif token == "/":
                self._take()
                value /= self._power()
                divided = True
            elif self._begins_factor(token):
                if divided:
                    raise NotAlgebra  # 1/2x
                value *= self._power()
            else:
                break
        return value

    def _begins_factor(self, token: str) -> bool:
        before = self.tokens[self.at - 1]
        if before.isdigit() and (token.isdigit() or token == "\\frac"):
            raise NotAlgebra  # 2 3, a mixed number
        if before in _FUNCTION_NAMES and token == "(":
            raise NotAlgebra
        return token.isalnum() or token in _OPENERS or token in ("\\frac", "\\sqrt", "\\pi") or token in _GREEK

    def _power(self) -> complex:
        value = self._atom()
        if self._next() != "^":
            return value
        self._take()
        if self._next().isdigit() and len(self._next()) > 1:
            raise NotAlgebra  # x^10 without braces
        exponent = self._group("{") if self._next() == "{" else self._atom()
        if self._next() == "^" or abs(exponent) > MAX_EXPONENT:
            raise NotAlgebra
        return complex(value) ** exponent

    def _atom(self) -> complex:
        token = self._take()
        if token.isdigit():
            return int(token) if len(token) < 16 else complex(int(token))
        if token in _OPENERS:
            self.at -= 1
            return self._group(token)
        if token == "\\pi":
            return cmath.pi
        if token == "\\frac":
            above = self._argument()
            return above / self._argument()
        if token == "\\sqrt":
            return self._root()
        if token.isalpha() or token in _GREEK:
            return self.point[token]
        raise NotAlgebra

    def _group(self, opener: str) -> complex:
        self._take(opener)
        value = self._sum()
        self._take(_OPENERS[opener])
        return value

    def _argument(self) -> complex:
        """What stands in braces, or one digit or letter."""
        if self._next() == "{":
            return self._group("{")
        token = self._take()
        if len(token) > 1:
            if len(token) == 2 and token.isdigit():  # \frac12
                self.tokens = [*self.tokens[: self.at - 1], token[0], token[1], *self.tokens[self.at :]]
                return int(token[0])
            raise NotAlgebra
        self.at -= 1
        return self._atom()

    def _root(self) -> complex:
        degree: complex = 2
        if self._next() == "[":
            self._take("[")
            degree = self._sum()
            self._take("]")
        value = self._argument()
        if degree == 2:
            return cmath.sqrt(value)
        if isinstance(value, complex) or value < 0:
            raise NotAlgebra  # which root is meant?
        return value ** (1 / degree)
