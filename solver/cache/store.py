"""The folder of the cache: finding, adding and forgetting entries.

One file an entry, written whole or not at all, and no index: processes that share the folder need no locks, and a
file that is broken, foreign or gone is passed over. Nothing that a file says is believed: what a lookup gives has been
timed and verified for the problem asked about.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from optpipe import files, metrics, semantics
from optpipe.errors import InputError
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.adapt import repaired, retimed
from solver.cache.entry import Entry, read_head, read_ops, text_of
from solver.cache.normal import Normal, distances, normalise, vector
from solver.folder import default_folder
from solver.microbatches import with_microbatches
from solver.tables import tables

#: Stored microbatch counts differ from the problem's by so many at most.
_NEAR_MICROBATCHES = 2

#: A lookup re-times stored schedules of so many ops in all (2 microseconds each), one at least.
_OPS_RETIMED = 10_000

#: A lookup list-schedules so many ops in all (15 microseconds each), once at least where it has nothing else.
_OPS_SCHEDULED = 2_500

_OURS = re.compile(r"schedule-[0-9a-f]{16}-(?P<m>\d+)-[0-9a-f]{16}\.json")
_LEFT_BEHIND = re.compile(r"\.schedule-[0-9a-f]{16}-\d+-[0-9a-f]{16}\.json\..*")

#: A temporary file older than this belongs to no process that still writes it (seconds).
_STALE = 3600.0


class _Near(NamedTuple):
    """An entry whose problem is like the one asked about, and how far it is from it."""

    apart: float
    entry: Entry


class _Answer(NamedTuple):
    """A schedule for the problem, not verified yet, and where it comes from. Sorts the best first."""

    value: float
    offloaded: int
    number: int
    ops: Ops
    near: _Near
    hit: str


class Cache:
    """Schedules of problems solved before.

    Parameters
    ----------
    folder
        Where the entries are; default the user's cache folder, see :func:`default_folder`. It is made when the first
        entry is written.
    most_entries, most_bytes
        Beyond these the entries that were of no use for longest go.
    """

    def __init__(
        self, folder: str | Path | None = None, *, most_entries: int = 256, most_bytes: int = 256 << 20
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.most_entries, self.most_bytes = most_entries, most_bytes

    def lookup(self, problem: Problem, objective: str = "makespan") -> tuple[Ops, dict[str, Any]] | None:
        """The best schedule that the orders stored for similar problems give for this one.

        Parameters
        ----------
        problem
            The problem.
        objective
            ``makespan`` or ``span``.

        Returns
        -------
        tuple
            A valid schedule, and facts about it: ``hit`` (``exact``, ``near``, ``repaired``), ``entry``,
            ``distance``, ``microbatches`` (of the entry), ``candidates`` (entries of this structure), ``tried``,
            ``makespan_ms``, ``span_ms``, ``seconds``. None where nothing stored fits.
        """
        begin = time.perf_counter()
        normal = normalise(problem, objective)
        near = self._nearest(normal)
        answers = list(_retimed(problem, objective, normal, near))
        best = _first_valid(problem, answers)
        answers += _repaired(problem, objective, best or min(answers, key=lambda a: a.number, default=None), not best)
        best = _first_valid(problem, answers)
        if best is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(best.near.entry.path)
        return best.ops, {
            "hit": best.hit,
            "entry": best.near.entry.path.name,
            "distance": round(best.near.apart, 6),
            "microbatches": best.near.entry.microbatches,
            "candidates": len(near),
            "tried": len(answers),
            "makespan_ms": semantics.makespan(best.ops),
            "span_ms": metrics.span(problem, best.ops),
            "seconds": round(time.perf_counter() - begin, 6),
        }

    def store(self, plan: Plan, objective: str = "makespan") -> bool:
        """Keep a plan, unless the entry of its cell is an order that is no worse for its problem.

        A cache that cannot be written to is no reason to fail: then nothing is kept.

        Parameters
        ----------
        plan
            A plan that verifies.
        objective
            What it was made for: ``makespan`` or ``span``.

        Returns
        -------
        bool
            Whether the plan was written.
        """
        normal = normalise(plan.problem, objective)
        path = self.folder / f"schedule-{normal.structure}-{normal.microbatches}-{normal.cell}.json"
        known = _value_of_entry(path, plan.problem, objective, normal)
        if known is not None and known <= _value(plan.problem, plan.ops, objective) * (1 + semantics.TOLERANCE):
            with contextlib.suppress(OSError):
                os.utime(path)
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with files.whole_file(path) as stream:
                stream.write(text_of(plan, normal, objective))
        except (OSError, InputError):
            return False
        self._make_room()
        return True

    def entries(self) -> list[Entry]:
        """All sound entries, the last used first."""
        heads = (read_head(path) for path, _ in self._files())
        return sorted((head for head in heads if head), key=lambda entry: (-entry.used, entry.path.name))

    def clear(self) -> int:
        """Remove all entries, broken ones too; files that are not the cache's stay. Returns how many went."""
        found = self._files()
        self._remove_left_behind(0.0)
        return sum(_removed(path) for path, _ in found)

    def _files(self) -> list[tuple[Path, int]]:
        """The files of entries, by name, and the microbatches that each name says."""
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        return [(self.folder / name, int(match["m"])) for name in names if (match := _OURS.fullmatch(name))]

    def _nearest(self, normal: Normal) -> list[_Near]:
        """Entries of the problem's structure and about its microbatches, the nearest first, each order once."""
        prefix, length, found = f"schedule-{normal.structure}-", len(vector(normal.values)), []
        for path, m in self._files():
            if path.name.startswith(prefix) and abs(m - normal.microbatches) <= _NEAR_MICROBATCHES:
                entry = read_head(path)
                sound = entry and (entry.structure, entry.microbatches) == (normal.structure, m)
                if entry and sound and len(entry.vector) == length:
                    found.append(entry)
        if not found:
            return []
        apart = distances(normal, [entry.vector for entry in found], [entry.microbatches for entry in found])
        order = sorted(range(len(found)), key=lambda i: (apart[i], found[i].path.name))
        first: dict[str, _Near] = {}
        for i in order:
            first.setdefault(found[i].order, _Near(float(apart[i]), found[i]))
        return list(first.values())

    def _make_room(self) -> None:
        """Forget the entries that were of no use for longest, beyond the cache's limits."""
        ages = []
        for path, _ in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                ages.append((status.st_mtime, path, status.st_size))
        ages.sort(reverse=True)
        total = 0
        for number, (_, path, size) in enumerate(ages):
            total += size
            if number and (number >= self.most_entries or total > self.most_bytes):
                _removed(path)
        self._remove_left_behind(_STALE)

    def _remove_left_behind(self, age: float) -> None:
        """Remove what writers that were ended left behind, if it is older than ``age`` seconds."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                path = self.folder / name
                if _LEFT_BEHIND.fullmatch(name) and time.time() - path.stat().st_mtime >= age:
                    _removed(path)


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _value(problem: Problem, ops: Ops, objective: str) -> float:
    return semantics.makespan(ops) if objective == "makespan" else metrics.span(problem, ops)


def _answer(problem: Problem, objective: str, number: int, ops: Ops, near: _Near, hit: str) -> _Answer:
    offloaded = int(semantics.moved_bytes(problem, ops)[ops.kind == Kind.O].sum())
    return _Answer(_value(problem, ops, objective), offloaded, number, ops, near, hit)


def _retimed(problem: Problem, objective: str, normal: Normal, nearest: list[_Near]) -> Iterator[_Answer]:
    """The orders of the nearest entries, as many as there is time for, on the problem's clock."""
    left, number = _OPS_RETIMED, 0
    for near in nearest:
        if left <= 0:
            return
        stored = read_ops(near.entry)
        if stored is None or stored.stages != problem.num_stages:
            continue
        for version in with_microbatches(stored, problem.num_microbatches):
            left -= len(version.kind)
            guess = version.ops(problem, normal.reference_ms)
            ops = retimed(problem, guess)  # an order that contradicts itself is no schedule, but can be repaired
            hit = "near" if near.apart else "exact"
            yield _answer(problem, objective, number, guess if ops is None else ops, near, hit)
            number += 1


def _repaired(problem: Problem, objective: str, base: _Answer | None, needed: bool) -> list[_Answer]:
    """What the list scheduler makes of an answer: as many versions as there is time for, one if one is needed."""
    if base is None:
        return []
    variants = max(int(needed), _OPS_SCHEDULED // len(base.ops))
    versions = repaired(problem, tables(problem), base.ops, variants)
    return [
        _answer(problem, objective, base.number + 1 + extra, ops, base.near, "repaired")
        for extra, ops in enumerate(versions)
    ]


def _first_valid(problem: Problem, answers: list[_Answer]) -> _Answer | None:
    """The best answer that breaks nothing."""
    ordered = sorted(answers, key=lambda a: (a.value, a.offloaded, a.number))
    return next((answer for answer in ordered if not verify(problem, answer.ops)), None)


def _value_of_entry(path: Path, problem: Problem, objective: str, normal: Normal) -> float | None:
    """What the order in a file is worth for a problem; None where it is not there, broken or does not fit."""
    entry = read_head(path)
    stored = read_ops(entry) if entry else None
    if stored is None or (stored.stages, stored.microbatches) != (problem.num_stages, problem.num_microbatches):
        return None
    ops = retimed(problem, stored.ops(problem, normal.reference_ms))
    return None if ops is None or verify(problem, ops) else _value(problem, ops, objective)
