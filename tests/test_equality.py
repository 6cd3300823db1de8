"""A step under a plan is that of one process, and so is training: parameters after steps of AdamW with clipping."""

from __future__ import annotations

import pytest

from tests import steps, trained
from tests.odd_models import ODD
from tests.pipelines import in_processes

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a forward under no_grad


@pytest.mark.parametrize("name", ODD)
def test_training_on_one_rank(name: str) -> None:
    trained.check(name, 1, 0, 3, len(name))


def on_ranks(rank: int, count: int) -> None:
    steps.check_on_ranks(rank, count)
    for seed, name in enumerate(ODD):
        # Some models with a single microbatch.
        trained.check(name, count, rank, 1 if count == 4 and seed % 2 else 3, seed)


@pytest.mark.parametrize("count", [2, 4])
def test_steps_and_training_on_several_ranks(count: int) -> None:
    in_processes(count, on_ranks)
