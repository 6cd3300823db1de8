import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.accounting import Ledger

ACTIONS = st.sampled_from(["hold", "message", "release", "act", "msg"])
STEPS = st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=60)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_a_storage_counts_once_and_as_activation_where_any_holder_is_one(steps):
    ledger = Ledger()
    storages = [torch.empty(size + 1) for size in range(4)]
    holds, highest = [], [0, 0]
    for what, number in steps:
        if what in ("hold", "message"):
            tensor = storages[number % 4][: 1 + number % 2]  # a view counts as its storage
            holds.append([number % 4, what == "hold", ledger.hold(tensor, message=what == "message")])
        elif holds:
            entry = holds[number % len(holds)]
            if what == "release":
                holds.remove(entry)
                entry[2].release()
                entry[2].release()
            elif what == "act":
                entry[1] = True
                entry[2].as_activation()
            else:
                entry[1] = False
                entry[2].as_message()
        active = {index for index, activation, _ in holds if activation}
        messages = {index for index, _, _ in holds} - active
        levels = [sum(storages[i].untyped_storage().nbytes() for i in group) for group in (active, messages)]
        assert [ledger.activation_bytes, ledger.message_bytes] == levels
        highest = [max(pair) for pair in zip(highest, levels, strict=True)]
        assert [ledger.activation_peak, ledger.message_peak] == highest
    ledger.reset_peaks()
    assert [ledger.activation_peak, ledger.message_peak] == [ledger.activation_bytes, ledger.message_bytes]


def test_a_hold_keeps_its_storage_and_lets_it_go():
    from torch.multiprocessing.reductions import StorageWeakRef

    ledger, tensor = Ledger(), torch.ones(5)
    reference = StorageWeakRef(tensor.untyped_storage())
    hold = ledger.hold(tensor)
    del tensor
    assert not reference.expired() and ledger.activation_bytes == 20
    del hold
    assert reference.expired() and ledger.activation_bytes == 0
