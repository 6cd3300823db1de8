"""Saved activations are taken in hand where the plan or a budget needs it, and left to autograd elsewhere."""

import pytest
import torch
from torch import Tensor, nn

from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.timing import earliest
from runtime.executor import Executor
from runtime.model import loss_fn
from runtime.saved import Saved
from runtime.stage import measure_bytes
from tests.pipelines import batch, model_problem, planned, stage_module

OFFLOADED = 2  # the last one: all are held before the first may leave, however fast the lanes are
KINDS = {
    "fused": (Kind.F, Kind.BW),
    "split": (Kind.F, Kind.B, Kind.W),
}


def ops_of(kinds, microbatches=3):
    """All forwards, then backwards; one microbatch is offloaded between."""
    order = [(Kind.F, j) for j in range(microbatches)] + [(Kind.O, OFFLOADED), (Kind.R, OFFLOADED)]
    order += [(kind, j) for j in range(microbatches) for kind in kinds[1:]]
    return Ops.of([Op(kind, 0, j, float(n), n + 1.0) for n, (kind, j) in enumerate(order)])


@pytest.fixture
def packed(monkeypatch):
    """Each ``Saved`` that kept a tensor."""
    found, pack = set(), Saved.pack

    def spy(self, tensor):
        found.add(self)
        return pack(self, tensor)

    monkeypatch.setattr(Saved, "pack", spy)
    return found


def steps(plan, packed, count=3, **options):
    """Of each step: its result, how many microbatches were in hand, the gradients."""
    module, rows = stage_module(0, 1, dropout=0.1), []
    with Executor(plan, {0: module}, [], loss_fn, **options) as executor:
        for _ in range(count):
            packed.clear()
            module.zero_grad()
            result = executor.step(*batch(3))
            assert executor.ledger.activation_bytes == 0
            rows.append((result, len(packed), [parameter.grad.clone() for parameter in module.parameters()]))
    return rows


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_without_a_budget_only_what_moves_is_in_hand_once_a_run_has_counted_all(kinds, packed):
    problem = model_problem(1, 1, microbatches=3, dropout=0.1)
    rows = steps(Plan(problem, earliest(problem, ops_of(kinds))), packed)
    assert [in_hand for _, in_hand, _ in rows] == [3, 1, 1]
    limited = steps(planned(problem, ops_of(kinds)), packed)
    assert [in_hand for _, in_hand, _ in limited] == [3, 3, 3]
    for (free, _, found), (_, _, expected) in zip(rows, limited, strict=True):
        assert free.peak_bytes == rows[0][0].peak_bytes == limited[0][0].peak_bytes
        assert free.host_peak_bytes == limited[0][0].host_peak_bytes > 0
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_everything_is_in_hand_where_memory_is_watched(packed):
    problem = model_problem(1, 1, microbatches=3, dropout=0.1)
    plan = Plan(problem, earliest(problem, ops_of(KINDS["split"])))
    assert [in_hand for _, in_hand, _ in steps(plan, packed, watch_memory=True)] == [3, 3, 3]


class Cast(nn.Module):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


def test_under_autocast_no_backward_keeps_copies_of_the_weights() -> None:
    """The plain layer saves its cast weight, of every microbatch: more than the activations where layers are wide."""
    sizes = measure_bytes(Cast(), 1, 3, torch.randn(4, 32), None, lambda output, _: output.sum())
    copies = 2 * 32 * 32 * 2
    assert sizes.activation_bytes < copies
