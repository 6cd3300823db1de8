"""Search around the list scheduler: over policies, over what single stages want, around the best schedule."""

from __future__ import annotations

from solver.search.around import search_around
from solver.search.rules import search_rules
from solver.search.stages import search_stages

__all__ = ["search_around", "search_rules", "search_stages"]
