"""Live activation bytes of a device, counted at storage level.

What counts as activation bytes of (stage s, microbatch j), that is, what the plan's ``activation_bytes`` covers:

- what autograd has saved for the backward, the stage's input among it where it is saved;
- the input while F runs, saved or not;
- the *output place*: the output from F until it has been sent (or taken by the next stage on this device), from then on
  the buffer that its gradient is received into, until B ends. It is counted once, whatever is in it, and it is not
  offloaded;
- gradients that wait for W, and the gradient for the input until B ends.

What does not count: parameters, buffers, the batch itself (inputs and targets), and the workspace of the op that runs
(temporaries that no one holds when it ends): one op runs at a time, so that is a constant of the device.

Messages under way are counted apart, as *message bytes*: inputs received before their F starts, and gradients that B
has made and that are not sent yet. Both are bounded by constants that follow from the plan (`Program.message_bytes`).

A storage is counted once, however many hold it, and as activation where at least one holder is one. So the level never
exceeds the plan's, which adds up stages as if they shared nothing.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_ACTIVATION, _MESSAGE = 0, 1


class Ledger:
    """Counts held storages. Safe to use from several threads.

    Attributes
    ----------
    activation_bytes, message_bytes
        Held now.
    activation_peak, message_peak
        The most since ``reset_peaks``.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection inside may drop saved tensors, which release their holds.
        self._lock = threading.RLock()
        self._holders: dict[int, list[int]] = {}  # storage -> [activation holders, message holders]
        self.activation_bytes = self.message_bytes = 0
        self.activation_peak = self.message_peak = 0

    def hold(self, tensor: Tensor, *, message: bool = False) -> Hold:
        """Count the storage of ``tensor`` until the hold is released; the hold keeps it alive."""
        return Hold(self, tensor.untyped_storage(), _MESSAGE if message else _ACTIVATION)

    def holders(self, storage: torch.UntypedStorage) -> int:
        """How many holds this storage has."""
        with self._lock:
            return sum(self._holders.get(storage._cdata, (0, 0)))

    def reset_peaks(self) -> None:
        """Start the peaks anew, from what is held now."""
        with self._lock:
            self.activation_peak, self.message_peak = self.activation_bytes, self.message_bytes

    def _change(self, storage: torch.UntypedStorage, drop: int | None, add: int | None) -> None:
        """One holder less and one more of the given classes, as one change: no level in between is seen."""
        key = storage._cdata
        with self._lock:
            counts = self._holders.get(key)
            if counts is None:
                assert drop is None and add is not None
                self._holders[key] = [int(add == _ACTIVATION), int(add == _MESSAGE)]
                self._level(add, storage.nbytes())
                return
            before = _class_of(counts)
            if drop is not None:
                counts[drop] -= 1
            if add is not None:
                counts[add] += 1
            after = _class_of(counts)
            if after is None:
                del self._holders[key]
            if after == before:
                return
            size = storage.nbytes()
            if before is not None:
                self._level(before, -size)
            if after is not None:
                self._level(after, size)

    def _level(self, which: int, delta: int) -> None:
        if which == _ACTIVATION:
            self.activation_bytes += delta
            self.activation_peak = max(self.activation_peak, self.activation_bytes)
        else:
            self.message_bytes += delta
            self.message_peak = max(self.message_peak, self.message_bytes)


def _class_of(counts: list[int]) -> int | None:
    return _ACTIVATION if counts[_ACTIVATION] else _MESSAGE if counts[_MESSAGE] else None


class Hold:
    """One holder of a storage: it is counted, and kept alive, until ``release``."""

    __slots__ = ("_class", "_ledger", "_storage", "nbytes")

    def __init__(self, ledger: Ledger, storage: torch.UntypedStorage, which: int) -> None:
        self._ledger, self._class = ledger, which
        self._storage: torch.UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        ledger._change(storage, None, which)

    @property
    def storage(self) -> torch.UntypedStorage:
        assert self._storage is not None, "the hold was released"
        return self._storage

    def as_activation(self) -> Hold:
        """Count it as activation bytes from now on."""
        return self._become(_ACTIVATION)

    def as_message(self) -> Hold:
        """Count it as message bytes from now on."""
        return self._become(_MESSAGE)

    def _become(self, which: int) -> Hold:
        self._ledger._change(self.storage, self._class, which)
        self._class = which
        return self

    def release(self) -> None:
        """Hold it no more. Twice does no harm."""
        storage, self._storage = self._storage, None
        if storage is not None:
            self._ledger._change(storage, self._class, None)

    def __del__(self) -> None:
        self.release()
