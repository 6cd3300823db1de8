"""OptPipe: plans and runs pipeline-parallel training.

The main verbs are here without more imports, and each loads what it needs when it is first used, so that
``import optpipe`` stays fast and loads no torch:

    import optpipe
    plan = optpipe.solve(optpipe.load("problem.json"), time_limit=30)
    optpipe.show(plan)
    plan.write("plan.json")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Name -> the module that has it. No name is that of a module here: importing that would put it in the name's place.
_VERBS = {
    "Config": "optpipe.config",
    "Kind": "optpipe.ops",
    "Op": "optpipe.ops",
    "Ops": "optpipe.ops",
    "Plan": "optpipe.plan",
    "Problem": "optpipe.problem",
    "SolveOptions": "solver.options",
    "compare": "solver.compare",
    "explain": "optpipe.words",
    "export": "optpipe.formats",
    "gantt": "optpipe.draw",
    "load": "optpipe.notebook",
    "read_task": "optpipe.task",
    "show": "optpipe.notebook",
    "solve": "solver.solve",
    "train": "runtime.train",
    "verify_plan": "optpipe.verify",
}

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'optpipe' has no attribute {name!r}")
    return getattr(import_module(_VERBS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_VERBS})
