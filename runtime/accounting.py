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

What autograd saves is counted by taking it in hand (``saved``), which has its price: where nothing limits the device's
memory, one run counts all of it, and those after it only what the plan moves.

A storage is counted once, however many hold it, and as activation where at least one holder is one. So the level never
exceeds the plan's, which adds up stages as if they shared nothing.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


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
        # Holders of each storage; where there are both, it counts as activation.
        self._activations: dict[int, int] = {}
        self._messages: dict[int, int] = {}
        self.activation_bytes = self.message_bytes = 0
        self.activation_peak = self.message_peak = 0

    def hold(self, tensor: Tensor, *, message: bool = False) -> Hold:
        """Count the storage of ``tensor`` until the hold is released; the hold keeps it alive."""
        storage = tensor.untyped_storage()
        return Hold(self, storage, storage._cdata, message=message)

    def holders(self, storage: torch.UntypedStorage) -> int:
        """How many holds this storage has."""
        key = storage._cdata
        with self._lock:
            return self._activations.get(key, 0) + self._messages.get(key, 0)

    def reset_peaks(self) -> None:
        """Start the peaks anew, from what is held now."""
        with self._lock:
            self.activation_peak, self.message_peak = self.activation_bytes, self.message_bytes

    def take_peak(self) -> tuple[int, int]:
        """Activation bytes now, and the most since the last call; the peak starts anew from now."""
        with self._lock:
            peak, self.activation_peak = self.activation_peak, self.activation_bytes
            return self.activation_bytes, peak

    # Every tensor that autograd saves comes by here: it has to be quick.

    def _add(self, key: int, nbytes: int) -> None:
        """One activation holder more."""
        with self._lock:
            before = self._activations.get(key, 0)
            self._activations[key] = before + 1
            if before == 0:
                if key in self._messages:
                    self.message_bytes -= nbytes
                self.activation_bytes += nbytes
                if self.activation_bytes > self.activation_peak:
                    self.activation_peak = self.activation_bytes

    def _drop(self, key: int, nbytes: int) -> None:
        """One activation holder less."""
        with self._lock:
            left = self._activations[key] - 1
            if left:
                self._activations[key] = left
                return
            del self._activations[key]
            self.activation_bytes -= nbytes
            if key in self._messages:
                self._more_messages(nbytes)

    def _add_message(self, key: int, nbytes: int) -> None:
        """One message holder more."""
        with self._lock:
            before = self._messages.get(key, 0)
            self._messages[key] = before + 1
            if before == 0 and key not in self._activations:
                self._more_messages(nbytes)

    def _drop_message(self, key: int, nbytes: int) -> None:
        """One message holder less."""
        with self._lock:
            left = self._messages[key] - 1
            if left:
                self._messages[key] = left
                return
            del self._messages[key]
            if key not in self._activations:
                self.message_bytes -= nbytes

    def _more_messages(self, nbytes: int) -> None:
        self.message_bytes += nbytes
        self.message_peak = max(self.message_peak, self.message_bytes)


class Hold:
    """One holder of a storage: it is counted, and kept alive, until ``release``."""

    __slots__ = ("_key", "_ledger", "_message", "_storage", "nbytes")

    def __init__(self, ledger: Ledger, storage: torch.UntypedStorage, key: int, *, message: bool = False) -> None:
        self._ledger, self._key, self._message = ledger, key, message
        self._storage: torch.UntypedStorage | None = storage
        self.nbytes: int = storage.nbytes()
        if message:
            ledger._add_message(key, self.nbytes)
        else:
            ledger._add(key, self.nbytes)

    @property
    def storage(self) -> torch.UntypedStorage:
        assert self._storage is not None, "the hold was released"
        return self._storage

    def as_activation(self) -> Hold:
        """Count it as activation bytes from now on."""
        if self._message:
            self._message = False
            # In this order, under one lock, no level in between is seen.
            with self._ledger._lock:
                self._ledger._add(self._key, self.nbytes)
                self._ledger._drop_message(self._key, self.nbytes)
        return self

    def as_message(self) -> Hold:
        """Count it as message bytes from now on."""
        if not self._message:
            self._message = True
            with self._ledger._lock:
                self._ledger._add_message(self._key, self.nbytes)
                self._ledger._drop(self._key, self.nbytes)
        return self

    def split_off(self) -> Hold:
        """Give the hold to an object of its own: what is left here holds nothing."""
        other = Hold.__new__(Hold)
        other._ledger, other._key, other._message = self._ledger, self._key, self._message
        other.nbytes = self.nbytes
        other._storage, self._storage = self._storage, None
        return other

    def release(self) -> None:
        """Hold it no more. Twice does no harm."""
        storage, self._storage = self._storage, None
        if storage is not None:
            if self._message:
                self._ledger._drop_message(self._key, self.nbytes)
            else:
                self._ledger._drop(self._key, self.nbytes)

    def __del__(self) -> None:
        if self._storage is not None:
            self.release()
