"""Expressions of numbers, against Python's own reading of them, and against what is no expression."""

import ast
import operator
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localrag.deliberation.calculate import EXACT_DIGITS, MAX_CHARS, MAX_DEPTH, ROUNDED_DIGITS, calculate
from localrag.errors import UsageError

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
FUNCTIONS = {"min": min, "max": max, "abs": abs, "round": lambda number, places=0: round(number, int(places))}


def python_value(text):
    """What an expression comes to as Python reads it, each number a fraction."""

    def value(node):
        match node:
            case ast.Constant():
                return Fraction(ast.get_source_segment(text, node))
            case ast.UnaryOp(operand=operand):
                return -value(operand)
            case ast.BinOp(left, sign, right):
                return Fraction(OPERATIONS[type(sign)](value(left), value(right)))
            case ast.Call(func, arguments):
                return Fraction(FUNCTIONS[func.id](*map(value, arguments)))

    return value(ast.parse(text, mode="eval").body)


spaces = st.sampled_from(["", " ", "  "])
literals = st.one_of(
    st.integers(0, 5000).map(str),
    st.tuples(st.integers(0, 999), st.integers(0, 999)).map(lambda pair: f"{pair[0]}.{pair[1]:03}"),
)
powers = st.integers(-3, 4).map(str)


def longer(inner):
    in_parentheses = inner.map(lambda text: f"({text})")
    return st.one_of(
        in_parentheses,
        inner.map(lambda text: f"-{text}"),
        st.tuples(inner, spaces, st.sampled_from(["+", "-", "*", "/", "//"]), spaces, inner).map("".join),
        st.tuples(inner, spaces, st.just("%"), spaces, in_parentheses).map("".join),
        st.tuples(literals | in_parentheses, spaces, st.just("**"), spaces, powers).map("".join),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"),
        st.tuples(inner, st.integers(-2, 4)).map(lambda parts: f"round({parts[0]}, {parts[1]})"),
        inner.map(lambda text: f"abs({text})"),
    )


@given(st.recursive(literals, longer, max_leaves=12).filter(lambda text: len(text) <= MAX_CHARS))
@example("2**3**2 - -2**2 * 7//-3")
@example("-7 % 3 - 7//2*2**-1")
@example("1/3 + 1/3 + 1/3")
@example("9.001**16")
def test_it_comes_to_what_python_reads(text):
    try:
        expected = python_value(text)
    except ZeroDivisionError:
        with pytest.raises(UsageError, match="divides by zero"):
            calculate(text)
        return
    told = calculate(text)
    assert abs(Fraction(told.removeprefix("≈")) - expected) <= abs(expected) / 10**14
    num_digits = len(told.partition("e")[0].lstrip("≈-").replace(".", "").lstrip("0"))
    if told.startswith("≈"):
        assert expected.denominator != 1 or abs(expected) >= 10**EXACT_DIGITS
        assert num_digits <= ROUNDED_DIGITS or told.endswith("0" * (num_digits - ROUNDED_DIGITS))  # places, not digits that are told
    else:
        assert Fraction(told) == expected
        assert num_digits <= EXACT_DIGITS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0.1 + 0.2", "0.3"),
        ("1,000 + 1", "1001"),
        ("1,234,567.5 * 2", "2469135"),
        ("max(1,200)", "200"),
        ("max((1,000), 5)", "1000"),
        ("2 ** 3 ** 2", "512"),
        ("2^10", "1024"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("1.5e3 + .5 + 5.", "1505.5"),
        ("10 / 3", "≈3.33333333333333"),
        ("100 / 10 ** 3", "0.1"),
        ("-0", "0"),
        ("sqrt(0.25)", "0.5"),
        ("SQRT(2)", "≈1.4142135623731"),
        ("sqrt(2) ** 2", "≈2"),
        ("sqrt(2) ** 2 - 2", "≈0"),
        ("round(sqrt(2), 2)", "≈1.41"),
        ("round(2.5) + round(3.5)", "6"),
        ("10 ** 39", "1" + "0" * 39),
        ("10 ** 400", "1e+400"),
    ],
)
def test_examples(text, told):
    assert calculate(text) == told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1 + 0.0425 / 365) ** (365 * 5)", (1 + Fraction("0.0425") / 365) ** (365 * 5)),
        ("1.000000001 ** 1000000000", Fraction("2.7182818270999043224")),  # e (1 - x/2 + 11x²/24), x = 1e-9
        ("(1 / 3) ** -2000", Fraction(3) ** 2000),
        ("1 / (-3) ** 1999", 1 / Fraction(-3) ** 1999),
        ("sqrt(2) ** 99 / sqrt(2) ** 97", Fraction(2)),
        ("sqrt(2e-301)", Fraction("4.4721359549995793928e-151")),
    ],
)
def test_what_would_be_too_long_is_approximate(text, value):
    told = calculate(text)
    assert told.startswith("≈")
    assert abs(Fraction(told[1:]) - value) <= abs(value) / 10**14


HOSTILE = [
    "",
    "   ",
    "1" * (MAX_CHARS + 1),
    "(" * MAX_CHARS,
    "-" * (MAX_CHARS - 1) + "1",
    "sqrt(" * 80,
    "2**" * 150 + "2",
    "9**9**9**9",
    "2**(2**4000)",
    "(1 + 1e-300) ** (10 ** 300)",
    "2 ** 10000",
    "1 / 2 ** 99999999",
    "1e9999",
    "1e99999999999",
    "1 / 1e-1300",
    "sqrt(2) / 1e1199 / 1e10",
    "0 ** -1",
    "1 / (sqrt(2) ** 2 - 2)",
    "7 // sqrt(2)",
    "2 ** 0.5",
    "2 ** sqrt(4.1)",
    "sqrt(-1)",
    "round(1, 0.5)",
    "round(1, 999)",
    "round(1, 2, 3)",
    "sqrt(1, 2)",
    "sqrt(1,000)",
    "max()",
    "max",
    "max 1",
    "1,000,00",
    "1,0000",
    "007",
    "1 000",
    "15%",
    "15% - 3",
    "20% of 50",
    "(15%)",
    "7 % -2",
    "+1",
    "5 5",
    "1)",
    "(1",
    "(1 2)",
    ",",
    "1 +",
    "* 1",
    "1.2.3",
    "1_000",
    "٣ + ٤",
    "１＋１",
    "²",
    "1\x00",
    "\ud800",
    "$5",
    "2 = 2",
    "pi",
    "__import__('os').system('true')",
    "(1).real",
    "[1]",
    "lambda: 0",
    "1 if 1 else 2",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_expression_or_too_much_is_told_at_once(text):
    started = time.thread_time()
    with pytest.raises(UsageError) as caught:
        calculate(text)
    assert time.thread_time() - started < 1
    assert len(caught.value.message) < 120
    assert caught.value.message.isprintable()


def test_as_deep_as_is_allowed():
    assert calculate("(" * (MAX_DEPTH - 1) + "7" + ")" * (MAX_DEPTH - 1)) == "7"
    with pytest.raises(UsageError, match="deeper"):
        calculate("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH)


@given(
    st.text(alphabet="0123456789.,+-*/%^()eE sqrtminaxbouд²٣", max_size=120) | st.text(st.characters(exclude_categories=()), max_size=40)
)
def test_any_text_is_a_number_or_an_error(text):
    started = time.thread_time()
    try:
        told = calculate(text)
    except UsageError as error:
        assert error.message.isprintable()
    else:
        Fraction(told.removeprefix("≈"))
        assert len(told) <= EXACT_DIGITS * 2 + 4
    assert time.thread_time() - started < 1  # what is refused has not been computed
