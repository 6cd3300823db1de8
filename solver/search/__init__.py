"""Search around the list scheduler: over rules, then around the best schedule."""

from __future__ import annotations

from solver.search.around import search_around
from solver.search.rules import search_rules

__all__ = ["search_around", "search_rules"]
