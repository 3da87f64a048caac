"""Arithmetic with small numbers: sums and differences of two-digit numbers, products up to ten times ten."""

from functools import cache
from math import log
from random import Random
from zlib import crc32

HELD_OUT_ONE_IN = 10


def arithmetic_problem(rng: Random, *, held_out: bool = False) -> tuple[str, str]:
    """A question like ``"What is 23 + 41?"`` and its answer, ``"64"``.

    Differences are never negative. One problem in ten is held out of the corpus, decided by a stable hash that is the
    same for ``3 * 4`` and ``4 * 3``: with ``held_out`` only those are drawn, without it none of them.
    """
    expression, value = draw(rng, held_out=held_out)
    return f"What is {expression}?", str(value)


def draw(rng: Random, *, held_out: bool = False) -> tuple[str, int]:
    """An expression like ``"23 + 41"`` and its value."""
    while True:
        kind = int(rng.random() * 5)
        if kind == 4:
            a, b = 2 + int(rng.random() * 9), 2 + int(rng.random() * 9)
            expression, value = f"{a} * {b}", a * b
        elif kind < 2:
            a, b = _two_digits(rng), _two_digits(rng)
            expression, value = f"{a} + {b}", a + b
        else:
            a, b = sorted((_two_digits(rng), _two_digits(rng)), reverse=True)
            expression, value = f"{a} - {b}", a - b
        if is_held_out(expression) == held_out:
            return expression, value


def two_digit_problems() -> list[tuple[str, int]]:
    """Every sum, and every difference that is not negative, of two two-digit numbers, with its value; those held out too."""
    numbers = range(10, 100)
    sums = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    return sums + [(f"{a} - {b}", a - b) for a in numbers for b in range(10, a + 1)]


def worksheet(rng: Random) -> tuple[str, float]:
    """Three to six solved problems, one a line, and their nats."""
    number = 3 + int(rng.random() * 4)
    solved = [draw(rng) for _ in range(number)]
    text = "\n".join(f"{expression} = {value}." for expression, value in solved)
    return text, log(4) + sum(nats_of(expression) for expression, _ in solved)


def is_held_out(expression: str) -> bool:
    """Whether the corpus never contains ``expression``, in either order of its operands."""
    a, sign, b = expression.split()
    key = f"{min(int(a), int(b))}{sign}{max(int(a), int(b))}"
    return crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def _two_digits(rng: Random) -> int:
    return 10 + int(rng.random() * 90)


def nats_of(expression: str) -> float:
    """-log of the probability with which `draw` yields ``expression`` (one that it yields)."""
    return -log(_probability(expression)) + log(_accepted(is_held_out(expression)))


def _probability(expression: str) -> float:
    """The probability of ``expression`` before any is refused."""
    a, sign, b = expression.split()
    if sign == "*":
        return 1 / 5 / 81
    both_orders = sign == "-" and a != b
    return 2 / 5 / 8100 * (2 if both_orders else 1)


@cache
def _accepted(held_out: bool) -> float:
    """The probability that a draw is of the wanted kind."""
    sums = [f"{a} + {b}" for a in range(10, 100) for b in range(10, 100)]
    differences = [f"{a} - {b}" for a in range(10, 100) for b in range(10, a + 1)]
    products = [f"{a} * {b}" for a in range(2, 11) for b in range(2, 11)]
    return sum(_probability(e) for e in sums + differences + products if is_held_out(e) == held_out)
