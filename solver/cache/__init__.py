"""The schedule cache: schedules of problems solved before, as instant answers and as starts for the search."""

from __future__ import annotations

from solver.cache.entry import Entry
from solver.cache.store import Cache
from solver.folder import default_folder

__all__ = ["Cache", "Entry", "default_folder"]
