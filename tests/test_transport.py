import threading
import time

import pytest
import torch

from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime import nccl
from runtime.accounting import Ledger
from runtime.events import CpuEvent, Failure
from runtime.program import UNSENT, Message, build
from runtime.transport import LocalTransport, Parcel, RankTransport, TensorSpec

SPEC = TensorSpec((2, 3))


class Manual(RankTransport):
    """A network whose deliveries the test makes itself."""

    def __init__(self, program, owners, ledger):
        super().__init__(program, owners, [SPEC] * (len(owners) - 1), torch.device("cpu"), ledger, Failure())
        self.sent, self.received = {}, {}

    def _announce(self, message):
        self._arrivals[message] = CpuEvent(self._failure, str(message))

    def _send(self, message, tensor):
        self.sent[message] = event = CpuEvent(self._failure)
        return event

    def _receive(self, message, buffer, after):
        if message not in self._arrivals:
            self._announce(message)
        self.received[message] = buffer

    def _then(self, event, work):
        event.then(work)

    _when_sent = _then

    def _may_post(self, sent):
        return sent.done

    def arrive(self, message, value):
        self.received[message].fill_(value)
        self._arrivals[message].set()


def plan(m, backward=None):
    """Two devices with a stage each; stage 1 runs its backwards in the given order."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    problem = Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": d, **stage} for d in range(2)],
            "comm_ms": [0.0],
        }
    )
    ops = [Op(Kind.F, 0, j, j, j + 1) for j in range(m)] + [Op(Kind.F, 1, j, m + j, m + j + 1) for j in range(m)]
    for n, j in enumerate(backward or range(m)):
        ops += [Op(Kind.BW, 1, j, 10 * m + 2 * n, 10 * m + 2 * n + 2)]
        ops += [Op(Kind.BW, 0, j, 20 * m + 2 * n, 20 * m + 2 * n + 2)]
    return Plan(problem, Ops.of(ops))


def parcel(ledger, value=0.0):
    tensor = torch.full(SPEC.shape, value)
    return Parcel(tensor, ledger.hold(tensor))


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def first(ledger):
    return Manual(build(plan(3), 0, [SPEC.nbytes]), [0, 1], ledger)


@pytest.fixture
def second(ledger):
    return Manual(build(plan(3), 1, [SPEC.nbytes]), [0, 1], ledger)


def test_within_a_rank_the_very_tensor_is_handed_over(ledger):
    transport, message, given = LocalTransport(), Message(False, 1, 0), parcel(ledger)
    transport.give(message, given)
    assert transport.take(message).tensor is given.tensor


def test_an_output_that_was_sent_makes_room_for_its_gradient(first, ledger):
    given = parcel(ledger, 1.0)
    output, gradient = Message(False, 1, 0), Message(True, 0, 0)
    first.give(output, given)
    assert gradient not in first.received  # the memory is still being sent
    first.sent[output].set()
    assert first.received[gradient].data_ptr() == given.tensor.data_ptr()
    assert ledger.activation_bytes == SPEC.nbytes and ledger.message_bytes == 0
    first.arrive(gradient, 5.0)
    assert torch.equal(first.take(gradient).tensor, torch.full(SPEC.shape, 5.0))


def test_an_output_that_the_backward_needs_is_not_overwritten(first, ledger):
    given = parcel(ledger, 1.0)
    saved = ledger.hold(given.tensor)
    output, gradient = Message(False, 1, 0), Message(True, 0, 0)
    first.give(output, given)
    first.sent[output].set()
    first.arrive(gradient, 5.0)
    assert torch.equal(given.tensor, torch.ones(SPEC.shape))
    assert ledger.activation_bytes == 2 * SPEC.nbytes
    saved.release()
    assert ledger.activation_bytes == SPEC.nbytes


class Instant:
    """A point in a stream of a GPU, without one."""

    def __init__(self):
        self.done = False

    def wait(self):
        pass


class Enqueued(nccl.NcclTransport):
    """NCCL's, whose streams get to an event when the test says so."""

    def _enqueue(self, link, after, start):
        return Instant()


@pytest.mark.parametrize("seen", [True, False])
def test_on_nccl_an_output_stays_until_it_is_sent(seen, ledger, monkeypatch):
    """Nothing waits on the host there: the receive of the gradient is posted while the output is still being sent."""
    monkeypatch.setattr(nccl, "connect_links", lambda *_: {})
    parts = build(plan(3), 0, [SPEC.nbytes]), [0, 1], [SPEC], torch.device("cpu"), ledger, Failure()
    transport = Enqueued(*parts, ranks=[0, 1])
    given = parcel(ledger)
    saved = ledger.hold(given.tensor)
    transport.give(Message(False, 1, 0), given)
    saved.release()  # offloaded, say
    gradient = Message(True, 0, 0)
    assert ledger.activation_bytes == 2 * SPEC.nbytes, "what is being sent, and the place of its gradient"
    if seen:
        transport._leaving[gradient][0].done = True
        transport.give(Message(False, 1, 1), parcel(ledger))
        assert ledger.activation_bytes == 2 * SPEC.nbytes, "that place, and what is sent now"
    else:
        taken = transport.take(gradient)
        assert taken.tensor.shape == SPEC.shape
        assert ledger.activation_bytes == SPEC.nbytes
    assert not transport._leaving


def test_gradients_are_received_in_the_order_in_which_they_are_sent(ledger):
    transport = Manual(build(plan(3, backward=[2, 0, 1]), 0, [SPEC.nbytes]), [0, 1], ledger)
    for j in range(3):
        transport.give(Message(False, 1, j), parcel(ledger))
    order = []
    for j in (1, 0, 2):
        transport.sent[Message(False, 1, j)].set()
        order.append([message.microbatch for message in transport.received])
    assert order == [[], [], [2, 0, 1]]


def test_a_gradient_may_be_waited_for_before_its_receive_is_posted(first, ledger):
    output, gradient = Message(False, 1, 0), Message(True, 0, 0)
    first.give(output, parcel(ledger))
    taken = []
    thread = threading.Thread(target=lambda: taken.append(first.take(gradient)))
    thread.start()
    first.sent[output].set()
    first.arrive(gradient, 2.0)
    thread.join(5)
    assert torch.equal(taken[0].tensor, torch.full(SPEC.shape, 2.0))


def test_received_inputs_are_messages_until_they_are_used(second, ledger):
    message = Message(False, 1, 0)
    second.post([message])
    assert (ledger.activation_bytes, ledger.message_bytes) == (0, SPEC.nbytes)
    second.arrive(message, 1.0)
    taken = second.take(message)
    taken.hold.as_activation()
    assert (ledger.activation_bytes, ledger.message_bytes) == (SPEC.nbytes, 0)
    assert ledger.activation_peak == ledger.message_peak == SPEC.nbytes
    taken.hold.release()
    assert (ledger.activation_bytes, ledger.message_bytes) == (0, 0)


def test_few_gradients_are_unsent_at_a_time(second, ledger):
    messages = [Message(True, 0, j) for j in range(3)]
    for message in messages[:UNSENT]:
        second.before_giving(message)
        second.give(message, parcel(ledger))
    assert ledger.message_bytes == UNSENT * SPEC.nbytes
    last, through = messages[UNSENT], threading.Event()
    thread = threading.Thread(target=lambda: (second.before_giving(last), through.set()))
    thread.start()
    time.sleep(0.05)
    assert not through.is_set()
    second.sent[messages[0]].set()
    thread.join(5)
    assert through.is_set() and ledger.message_bytes == (UNSENT - 1) * SPEC.nbytes


def test_the_end_of_a_step_waits_for_every_send(second, ledger):
    message = Message(True, 0, 0)
    second.give(message, parcel(ledger))
    thread = threading.Thread(target=second.drain)
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    second.sent[message].set()
    thread.join(5)
    assert not thread.is_alive()
    assert ledger.message_bytes == ledger.activation_bytes == 0


def test_who_waits_for_a_send_finds_its_callbacks_done():
    """The memory of a message counts until its callback has run; the next message must not be counted beside it."""
    for _ in range(50):
        event, order = CpuEvent(Failure(), "a send", wakes_last=True), []
        event.then(lambda order=order: (time.sleep(0.001), order.append("booked out")))
        thread = threading.Thread(target=event.set)
        thread.start()
        event.wait()
        order.append("next")
        thread.join()
        event.wait()
        assert order == ["booked out", "next"]
