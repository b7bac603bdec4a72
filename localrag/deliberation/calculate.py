"""Evaluate arithmetic: a lexer, an operator-precedence parser, and exact fractions.

    expression  operand (operator operand)*         + -, then * / // %, then unary minus, then ** (also ^) from the right
    operand     number | - operand | ( expression ) | sqrt abs round min max ( expression, … )

A comma separates the arguments of a function. Elsewhere it may only group thousands, as in 1,000; a point is always a decimal
point. `%` is the remainder as in Python, and so are `//` and `round`. Anything ambiguous is an error, for example a `%` that
could mean a percentage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, Overflow, Underflow
from fractions import Fraction
from math import isqrt
from operator import add, floordiv, mod, mul, sub, truediv

from localrag.errors import UsageError

MAX_CHARS = 500
MAX_DEPTH = 40
"""Maximum nesting of parentheses, signs and powers of powers."""
MAX_BITS = 4096
"""Maximum size of an exact numerator or denominator; about 1,200 digits."""
MAX_EXPONENT = 1200
"""Maximum power of ten of an inexact number."""
MAX_POWER = 10**9
"""Maximum exponent of an inexact power, because it multiplies the error of its base."""
EXACT_DIGITS = 40
"""Maximum digits of an exact result; a longer one is rounded to ROUNDED_DIGITS."""
ROUNDED_DIGITS = 15
_ROOT_DIGITS = 60
_KEPT_DIGITS = 50
"""Precision of inexact numbers. A difference below the last digits is 0."""

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])(?:\.[0-9]+)?")
_NAME = re.compile(r"[A-Za-z]+")
_SIGN = re.compile(r"\*\*|//|[-+*/%(),]")
_SAME_SIGNS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-"})
_END = ""
_TOO_LARGE = "An intermediate result is too large, or too close to zero."


def calculate(text: str) -> str:
    """Return the value in decimals: exact if 40 digits suffice, else rounded to 15 digits, with "≈" before inexact values.

    A result with more places has an exponent, as in 1e+50. Square roots and large powers are computed to 50 digits. Raises
    UsageError, in one line that the author of the expression can act on, for syntax errors, division by zero, and expressions
    that are too long, too deep or too large.
    """
    if len(text) > MAX_CHARS:
        raise UsageError(f"The expression is longer than {MAX_CHARS} characters.", num_chars=len(text))
    lexemes = list(_lexemes(text.translate(_SAME_SIGNS)))
    if not lexemes:
        raise UsageError("The expression is empty.")
    return _written(_Parser(lexemes).whole())


@dataclass(frozen=True, slots=True)
class _Value:
    """A number. If it is not exact, it has _KEPT_DIGITS digits, of which the last ones are unreliable."""

    number: Fraction
    is_exact: bool = True

    def __post_init__(self) -> None:
        number = self.number if self.is_exact else _rounded(self.number)
        object.__setattr__(self, "number", number)
        if self.is_exact and _num_bits(number) > MAX_BITS:
            raise UsageError(_TOO_LARGE)


def _lexemes(text: str) -> Iterator[str]:
    """Yield numbers without thousands separators, names in lower case, and signs."""
    at, in_call, before = 0, [False], _END
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = (not in_call[-1] and _GROUPED.match(text, at)) or next(filter(None, (each.match(text, at) for each in _KINDS)), None)
        if not match:
            raise UsageError(f"{text[at]!r} cannot be read: numbers, + - * / // % ** ( ) and {', '.join(_FUNCTIONS)} can.")
        lexeme = match[0].lower()
        if lexeme == "(":
            in_call.append(before in _FUNCTIONS)
        elif lexeme == ")":
            in_call = in_call[:-1] or [False]
        elif lexeme == "," and not in_call[-1]:
            raise UsageError("A comma separates the arguments of a function, or groups thousands as in 1,000.")
        at, before = match.end(), lexeme
        yield lexeme if lexeme == "," else lexeme.replace(",", "")


class _Parser:
    def __init__(self, lexemes: Sequence[str]) -> None:
        self._lexemes = [*lexemes, _END]
        self._at = 0
        self._depth = 0

    def whole(self) -> _Value:
        value = self._expression()
        if self._next == ")":
            raise UsageError("A ')' has no '('.")
        if self._next != _END:
            raise UsageError(f"There is no operator before {_shown(self._next)}.")
        return value

    @property
    def _next(self) -> str:
        return self._lexemes[self._at]

    def _take(self) -> str:
        lexeme = self._next
        self._at += lexeme != _END
        return lexeme

    def _expression(self, level: int = 1) -> _Value:
        """Parse an operand and all operators after it that bind at least as tightly as `level`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UsageError(f"The expression is nested deeper than {MAX_DEPTH}.")
        value = self._operand()
        while _LEVELS.get(self._next, 0) >= level:
            operator = self._take()
            if operator == "%" and self._next[:1] not in _NUMBER_STARTS and self._next not in ("(", *_FUNCTIONS):
                raise UsageError("'%' is the remainder of a division. For 15 percent write 15 / 100.")
            other = self._expression(_LEVELS[operator] + (operator != "**"))
            value = _applied(operator, value, other)
        self._depth -= 1
        return value

    def _operand(self) -> _Value:
        lexeme = self._take()
        if lexeme == "-":
            value = self._expression(_MINUS_LEVEL)
            return _Value(-value.number, value.is_exact)
        if lexeme == "(":
            value = self._expression()
            self._close()
            return value
        if lexeme in _FUNCTIONS:
            return _called(lexeme, self._arguments(lexeme))
        if lexeme[:1] in _NUMBER_STARTS:
            return _number(lexeme)
        if lexeme == _END:
            raise UsageError("The expression ends where a number should be.")
        raise UsageError(f"There should be a number instead of {_shown(lexeme)}.")

    def _arguments(self, name: str) -> list[_Value]:
        if self._take() != "(":
            raise UsageError(f"{name} needs parentheses, as in {name}(2).")
        values = [self._expression()]
        while self._next == ",":
            self._take()
            values.append(self._expression())
        self._close()
        return values

    def _close(self) -> None:
        if self._next != ")":
            raise UsageError("A '(' has no ')'." if self._next == _END else f"There is no operator before {_shown(self._next)}.")
        self._take()


def _shown(lexeme: str) -> str:
    return repr(lexeme if len(lexeme) <= 20 else f"{lexeme[:20]}…")


def _number(lexeme: str) -> _Value:
    if lexeme[0] == "0" and lexeme[1:2].isdigit():
        raise UsageError(f"{_shown(lexeme)} begins with 0. Inside a function, write 1000 and not 1,000.")
    return _Value(Fraction(lexeme.removesuffix(".")))


def _num_bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _rounded(number: Fraction) -> Fraction:
    return _approximate(lambda context: context.divide(Decimal(number.numerator), Decimal(number.denominator)))


def _approximate(work: Callable[[Context], Decimal]) -> Fraction:
    context = Context(prec=_KEPT_DIGITS, Emin=-MAX_EXPONENT, Emax=MAX_EXPONENT, traps=[Overflow, Underflow])
    try:
        return Fraction(work(context))
    except (Overflow, Underflow):
        raise UsageError(_TOO_LARGE) from None


def _applied(operator: str, left: _Value, right: _Value) -> _Value:
    is_exact = left.is_exact and right.is_exact
    if operator in ("//", "%") and not is_exact:
        raise UsageError(f"{operator} needs exact numbers. Use / and round.")
    try:
        if operator == "**":
            return _power(left, right)
        number = Fraction(_OPERATIONS[operator](left.number, right.number))
    except ZeroDivisionError:
        raise UsageError("The expression divides by zero.") from None
    if not is_exact and operator in "+-" and abs(number) * 10 ** (_KEPT_DIGITS - 5) < abs(left.number):
        number = Fraction(0)
    return _Value(number, is_exact)


def _power(left: _Value, right: _Value) -> _Value:
    """Raise a number to a power; a result that would be too long is computed inexactly."""
    base, exponent = left.number, right.number
    if exponent.denominator != 1 or not right.is_exact:
        raise UsageError("An exponent must be a whole number. For a square root write sqrt(2).")
    if (_num_bits(base) - 1) * abs(exponent) <= MAX_BITS // 2:
        return _Value(Fraction(base**exponent.numerator), left.is_exact)
    if abs(exponent) > MAX_POWER:
        raise UsageError(_TOO_LARGE)
    raised = _approximate(
        lambda context: context.power(context.divide(Decimal(base.numerator), Decimal(base.denominator)), Decimal(exponent.numerator))
    )
    return _Value(raised, is_exact=False)


def _called(name: str, values: Sequence[_Value]) -> _Value:
    most, function = _FUNCTIONS[name]
    if len(values) > most:
        raise UsageError(f"{name} takes {'one number' if most == 1 else 'two numbers at most'}, not {len(values)}.")
    value = function(values)
    return _Value(value.number, value.is_exact and all(each.is_exact for each in values))


def _sqrt(values: Sequence[_Value]) -> _Value:
    number = values[0].number
    if number < 0:
        raise UsageError("A negative number has no square root.")
    product = number.numerator * number.denominator  # √(n/d) = √(n·d) / d
    root = isqrt(product)
    if root * root == product:
        return _Value(Fraction(root, number.denominator))
    places = 10**_ROOT_DIGITS
    return _Value(Fraction(isqrt(product * places * places), number.denominator * places), is_exact=False)


def _round(values: Sequence[_Value]) -> _Value:
    """Round half to even, as in Python."""
    places = values[1].number if len(values) > 1 else Fraction(0)
    if places.denominator != 1 or abs(places) > EXACT_DIGITS:
        raise UsageError(f"round takes a number and a whole number of places, at most {EXACT_DIGITS}.")
    return _Value(Fraction(round(values[0].number, places.numerator)))


def _written(value: _Value) -> str:
    for digits in (EXACT_DIGITS, ROUNDED_DIGITS) if value.is_exact else (ROUNDED_DIGITS,):
        context = Context(prec=digits)
        number = context.divide(Decimal(value.number.numerator), Decimal(value.number.denominator)).normalize(context)
        is_exact = value.is_exact and not context.flags[Inexact]
        if is_exact:
            break
    text = f"{number:f}" if abs(number.adjusted()) < EXACT_DIGITS else f"{number:e}"
    return text if is_exact else f"≈{text}"


_KINDS = (_NUMBER, _NAME, _SIGN)
_NUMBER_STARTS = tuple("0123456789.")
_LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}
_MINUS_LEVEL = 3
_OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": truediv,
    "//": floordiv,
    "%": mod,
}
_FUNCTIONS: Mapping[str, tuple[int, Callable[[Sequence[_Value]], _Value]]] = {
    "sqrt": (1, _sqrt),
    "abs": (1, lambda values: _Value(abs(values[0].number))),
    "round": (2, _round),
    "min": (MAX_CHARS, lambda values: _Value(min(each.number for each in values))),
    "max": (MAX_CHARS, lambda values: _Value(max(each.number for each in values))),
}
