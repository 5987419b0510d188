"""Exact arithmetic on what people write for a number: `1,000`, `$18.50`, `1\\frac{1}{2}`, `2^{10}`, `3*14`, `1.5 \\times 10^3`.

A small recursive-descent reader over fractions. Nothing is evaluated as code, sizes and depth are bounded, and floats are never used, so
the 17th digit counts. What isn't plain arithmetic (variables, roots, pi) gives None.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 20_000
"""Size of the largest number that is reckoned with: 10^6000."""
MAX_FACTORIAL = 1000
MAX_DEPTH = 40


class TooLarge(ArithmeticError):
    """Arithmetic whose result is beyond all bounds, such as 9**9**9: no answer to any problem."""


class _NotArithmetic(Exception):
    """The text isn't plain arithmetic."""


_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,4})?|\.\d+|\*\*|\\frac|\\cdot|\\times|\\div|[-+*/^!(){}])")
_SEPARATORS = r"(?:,\\!|\\!,|\{,\}|,|\\,|\\!|\u2009|\u202f|')"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SEPARATORS}\d{{3}})+(?![\d,])")
_TIMES, _DIVIDE = ("*", "\\cdot", "\\times"), ("/", "\\div")


def without_thousands(text: str) -> str:
    """`12,345` and its LaTeX spellings as `12345`; a misplaced comma (`10,00`) stays."""
    return _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def read_number(text: str) -> Fraction | None:
    """The exact value of plain arithmetic, None for anything else (division by zero included). Raises TooLarge."""
    try:
        return _Reader(_prepare(text)).whole()
    except _NotArithmetic:
        return None


def _prepare(text: str) -> str:
    text = re.sub(r"^([-+ ]*)(\d+)\s+(\d+)\s*/\s*(\d+)$", r"\1(\2+\3/\4)", text.strip())
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    return re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)


def _tokens(text: str) -> list[str]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if not match:
            raise _NotArithmetic
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Reader:
    """sum = product (+- product)*; product = signed (*/ signed)*; signed = [+-]* power; power = atom!* (^ signed)?"""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0

    def whole(self) -> Fraction:
        """The value of all tokens."""
        value = self._sum()
        if self.at < len(self.tokens):
            raise _NotArithmetic
        return value

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._next()
        if token not in expected:
            raise _NotArithmetic
        self.at += 1
        return token

    def _sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotArithmetic
        value = self._product()
        while self._next() in ("+", "-"):
            sign = 1 if self._take("+", "-") == "+" else -1
            value = _bounded(value + sign * self._product())
        self.depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self._next() in _TIMES + _DIVIDE:
            divide = self._take(*_TIMES, *_DIVIDE) in _DIVIDE
            other = self._signed()
            value = _bounded(_quotient(value, other) if divide else value * other)
        return value

    def _signed(self) -> Fraction:
        sign = 1
        while self._next() in ("+", "-"):
            sign *= 1 if self._take("+", "-") == "+" else -1
        return sign * self._power()

    def _power(self) -> Fraction:
        value = self._atom()
        if self._next() == "!":
            self._take("!")
            value = _factorial(value)
        if self._next() not in ("^", "**"):
            return value
        self._take("^", "**")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotArithmetic
        exponent = self._signed()
        self.depth -= 1
        return _raise(value, exponent)

    def _atom(self) -> Fraction:
        token = self._next()
        if token == "\\frac":
            return self._fraction()
        if token in ("(", "{"):
            return self._group(token)
        if not token[:1].isdigit() and token[:1] != ".":
            raise _NotArithmetic
        self.at += 1
        value = _decimal(token)
        return value + self._fraction() if self._next() == "\\frac" and value.denominator == 1 else value

    def _fraction(self) -> Fraction:
        self._take("\\frac")
        above = self._group("{")
        return _quotient(above, self._group("{"))

    def _group(self, opener: str) -> Fraction:
        self._take(opener)
        value = self._sum()
        self._take(")" if opener == "(" else "}")
        return value


def _decimal(token: str) -> Fraction:
    exponent = re.search(r"[eE]([+-]?\d+)", token)
    if exponent and abs(int(exponent[1])) > MAX_BITS // 4:
        raise TooLarge(token)
    return Fraction(token)


def _quotient(above: Fraction, below: Fraction) -> Fraction:
    if below == 0:
        raise _NotArithmetic
    return above / below


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotArithmetic
    if value > MAX_FACTORIAL:
        raise TooLarge("factorial")
    return Fraction(math.factorial(value.numerator))


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NotArithmetic
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and size * abs(exponent) > MAX_BITS:
        raise TooLarge("power")
    return base ** (exponent.numerator if abs(base) != 1 else exponent.numerator % 2)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("sum or product")
    return value
