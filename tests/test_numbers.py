"""Exact arithmetic on written numbers."""

from fractions import Fraction

import pytest

from parallel_r1.numbers import TooLarge, read_number, without_thousands


@pytest.mark.parametrize(
    "text, expected, reason",
    [
        ("42", 42, "integer"),
        ("042", 42, "leading zero"),
        ("- 7", -7, "space after the sign"),
        ("--7", 7, "signs in a row"),
        ("42.00", 42, "needless decimals"),
        (".5", Fraction(1, 2), "no leading zero"),
        ("12345678901234567", 12345678901234567, "no floats: the 17th digit counts"),
        ("1/2", Fraction(1, 2), "slash"),
        ("\\frac{2}{4}", Fraction(1, 2), "unreduced"),
        ("\\frac12", Fraction(1, 2), "no braces"),
        ("\\frac1{12}", Fraction(1, 12), "half the braces"),
        ("\\frac{1}3", Fraction(1, 3), "the other half"),
        ("1\\frac{1}{2}", Fraction(3, 2), "mixed number"),
        ("-1\\frac{1}{2}", Fraction(-3, 2), "the sign covers a mixed number"),
        ("1 1/2", Fraction(3, 2), "mixed number in plain text"),
        ("2^{10}", 1024, "power"),
        ("2**10", 1024, "power, as in code"),
        ("-2^2", -4, "power binds closer than the sign"),
        ("2^{-1}", Fraction(1, 2), "negative power"),
        ("5!", 120, "factorial"),
        ("1.5 \\times 10^3", 1500, "scientific"),
        ("1.5e3", 1500, "scientific, as in code"),
        ("2+3*(4-1)", 11, "precedence and groups"),
        ("\\frac{1}{2^{99}}", Fraction(1, 2**99), "tiny, not 0"),
        ("1 4", None, "two numbers"),
        ("5!!", None, "double factorial isn't factorial twice"),
        ("1/0", None, "undefined"),
        ("\\frac{0}{0}", None, "undefined"),
        ("0^0", None, "undefined"),
        ("2x", None, "a variable"),
        ("\\sqrt{4}", None, "algebra"),
        ("2^{0.5}", None, "a root"),
        ("(1", None, "unclosed"),
        ("1)", None, "stray closer"),
        ("", None, "nothing"),
        ("__import__('os')", None, "code"),
        ("(" * 300 + "1" + ")" * 300, None, "beyond the depth"),
        ("2^" * 300 + "1", None, "beyond the depth"),
        ("-" * 900 + "1", 1, "many signs"),
    ],
)
def test_values(text: str, expected: Fraction | int | None, reason: str) -> None:
    assert read_number(text) == expected, reason


@pytest.mark.parametrize("text", ["9**9**9", "10^{10^{10}}", "(10^{10})!", "2^{99999}", "1e9999", "*".join(["9^{999}"] * 40)])
def test_bombs_are_refused_at_once(text: str) -> None:
    with pytest.raises(TooLarge):
        read_number(text)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12,345,678", "12345678"),
        ("1{,}000", "1000"),
        ("1\\,000", "1000"),
        ("1\\!,000", "1000"),
        ("1,\\!000", "1000"),
        ("10,00", "10,00"),
        ("1,0000", "1,0000"),
        ("1, 000", "1, 000"),
        ("0.1,234", "0.1,234"),
        ("costs 1,600.50 now", "costs 1600.50 now"),
    ],
)
def test_thousands(text: str, expected: str) -> None:
    assert without_thousands(text) == expected
