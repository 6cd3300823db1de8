import random
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.errors import InputError
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime import forward_only
from runtime.program import RECEIVE_AHEAD, UNSENT, Compute, Link, Message, Move, build
from tests.random_schedules import random_problem, random_schedule


def random_plan(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    return Plan(problem, random_schedule(problem, rng))


def programs(plan):
    sizes = [100 * (s + 1) for s in range(plan.problem.num_stages - 1)]
    return [build(plan, device, sizes) for device in range(plan.problem.num_devices)]


seeds = st.integers(0, 2**32)
many = settings(max_examples=150, deadline=None)


@given(seeds)
@many
def test_every_op_is_done_once_on_its_device_in_the_order_of_its_lane(seed):
    plan = random_plan(seed)
    for program, order in zip(programs(plan), semantics.device_orders(plan.problem, plan.ops), strict=True):
        computes = [item.op for item in program.items if isinstance(item, Compute)]
        moves = [item for item in program.items if isinstance(item, Move)]
        assert computes == order.compute
        assert [item.op for item in moves if item.kind == Kind.O] == order.offloads
        assert [item.op for item in moves if item.kind == Kind.R] == order.reloads


@given(seeds)
@many
def test_what_an_op_waits_for_comes_before_it_in_the_program(seed):
    plan = random_plan(seed)
    orders = semantics.device_orders(plan.problem, plan.ops)
    for program, order in zip(programs(plan), orders, strict=True):
        before = set()
        for item in program.items:
            assert before.issuperset(order.waits.get(item.op, ()))
            if isinstance(item, Compute):
                assert before.issuperset(item.waits)
            else:
                assert before.issuperset(item.after)
                own = {plan.ops[i][:3] for i in before}
                assert (Kind.F, item.stage, item.microbatch) in own
                if item.kind == Kind.R:
                    assert (Kind.O, item.stage, item.microbatch) in {plan.ops[i][:3] for i in item.after}
            before.add(item.op)


@given(seeds)
@many
def test_a_backward_waits_for_its_reload(seed):
    plan = random_plan(seed)
    for program in programs(plan):
        reloads = {(m.stage, m.microbatch): m.op for m in program.items if isinstance(m, Move) and m.kind == Kind.R}
        for item in program.items:
            if item.kind in (Kind.B, Kind.BW) and (item.stage, item.microbatch) in reloads:
                assert reloads[item.stage, item.microbatch] in item.waits


@given(seeds)
@many
def test_every_input_from_another_device_is_received_once_before_its_use(seed):
    plan = random_plan(seed)
    problem = plan.problem
    for program in programs(plan):
        posted, open_bytes, most = [], 0, 0
        for item in program.items:
            if not isinstance(item, Compute):
                continue
            posted += item.post
            open_bytes += sum(100 * m.stage for m in item.post)
            most = max(most, open_bytes)
            if item.takes is not None and not item.takes.gradient:
                sender = problem.stages[item.stage - 1].device
                if sender != program.device:
                    assert item.takes in posted
                    open_bytes -= 100 * item.stage
            posted += item.post_ahead
            open_bytes += sum(100 * m.stage for m in item.post_ahead)
            most = max(most, open_bytes)
        expected = {
            Message(False, s, j)
            for s in problem.stages_of[program.device]
            if s and problem.stages[s - 1].device != program.device
            for j in range(problem.num_microbatches)
        }
        assert len(posted) == len(set(posted)) and set(posted) == expected
        assert open_bytes == 0 and program.receive_bytes == most


def test_receives_stay_a_bounded_number_ahead_where_use_follows_sending():
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    m = 12
    problem = Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": d, **stage} for d in range(2)],
            "comm_ms": [0.0],
        }
    )
    ops = [Op(Kind.F, 0, j, j, j + 1) for j in range(m)]
    for j in range(m):
        t = 1.0 + 3 * j
        ops += [Op(Kind.F, 1, j, t, t + 1), Op(Kind.BW, 1, j, t + 1, t + 3)]
        ops.append(Op(Kind.BW, 0, j, 40.0 + 2 * j, 42.0 + 2 * j))
    program = build(Plan(problem, Ops.of(ops)), 1, [100])
    assert program.receive_bytes == RECEIVE_AHEAD * 100
    assert program.message_bytes == (RECEIVE_AHEAD + UNSENT) * 100


class Wire:
    """The strictest network there is: a message goes only when both ends have come to it, in the order of each."""

    def __init__(self):
        self.sends, self.receives, self.gone = defaultdict(deque), defaultdict(deque), set()

    def run(self):
        moved = False
        for link in list(self.sends):
            while self.sends[link] and self.receives[link]:
                assert self.sends[link][0] == self.receives[link][0], "the two ends disagree about the order"
                self.gone.add(self.sends[link].popleft())
                self.receives[link].popleft()
                moved = True
        return moved


def replay(problem, programs, rng):
    """Run the programs of all devices over such a wire, in a random interleaving; what is left when nothing moves."""
    owner = [stage.device for stage in problem.stages]
    todo = [deque(i for i in p.items if isinstance(i, Compute)) for p in programs]
    orders = {link: messages for p in programs for link, messages in p.gradients_from.items()}
    backwards = any(link.gradient for p in programs for link in p.links)
    wire, posted = Wire(), defaultdict(int)
    here = set()
    unsent = defaultdict(list)

    def link_of(message):
        other = message.stage + 1 if message.gradient else message.stage - 1
        return Link(owner[other], owner[message.stage], message.gradient)

    def post_gradients():
        for link, messages in orders.items():
            # The place for a gradient is there when the output that it answers has been sent.
            while posted[link] < len(messages):
                message = messages[posted[link]]
                if Message(False, message.stage + 1, message.microbatch) not in wire.gone:
                    break
                wire.receives[link].append(message)
                posted[link] += 1

    def step(device):
        item = todo[device][0]
        if item.gives is not None and (item.gives.gradient or not backwards):
            link = link_of(item.gives)
            if sum(message not in wire.gone for message in unsent[link]) >= UNSENT:
                return False
        for message in item.post:
            wire.receives[link_of(message)].append(message)
        todo[device][0] = item = Compute(*item_without_posts(item))
        if item.takes is not None and item.takes not in here and item.takes not in wire.gone:
            return False
        for message in item.post_ahead:
            wire.receives[link_of(message)].append(message)
        if item.gives is not None:
            link = link_of(item.gives)
            if link.sender == link.receiver:
                here.add(item.gives)
            else:
                wire.sends[link].append(item.gives)
                if link.gradient or not backwards:
                    unsent[link].append(item.gives)
        todo[device].popleft()
        return True

    moving = True
    while moving:
        moving = False
        for device in rng.sample(range(len(todo)), len(todo)):
            moving |= bool(todo[device]) and step(device)
            moving |= rng.random() < 0.5 and wire.run()
            post_gradients()
        moving |= wire.run()
        post_gradients()
        moving |= wire.run()
    return [item for items in todo for item in items], [m for queue in wire.sends.values() for m in queue]


def item_without_posts(item):
    values = {**item.__dict__, "post": ()}
    return [values[name] for name in Compute.__dataclass_fields__]


@given(seeds)
@settings(max_examples=200, deadline=None)
def test_no_plan_deadlocks_on_links_that_keep_order_and_buffer_nothing(seed):
    plan = random_plan(seed)
    left, unsent = replay(plan.problem, programs(plan), random.Random(seed))
    assert not left and not unsent


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_no_schedule_of_forwards_deadlocks_there_either(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=rng.randint(1, 9), stages_per_device=rng.randint(1, 3))
    bounds = [100] * (problem.num_stages - 1)
    found = [forward_only.build(problem, device, bounds) for device in range(problem.num_devices)]
    cells = [(item.stage, item.microbatch) for program in found for item in program.items]
    assert len(cells) == len(set(cells)) == problem.num_stages * problem.num_microbatches
    left, unsent = replay(problem, found, rng)
    assert not left and not unsent


def test_forwards_flow_through_the_stages():
    """With equal stages in a line no device waits once it has begun; in a V the chunks take turns."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    for places in ([0, 1, 2], [0, 1, 1, 0]):
        problem = Problem.model_validate(
            {
                "num_microbatches": 6,
                "devices": [{"memory_bytes": None}] * (max(places) + 1),
                "stages": [{"device": d, **stage} for d in places],
                "comm_ms": [0.0] * (len(places) - 1),
            }
        )
        order = forward_only.forwards(problem)
        assert sorted(order) == [(s, j) for s in range(len(places)) for j in range(6)]
        free, end = [0.0] * problem.num_devices, {}
        for s, j in order:
            start = max(free[places[s]], end.get((s - 1, j), 0.0))
            free[places[s]] = end[s, j] = start + 1.0
        busy = 6 * len(places) / problem.num_devices
        assert max(end.values()) <= busy + len(places)


def test_an_order_that_cannot_be_replayed_is_refused():
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10, "offloadable_bytes": 10}
    problem = Problem.model_validate(
        {
            "num_microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [{"device": 0, "offload_ms": 1.0, "reload_ms": 1.0, **stage}],
            "comm_ms": [],
        }
    )
    ops = Ops.of([Op(Kind.F, 0, 0, 0, 1), Op(Kind.R, 0, 0, 1, 2), Op(Kind.BW, 0, 0, 2, 4), Op(Kind.O, 0, 0, 5, 6)])
    with pytest.raises(InputError, match="expected a valid plan"):
        build(Plan(problem, ops), 0, [])
