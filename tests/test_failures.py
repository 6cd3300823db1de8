"""A failure anywhere ends the step everywhere, soon; the cause is told where it was, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optpipe.errors import RunFailed
from optpipe.ops import Kind
from runtime.executor import Executor, PeerLost
from runtime.model import loss_fn
from tests.odd_models import without_budgets
from tests.pipelines import batch, boundaries, in_processes, model_problem, one_f_one_b, plan_of_orders, stage_module

M = 6


class Fails(nn.Module):
    """Hands its input on; the forward or the backward of the third microbatch fails."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and self.where == "forward":
            raise ValueError("boom")
        return _FailsBackward.apply(x, self.calls == 3 and self.where == "backward")


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        if ctx.fails:
            raise ValueError("boom")
        return g, None


def fails_at(kind, error):
    def before_op(now, stage, microbatch):
        if now == kind and microbatch == 1:
            raise error

    return before_op


def fails_in_loss(output, target):
    fails_in_loss.calls += 1
    if fails_in_loss.calls == 3:
        raise ValueError("boom")
    return loss_fn(output, target)


#: Which rank fails, what fails there, and what is said of it.
CASES = [
    (0, "forward", r"^F\(0,2\): ValueError: boom$"),
    (1, "forward", r"^F\(1,2\): ValueError: boom$"),
    (0, "backward", r"^B\(0,2\): ValueError: boom$"),
    (1, "backward", r"^B\(1,2\): ValueError: boom$"),
    (1, "loss", r"^F\(1,2\): ValueError: boom$"),
    (0, "offload", r"^O\(0,1\): OSError: the link is down$"),
    (0, "reload", r"^R\(0,1\): OSError: the link is down$"),
    (1, "weight", r"^W\(1,1\): OSError: the link is down$"),
    (1, "Ctrl-C", None),
    (0, "Ctrl-C in a lane", r"^O\(0,1\): KeyboardInterrupt"),
]


#: Those that happen in several ways where threads wait for messages.
IN_THREADS = ("forward", "offload", "Ctrl-C in a lane")


def run_case(rank, broken, how, limited):
    """One step that fails on rank ``broken``; ``limited``: the devices have budgets, and threads wait for messages."""
    module, loss, before_op = stage_module(rank, 2), loss_fn, None
    if rank == broken:
        fails_in_loss.calls = 0
        down = OSError("the link is down")
        module = nn.Sequential(module, Fails(how)) if how in ("forward", "backward") else module
        loss = fails_in_loss if how == "loss" else loss_fn
        before_op = {
            "offload": fails_at(Kind.O, down),
            "reload": fails_at(Kind.R, down),
            "weight": fails_at(Kind.W, down),
            "Ctrl-C": fails_at(Kind.B, KeyboardInterrupt()),
            "Ctrl-C in a lane": fails_at(Kind.O, KeyboardInterrupt()),
        }.get(how)
    plan = plan_of_orders(model_problem(2, microbatches=M), one_f_one_b(2, M, split=True), {(0, 1), (0, 2)})
    plan = plan if limited else without_budgets(plan)
    executor = Executor(plan, {rank: module}, boundaries(2), loss, before_op=before_op)
    try:
        executor.step(*batch(M))
    finally:
        executor.close()


def only_these_are_left(threads, seconds=30.0):
    """Whether all other threads end, for which a busy machine needs a moment."""
    end = time.monotonic() + seconds
    while set(threading.enumerate()) != threads and time.monotonic() < end:
        time.sleep(0.01)
    return set(threading.enumerate()) == threads


def every_failure(rank, count):
    store = dist.distributed_c10d._get_default_store()
    threads = set(threading.enumerate())
    cases = [(*case, limited) for case in CASES for limited in (False, True) if not limited or case[1] in IN_THREADS]
    for number, (broken, how, said, limited) in enumerate(cases):
        dist.destroy_process_group()
        place = dist.PrefixStore(f"case {number}", store)
        dist.init_process_group("gloo", store=place, rank=rank, world_size=count, timeout=timedelta(seconds=60))
        cause = KeyboardInterrupt if how == "Ctrl-C" else RunFailed
        error, words = (cause, said) if rank == broken else (PeerLost, "lost rank")
        with pytest.raises(error, match=words):
            run_case(rank, broken, how, limited)
        assert only_these_are_left(threads), how
    dist.destroy_process_group()
    return "told"


def test_a_failure_on_one_rank_ends_the_step_on_all():
    # The ranks wait for each other 300 s, the test for them less.
    assert in_processes(2, every_failure, survivors=[0, 1]) == ["told"] * 2
