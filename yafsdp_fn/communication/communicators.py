"""The communicators of a mesh: how they are connected, how ranks compare notes, and how they end.

Consistency checks use groups of their own. After a failure, on this rank, on another one, or of a collective that never
ends:

    all ranks failed at one place          streams run dry; the communicators stay usable
    elsewhere, alone, or in a collective   ranks are out of step: `lost` says why, and every later use is refused
"""

import sys
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication import agreement, watchdog
from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.ordered import OrderedGroups
from yafsdp_fn.communication.store import answers
from yafsdp_fn.communication.streams import ADVICE, CommunicationError, HostStream
from yafsdp_fn.communication.watchdog import Pending, Watchdog
from yafsdp_fn.util.mesh_axes import ALIGN
from yafsdp_fn.util.torch_private import default_group, make_communicator, side_store

SAME_BLOCKS = "what blocks and losses communicate (all ranks must call the same collectives in the same order)"


class Communicators(OrderedGroups):
    """The process groups and streams of one mesh, agreement between ranks, and the handling of failures."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._comparing: Pending | None = None  # what this thread itself waits for
        self._connected = set[Hashable]()
        if not self.alone and self.timeout is not None:
            with answers(self.timeout, "connecting to the store once more"):
                store = side_store(f"yafsdp {self.control_group.process_group.group_name}", watchdog.PATIENCE)
            self.watchdog = Watchdog(store, self)
        if self.device.type == "cuda":
            self._meet()

    # ---- connecting

    def _meet(self) -> None:
        """Makes every communicator, and uses those that all steps use, in one order on all ranks.

        NCCL makes a communicator, and connects two ranks, at first use. That blocks both hosts and may synchronise the
        device: in the middle of a step, a rank could so wait for one that waits for what it has not launched yet. What
        only some states and programs use is connected when they are made (`connect`, `connect_sums`), since the buffers
        for it take memory.
        """
        if self.alone:
            return
        self._meet_for_units()
        self._use_once(self.of_metrics, self.metrics_group, "all-reduce")
        if self.replicas > 1:
            self._use_once("replicate", self.replicate_group, "all-reduce")
        if self.stages > 1:
            self._use_once("gather", self.stages_group, "all-gather")  # a ring, as its broadcasts
        for group in self.along.values():
            for kind in ("all-gather", "reduce-scatter", "all-reduce", "exchange"):
                self._use_once("", group, kind)
        # each pair of stages, both ways
        token = torch.zeros(1, device=self.device)
        for sender in range(len(self.message_groups)):
            for receiver in range(self.stages):
                if sender == self.stage != receiver:
                    self.now("send", self.send(token, receiver), "first message")
                elif receiver == self.stage != sender:
                    self.now("receive", self.receive(token, sender), "first message")

    def _meet_for_units(self) -> None:
        """Makes the communicators that move units, of a mesh or of a part of its axes."""
        self._use_once("gather", self.gather_group, "all-gather")
        self._use_once("reduce", self.reduce_group, "reduce-scatter")
        for name in ("gather_local", "reduce_local", "reduce_nodes"):
            group = getattr(self, f"{name}_group", self.gather_group)
            if group is not self.gather_group:
                make_communicator(group.process_group, self.device)

    def _use_once(self, stream: str, group: RankGroup, kind: str) -> None:
        """Runs a collective of the kind that `group` is for, on its stream, or on that of computes (""): kinds have
        connections of their own."""
        ranks = group.process_group.size()
        if ranks == 1:
            return
        one = torch.zeros(1, device=self.device)
        every = torch.zeros(ranks, device=self.device)
        kinds = {
            "all-gather": partial(group.all_gathers, [every], [one]),
            "reduce-scatter": partial(group.reduce_scatters, [one], [every]),
            "all-reduce": partial(group.all_reduce, one, dist.ReduceOp.SUM),
            "exchange": partial(group.exchange, [*torch.zeros_like(every)], [*every]),
        }
        self.now(stream, kinds[kind], f"first {kind}")

    def connect(self, group: str, kind: str) -> None:
        """Connects the ranks of a group, "gather_local" say, for a kind of collective (`_use_once`), before a program
        that has it runs. All ranks call it, between steps."""
        if self._connects((group, kind)):
            self._use_once(group.partition("_")[0], getattr(self, f"{group}_group"), kind)

    def connect_sums(self, dtype: torch.dtype, wire: torch.dtype, accumulate: torch.dtype) -> None:
        """Connects ranks for sums that they make themselves, by one of each, before there is a state that has them: see
        `reduce_scatter`. All ranks call it, between steps."""
        if self._connects(accumulate):
            self.reduce_scatter(torch.zeros(ALIGN * self.ranks, dtype=wire, device=self.device), dtype, accumulate)

    def _connects(self, what: Hashable) -> bool:
        """Returns whether ranks have yet to connect for this, and notes that they do."""
        if self.device.type != "cuda" or self.alone or what in self._connected:
            return False
        self._connected.add(what)
        return True

    def _narrowed(self, names: tuple[str, ...]) -> Self:
        found = super()._narrowed(names)
        found._connected = set()
        if found.ranks > 1 and self.device.type == "cuda":
            found._meet_for_units()
        return found

    def share(self, stages: tuple[int, ...]) -> None:
        new = stages not in self._sharing
        super().share(stages)
        if new and self.device.type == "cuda":
            self._use_once("replicate", self.sharing(stages), "all-reduce")

    # ---- agreement, on a group of the CPU

    def same_on_all(self, text: str, what: str, *, in_stage: bool = False) -> bool:
        """Returns whether all ranks, or those of this stage, pass the same text. Uses the host only; all ranks call it
        in the same order."""
        if self.alone:
            return True
        with self._comparing_notes(what, in_stage) as group:
            return agreement.same_on_all(text, group)

    @contextmanager
    def _comparing_notes(self, what: str, in_stage: bool) -> Iterator[RankGroup]:
        with self.blocking(what, "ranks could not compare notes"):
            yield self.stage_control_group if in_stage else self.control_group

    @contextmanager
    def blocking(self, what: str, why: str = "it failed") -> Iterator[None]:
        """Names a collective that this thread itself waits for, to the watchdog, and to whom it fails."""
        self._comparing = what, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            failed = CommunicationError(f"rank {self.world_rank}: {what}: {why} ({error}). {ADVICE}")
            self.note_positions(failed)
            raise failed from error
        finally:
            self._comparing = None

    def must_agree(self, what: str, parts: Mapping[str, str], position: str = "", *, in_stage: bool = False) -> None:
        """Raises RanksDisagree on every rank unless all pass the same `parts`; the message shows the first that
        differs.

        position: this rank's, for the error raised when the others cannot be reached; in_stage: only the ranks of
            this stage call it
        """
        position = position or f"comparing {what}"
        if self.same_on_all(repr(parts), position, in_stage=in_stage):
            return
        first = self.stage * (self.world // self.stages) if in_stage else 0
        with self._comparing_notes(position, in_stage) as group:
            found = agreement.first_difference(parts, group, first)
        raise RanksDisagree(f"ranks disagree on {what}; {found}")

    def numbers_of_all(self, mine: Tensor, what: str, *, in_stage: bool = False) -> Tensor:
        """Gathers [n] of each rank, on the CPU, into [ranks of the mesh, n]. Host only, as `same_on_all`."""
        mine = mine.cpu()  # torch.set_default_device may have put it elsewhere
        if self.alone:
            return mine.clone()[None]
        with self._comparing_notes(what, in_stage) as group:
            return agreement.numbers_of_all(mine, group)

    # ---- failures, and the end

    def under_way(self) -> list[Pending]:
        """Lists the communication that this rank's streams are in now, for the watchdog's thread."""
        found = [self._comparing, *(stream.doing for stream in list(self.streams.values()))]
        return [pending for pending in found if pending is not None]

    def abort_late(self, what: str) -> None:
        """Aborts the communicators because work has not ended in time. Called in another thread; this rank's own may be
        waiting for that work."""
        self.steps.lost = what
        if self.device.type == "cuda":
            self._abort_groups()
        for stream in self.streams.values():
            if isinstance(stream, HostStream):
                stream.fail(what)

    def _abort_groups(self) -> None:
        """Aborts all groups at once: an abort waits for the kernels of its group, which may wait behind another's."""
        with ThreadPoolExecutor(len(self.groups), initializer=begin_thread, initargs=(self.device,)) as threads:
            list(threads.map(lambda group: group.process_group.abort(), self.groups))

    def drain(self) -> None:
        """Blocks the host until all streams are idle, the compute stream included."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for stream in self.streams.values():
            stream.drain()

    def abort(self, position: str, error: BaseException) -> None:
        """Cleans up after an exception. If all ranks failed at one place the communicators stay usable, else they are
        lost."""
        try:
            self._clean_up(position, error)
        except BaseException as interrupt:
            self.steps.lost = self.lost or f"{type(interrupt).__name__} while streams ran dry ({position})"
            raise

    def _clean_up(self, position: str, error: BaseException) -> None:
        """Lets the streams run dry after `error`, and finds out whether all ranks failed at this position."""
        disagree = isinstance(error, RanksDisagree)
        # ranks that disagree have compared notes: nothing of it was issued
        broken = isinstance(error, CommunicationError) and not disagree
        midway = self.called is not None if disagree else not broken
        what = f"rank {self.world_rank} of {self.world}, {position}: {type(error).__name__}: {error}"
        if self.stages > 1 and midway:
            # a receive that was issued ahead may wait for what this rank will never send: streams cannot run dry
            self.steps.failed = what
            self.steps.lost = f"this rank failed, and stages are never at one place ({position})"
            if self.device.type == "cuda":
                self._abort_groups()
            for stream in self.streams.values():
                stream.abandon()
            return
        if not self.alone and self.lost is None and not isinstance(error, CommunicationError):
            # the exception is raised only when the others have been waited for
            seconds = self.abort_timeout.total_seconds()
            text = f"{what}. It waits up to {seconds:.0f} s for the others, to learn whether all failed here"
            print(text, file=sys.stderr, flush=True)
        self.drain()
        if broken:
            self.note_positions(error)
        if self.alone or self.lost is not None:
            return
        # did all ranks fail here?
        together = False
        text = f"rank {self.world_rank} lost" if broken else f"{position}: {type(error).__name__}"
        with suppress(RuntimeError):
            together = agreement.same_on_all(text, self.abort_group)
        if broken:
            self.steps.lost = f"communication failed ({position})"
        elif not together:
            self.steps.lost = f"this rank failed alone, or elsewhere than the others ({position})"
            self.steps.failed = what

    def close(self) -> None:
        """Ends the streams' threads and destroys the groups."""
        if self.watchdog is not None:
            self.watchdog.close()
        for stream in self.streams.values():
            stream.close()
        if self.lost is None:  # else another rank may still wait in one of them, and closing would wait for it
            self.destroy()


OWNED = "_yafsdp_communicators"  # attribute of a mesh


def communicators(mesh: DeviceMesh) -> Communicators:
    """Returns the communicators of `mesh`. They are created once, owned by the mesh, and end with its last holder.

    Raises TypeError for a mesh whose axes no state can use.
    """
    found: Communicators | None = getattr(mesh, OWNED, None)
    if found is None or found.parent is not default_group():  # a mesh may outlive a restart of the process group
        found = Communicators(mesh)
        setattr(mesh, OWNED, found)
        weakref.finalize(mesh, found.close).atexit = False  # streams end at exit on their own
    return found
