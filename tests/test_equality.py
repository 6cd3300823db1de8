"""Training under a plan is training in one process: parameters after steps of AdamW with clipping."""

from __future__ import annotations

import pytest

from tests import trained
from tests.odd_models import ODD
from tests.pipelines import in_processes

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a forward under no_grad


@pytest.mark.parametrize("name", ODD)
def test_training_on_one_rank(name: str) -> None:
    trained.check(name, 1, 0, 3, len(name))


def on_ranks(rank: int, count: int) -> None:
    for seed, name in enumerate(ODD):
        trained.check(name, count, rank, 3, seed)


@pytest.mark.parametrize("count", [2, 4])
def test_training_on_several_ranks(count: int) -> None:
    in_processes(count, on_ranks)
