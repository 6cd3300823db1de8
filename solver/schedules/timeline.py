"""Free stretches of a channel: where a transfer fits that should run as soon, or as late, as possible."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

_EPS = 1e-9


class Timeline:
    """What occupies one channel: intervals (start, end) that do not overlap, in ms; some may be empty."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def take(self, start: float, end: float) -> None:
        insort(self.taken, (start, end))

    def give_back(self, start: float, end: float) -> None:
        self.taken.remove((start, end))

    def first_conflict(self, start: float, end: float) -> tuple[float, float] | None:
        """An interval that overlaps [start, end]; None: it is free."""
        first = bisect_left(self.taken, (start, start))
        while first and not self._is_over(first - 1, start):
            first -= 1
        for k in range(first, len(self.taken)):
            begin, stop = self.taken[k]
            if begin >= end - _EPS:
                break
            if stop > start + _EPS:
                return begin, stop
        return None

    def _is_over(self, k: int, instant: float) -> bool:
        """Whether interval k, and so all before it, ended by then: behind an empty one may be one that did not."""
        begin, stop = self.taken[k]
        return stop - begin > _EPS and stop <= instant + _EPS


def earliest_gap(lanes: Sequence[Timeline], release: float, length: float) -> float:
    """The earliest start, not before ``release``, at which all lanes are free for ``length``."""
    start = release
    while (found := _conflict(lanes, start, start + length)) is not None:
        start = found[1]
    return start


def latest_gap(lanes: Sequence[Timeline], deadline: float, length: float) -> float:
    """The latest start that ends by ``deadline`` with all lanes free for ``length``; it may be before 0."""
    end = deadline
    while (found := _conflict(lanes, end - length, end)) is not None:
        end = found[0]
    return end - length


def _conflict(lanes: Sequence[Timeline], start: float, end: float) -> tuple[float, float] | None:
    for lane in lanes:
        if (found := lane.first_conflict(start, end)) is not None:
            return found
    return None
