"""Measures the model of a config in place: on its ranks, inside a real schedule."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.config import Config
from optpipe.profile import Profile


def profile(config: Config, on_progress: Callable[[str], None] | None = None) -> Profile:
    """Measure the model of a config on one local rank a device, or on the ranks of torchrun.

    Parameters
    ----------
    config
        Needs ``model``. A balanced partition is settled first, from measured costs of the layers.
    on_progress
        Called with a short text at each phase, in the launching process (under torchrun: on rank 0).

    Returns
    -------
    Profile
        The same on every rank under torchrun; only ``launch.is_chief()`` should write it.

    Raises
    ------
    InputError
        The config has no model, or asks for devices that are not there.
    RunFailed
        A rank failed: the first cause.
    """
    raise NotImplementedError
