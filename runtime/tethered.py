"""Runs a module beside the process that started it, out of its way, and no longer than it.

    python -m runtime.tethered --folder /tmp/some-folder cli solve /tmp/some-folder/plan.json ...

It takes what the other one leaves of the cores, and ends when its standard input does, which is when the other process
has closed it or is gone, however it went. Then the folder goes too.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import sys
import threading

#: The least that a process can ask for.
_NICENESS = 19


def _end_with_the_input(folder: str | None) -> None:
    while os.read(0, 4096):
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _step_aside() -> None:
    """Take cores that nobody wants; also where the other process runs ahead of others, which is inherited."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(_NICENESS)


def main() -> None:
    """Run the module that is named first, with the arguments behind it, as ``python -m`` would."""
    _step_aside()
    del sys.argv[0]
    folder = None
    if sys.argv[0] == "--folder":
        folder = sys.argv[1]
        del sys.argv[:2]
    threading.Thread(target=_end_with_the_input, args=(folder,), daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
