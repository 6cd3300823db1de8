"""Sums over ranks that do not depend on who holds what."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import gather
from tests.pipelines import in_processes

SQUARES = st.lists(st.floats(min_value=0.0, allow_infinity=False), max_size=30)


@given(SQUARES)
def test_the_sum_is_rounded_once(values: list[float]) -> None:
    try:
        expected = math.fsum(values)
    except OverflowError:
        expected = math.inf
    assert gather.exact_sum(values) == expected


@given(SQUARES, st.randoms())
def test_no_order_is_told_from_another(values: list[float], order: random.Random) -> None:
    assert gather.exact_sum(order.sample(values, len(values))) == gather.exact_sum(values)


@pytest.mark.parametrize(
    ("values", "found"), [([1.0, math.inf], math.inf), ([math.inf, math.nan], math.nan), ([1e308] * 5, math.inf)]
)
def test_what_is_not_finite_stays_so(values: list[float], found: float) -> None:
    assert gather.exact_sum(values) == pytest.approx(found, nan_ok=True)


def _spread(rank: int, count: int) -> None:
    drawn = random.Random(3)
    values = [drawn.expovariate(1.0) * 10.0 ** drawn.randint(-12, 12) for _ in range(50)]
    mine = [value for number, value in enumerate(values) if number % 7 % count == rank]
    assert gather.exact_sum(mine) == math.fsum(values)


@pytest.mark.parametrize("count", [2, 3])
def test_the_sum_over_ranks_is_that_of_one_process(count: int) -> None:
    in_processes(count, _spread)
