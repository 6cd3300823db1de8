"""Bytes that messages under way take, for an estimate: what a run receives ahead, and what it has not sent yet."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from optpipe.config import Config

#: As ``runtime.program`` has them: inputs received before their F, and gradients not sent yet, of one link.
RECEIVE_AHEAD, UNSENT = 1, 2


def under_way_bytes(config: Config, message: int) -> list[int]:
    """Per device what a profile finds (``runtime.program.Program.message_bytes`` of its trials), or a little more.

    It is the same where each link carries the inputs of one stage. Where it carries those of several (interleaved),
    they are used in another order than they come, and how many wait is the schedule's. Then it is a number that no
    trial exceeds for up to eight devices with four stages each.
    """
    devices, stages = config.pipeline.devices, config.pipeline.stage_devices
    links = Counter(pair for pair in pairwise(stages) if pair[0] != pair[1])
    waiting = [0] * devices
    for (_, device), count in links.items():
        ahead = RECEIVE_AHEAD if count == 1 else devices + config.pipeline.stages_per_device - 2
        sent = count * config.batch.microbatches
        waiting[device] += min(ahead, sent) + min(UNSENT, sent)
    return [message * count for count in waiting]
