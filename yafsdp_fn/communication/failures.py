"""Cleans up after an error in a step: are the communicators of use after it?

all ranks failed at one place          streams run dry; the communicators stay usable
elsewhere, alone, or in a collective   ranks are out of step: `lost` says why, and every later use is refused
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from yafsdp_fn.communication import agreement
from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.streams import CommunicationError


def clean_up(comms: Any, position: str, error: BaseException) -> None:
    """Lets the streams of `comms` run dry after `error`, and finds out whether all ranks failed at this position."""
    disagree = isinstance(error, RanksDisagree)
    # ranks that disagree have compared notes: nothing of it was issued
    broken = isinstance(error, CommunicationError) and not disagree
    midway = comms.called is not None if disagree else not broken
    if comms.stages > 1 and midway:
        # a receive that was issued ahead may wait for what this rank will never send: streams cannot run dry
        comms.steps.lost = f"this rank failed, and stages are never at one place ({position})"
        if comms.device.type == "cuda":
            abort_groups(comms)
        for stream in comms.streams.values():
            stream.abandon()
        return
    what = f"rank {comms.world_rank} of {comms.world}, {position}: {type(error).__name__}: {error}"
    if not comms.alone and comms.lost is None and not isinstance(error, CommunicationError):
        # the exception is raised only when the others have been waited for
        seconds = comms.abort_timeout.total_seconds()
        text = f"{what}. It waits up to {seconds:.0f} s for the others, to learn whether all failed here"
        print(text, file=sys.stderr, flush=True)
    comms.drain()
    if broken:
        comms.note_positions(error)
    if comms.alone or comms.lost is not None:
        return
    # did all ranks fail here?
    together = False
    text = f"rank {comms.world_rank} lost" if broken else f"{position}: {type(error).__name__}"
    with suppress(RuntimeError):
        together = agreement.same_on_all(text, comms.abort_group)
    if broken:
        comms.steps.lost = f"communication failed ({position})"
    elif not together:
        comms.steps.lost = f"this rank failed alone, or elsewhere than the others ({position})"
        comms.steps.failed = what


def abort_groups(comms: Any) -> None:
    """Aborts all groups at once: an abort waits for the kernels of its group, which may wait behind another's."""
    groups = [*comms.groups, *comms.others]
    with ThreadPoolExecutor(len(groups), initializer=begin_thread, initargs=(comms.device,)) as threads:
        list(threads.map(lambda group: group.process_group.abort(), groups))
