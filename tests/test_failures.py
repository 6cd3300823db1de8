"""A failure anywhere ends the step everywhere, soon; the cause is told where it was, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optpipe.errors import RunFailed
from optpipe.ops import Kind
from runtime.events import CpuEvent, Failure
from runtime.executor import Executor, PeerLost
from runtime.model import loss_fn
from runtime.transport import _Waiter
from tests.odd_models import without_budgets
from tests.pipelines import batch, boundaries, in_processes, model_problem, one_f_one_b, plan_of_orders, stage_module

M = 6
#: A thread inside a send when its connection breaks ends only then: gloo does not wake it.
TIMEOUT_S = 15.0


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
    executor = Executor(plan, {rank: module}, boundaries(2), loss, before_op=before_op, timeout_s=TIMEOUT_S)
    try:
        executor.step(*batch(M))
    finally:
        executor.close()


def left_besides(threads, seconds=3 * TIMEOUT_S):
    """What stays of the other threads, with what each does; to end they have a while, as a busy machine needs it."""
    end = time.monotonic() + seconds
    while set(threading.enumerate()) - threads and time.monotonic() < end:
        time.sleep(0.01)
    frames = sys._current_frames()
    return {
        thread.name: "".join(traceback.format_stack(frames[thread.ident])) if thread.ident in frames else "ended"
        for thread in set(threading.enumerate()) - threads
    }


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
        assert (left := left_besides(threads)) == {}, "\n".join([how, *map("\n".join, left.items())])
    dist.destroy_process_group()
    return "told"


def test_a_failure_on_one_rank_ends_the_step_on_all():
    assert in_processes(2, every_failure, survivors=[0, 1]) == ["told"] * 2


def stopped_while_receiving(rank, count):
    """Rank 1 stops in the middle of a message and is killed; what becomes of rank 0's thread that sends it."""
    store = dist.distributed_c10d._get_default_store()
    message = torch.ones(1 << 25)  # far more than a socket holds
    if rank == 1:
        work = dist.irecv(message, 0, tag=1)
        store.set("receiver", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
    receiver = int(store.get("receiver"))
    while Path(f"/proc/{receiver}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    failure = Failure()
    waiter = _Waiter(1, failure, longest_s=2.0)
    waiter.put(lambda: dist.group.WORLD.send([message], 1, 1), message, CpuEvent(failure, "a message"))
    time.sleep(0.5)  # the first part is in the socket
    os.kill(receiver, signal.SIGKILL)
    waiter.close(wait_s=30.0)
    return [type(failure.first).__name__, [thread.name for thread in threading.enumerate() if "link" in thread.name]]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs to know of a process whether it is stopped")
def test_a_thread_that_sends_to_a_rank_that_dies_ends():
    assert in_processes(2, stopped_while_receiving, survivors=[0]) == [["PeerLost", []], None]
