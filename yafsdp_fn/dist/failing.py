"""Handles failures of a mesh's communicators: on this rank, on another one, or a collective that never ends.

    all ranks failed at one place          streams run dry; the communicators stay usable
    elsewhere, alone, or in a collective   ranks are out of step: `lost` says why, and every later use is refused

Successful steps do not enter this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.dist import agreement, where
from yafsdp_fn.dist.agreement import ConsistencyChecks
from yafsdp_fn.dist.streams import CommunicationError, Stream
from yafsdp_fn.dist.watchdog import PendingLabels, Watch


class Failing(ConsistencyChecks):
    """Communicators' handling of failures.

    streams: by name; none with one rank, which has no groups either
    lost: why the communicators can no longer be used, if so
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.lost: str | None = None
        self.streams: dict[str, Stream] = {}
        self._watch: Watch | None = None

    def under_way(self) -> PendingLabels:
        """Lists the communication that this rank is in now, for the watchdog's thread. On the CPU a rank that computes
        waits for nothing: its streams run ahead, such as the receive of another microbatch."""
        if self.device.type == "cpu" and not where.waits(self.steps.thread):
            return []
        found = [self.comparing, *(stream.doing for stream in list(self.streams.values()))]
        found += [] if self._watch is None else self._watch.under_way()
        return [label for label in found if label is not None]

    def abort_late(self, what: str) -> None:
        """Aborts the communicators because work has not ended in time. Called in another thread; this rank's own may be
        waiting for that work."""
        self.lost = what
        self._abort_groups()

    def _abort_groups(self) -> None:
        for group in dict.fromkeys([*self.groups, *self.message_groups, self.metrics_group]):
            group.process_group.abort()

    def drain(self) -> None:
        """Blocks the host until all streams are idle, the compute stream included."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for stream in self.streams.values():
            stream.drain()

    @contextmanager
    def guarded(self, place: str) -> Iterator[None]:
        """Guards work between collectives: an exception in it must occur on all ranks, or the ranks are out of step."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"rank {self.world_rank} of {self.world}, {place}")
            self.abort(place, error)
            raise

    def abort(self, place: str, error: BaseException) -> None:
        """Cleans up after an exception. If all ranks failed at one place the communicators stay usable, else they are
        lost."""
        if self.stages > 1 and not isinstance(error, CommunicationError | agreement.RanksDisagree):
            # a receive that was issued ahead may wait for what this rank will never send: streams cannot run dry
            self.lost = f"this rank failed, and stages are never at one place ({place})"
            self._abandon()
            return
        self.drain()
        # ranks that disagree have compared notes: nothing of it was issued
        broken = isinstance(error, CommunicationError) and not isinstance(error, agreement.RanksDisagree)
        if broken:
            self.note_positions(error)
        if self.alone or self.lost is not None:
            return
        together = False
        text = f"rank {self.world_rank} lost" if broken else f"{place}: {type(error).__name__}"
        with suppress(RuntimeError):
            together = agreement.same_on_all(text, self.abort_group)
        if broken or not together:
            alone = "communication failed" if broken else "this rank failed alone, or elsewhere than the others"
            self.lost = f"{alone} ({place})"

    def _abandon(self) -> None:
        """Stops waiting for work under way."""
        if self.device.type == "cuda":
            self._abort_groups()
        for stream in self.streams.values():
            stream.abandon()

    def close(self) -> None:
        """Ends the streams' threads and destroys the groups."""
        if self.lookout is not None:
            self.lookout.close()
        if self._watch is not None:
            self._watch.close()
        for stream in self.streams.values():
            stream.close()
        if self.lost is None:  # else another rank may still wait in one of them, and closing would wait for it
            self.give_back()
