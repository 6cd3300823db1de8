"""Search around the list scheduler: over policies, over what single stages want, around the best schedule."""

from __future__ import annotations

from solver.search.portfolio import Portfolio

__all__ = ["Portfolio"]
