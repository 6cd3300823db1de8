"""One step under a plan, on any number of ranks, beside one process."""

from __future__ import annotations

import random
import time

import torch

from optpipe import memory
from tests.pipelines import (
    gpipe,
    model_problem,
    one_f_one_b,
    one_process,
    plan_of_orders,
    random_plan,
    run_plan,
    v_order,
)

M = 8
#: Of a gradient, where sums are made in another order than in one process: float32, gradients below 1.
TOLERANCE = 1e-6


class Delays:
    """Random pauses in every lane."""

    def __init__(self, seed, longest_s=0.004):
        self.rng, self.longest_s = random.Random(seed), longest_s

    def __call__(self, kind, stage, microbatch):
        if self.rng.random() < 0.3:
            time.sleep(self.rng.random() * self.longest_s)


def known_plans(devices, dropout=0.0):
    """(name, plan): those in which every sum is made in the order of one process."""
    linear = model_problem(devices, 1, "linear", M, dropout)
    v = model_problem(devices, 2, "v", M, dropout)
    some = {(s, j) for s in range(devices) for j in range(M) if (s + j) % 3 != 2}
    yield "gpipe", plan_of_orders(linear, gpipe(devices, M))
    yield "1f1b", plan_of_orders(linear, one_f_one_b(devices, M))
    yield "zero bubble", plan_of_orders(linear, one_f_one_b(devices, M, split=True))
    yield "offloads", plan_of_orders(linear, gpipe(devices, M), some)
    yield "offloads and split", plan_of_orders(linear, one_f_one_b(devices, M, split=True), {(0, 1), (0, 3)})
    yield "v", plan_of_orders(v, v_order(devices, M))
    yield "v with offloads", plan_of_orders(v, v_order(devices, M), {(s, j) for s in (0, devices) for j in range(M)})


def random_plans(devices, seeds, dropout=0.0):
    problems = [
        model_problem(devices, 1, "linear", M, dropout),
        model_problem(devices, 2, "v", 4, dropout),
        model_problem(devices, 2, "interleaved", 5, dropout),
    ]
    for seed in seeds:
        yield f"random {seed}", random_plan(problems[seed % len(problems)], seed)


def check_run(name, plan, rank, *, exact, plain=None, **options):
    """Run a plan and compare: loss and gradients with one process, bytes with the plan and with nothing left."""
    problem = plan.problem
    steps = options.get("steps", 1)
    results, found, executor = run_plan(plan, rank, **options)
    if plain is None:
        plain = one_process(problem.num_stages, problem.num_microbatches, options.get("dropout", 0.0), steps - 1)
    own = {n: g for n, g in plain.gradients.items() if int(n.split(".")[0]) in problem.stages_of[rank]}
    assert found.keys() == own.keys(), name
    for key, value in own.items():
        if exact:
            assert torch.equal(found[key], value), f"{name}: {key}"
        else:
            assert float((found[key] - value).abs().max()) <= TOLERANCE, f"{name}: {key}"
    if problem.num_stages - 1 in problem.stages_of[rank]:
        assert results[-1].loss == plain.loss, name
    else:
        assert results[-1].loss is None
    peak = memory.peaks(problem, plan.ops)[rank]
    assert executor.planned_peak_bytes == peak
    for result in results:
        assert 0 < result.peak_bytes <= peak, name
        assert result.message_peak_bytes <= executor.message_bytes, name
        assert len(result.ops) == len(executor.program.items)
    assert executor.ledger.activation_bytes == executor.ledger.message_bytes == executor.pool.in_use == 0, name
    return [result.peak_bytes for result in results]


def check_on_ranks(rank, count):
    """Known orders bit for bit, random ones within rounding; with pauses anywhere, and dropout."""
    for name, plan in known_plans(count):
        check_run(name, plan, rank, exact=True, steps=2)
    for name, plan in random_plans(count, range(9 if count == 2 else 6)):
        check_run(name, plan, rank, exact=False)
    for seed, (name, plan) in enumerate(random_plans(count, range(9, 15 if count == 2 else 12), dropout=0.2)):
        delays = Delays(100 * rank + seed)
        check_run(f"{name} delayed", plan, rank, exact=False, dropout=0.2, before_op=delays)
    for name, plan in list(known_plans(count, dropout=0.2))[4:]:
        check_run(f"{name} delayed", plan, rank, exact=True, dropout=0.2, before_op=Delays(rank))
