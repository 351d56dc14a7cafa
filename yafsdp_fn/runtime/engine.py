"""The engine: puts ops on their streams under the scoreboard.

issue(Gather or Reduce)         returns at once; the stream does it when what it waits for is done
begin(Forward or Backward)      waits, on the compute stream, until the op may run
end()                           completes it, for whoever waits for it
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from yafsdp_fn.comm import collectives
from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.comm.streams import Event, Stream
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.slots import Slots
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules.program import Backward, Forward, Gather, Reduce
from yafsdp_fn.schedules.scoreboard import STREAM, uses

SAME_VISITS = "what to communicate (every rank must visit the same units in the same order)"

ReduceJob = tuple[Tensor, Tensor, Tensor | None, bool]
"""full gradient in its slot, gradient shard, receive buffer (None: straight into the shard), whether to add"""


class Engine:
    """Executes ops of one session.

    grads: gradient shards, None for a forward without gradients
    checked: before each collective, ranks make sure that they issue the same one (when no program has proved it)
    """

    def __init__(self, store: Store, slots: Slots, grads: Shards | None, *, checked: bool, step: int) -> None:
        self.store, self.slots, self.grads = store, slots, grads
        self._checked, self._step = checked, step
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self._touched: set[int] = set()  # units whose gradient shard has been written in this step
        self._open: tuple[Event | None, str] | None = None

    @property
    def inside(self) -> str | None:
        """The compute that runs now, if one does."""
        return None if self._open is None else self._open[1]

    # ---- compute

    def begin(self, op: Forward | Backward, place: str) -> None:
        """Waits until `op` may run. `place` says where the step is, for errors."""
        if self.store.comms.ranks == 1:
            self._open = (None, place)
            return
        event = self.store.comms.compute_event()
        waits = self.store.board.add(event, "compute", *uses(op, self.slots.number))
        self._open = (event, place)  # before waiting: if that raises, `end` must still complete the event
        for wait in waits:
            wait.wait()

    def end(self) -> None:
        """Completes the op that began last, if one did."""
        if self._open is not None and self._open[0] is not None:
            self._open[0].complete()
        self._open = None

    def weights(self, op: Forward | Backward, units: tuple[int, ...]) -> list[list[Tensor]]:
        """Views of the leaves of each unit in the op's slots."""
        return [self.slots.weight(slot, unit)[1] for slot, unit in zip(op.slots, units, strict=True)]

    def grad_views(self, op: Backward, trained: tuple[int, ...]) -> list[tuple[Tensor, list[Tensor], bool]]:
        """Per trained unit `(flat, leaves, add)`: where its gradient goes, and whether it adds to what is there."""
        assert self.grads is not None
        out = []
        for unit, slot in zip(trained, op.grad_slots, strict=True):
            flat, leaves = self.slots.grad(slot, unit, self.grads)
            add = self._unreduced.get(slot) == unit
            self._unreduced[slot] = unit
            if self.store.grads_alias:  # the slot is the shard: it stays written after its reduction
                add = unit in self._touched
                self._touched.add(unit)
            out.append((flat, leaves, add))
        return out

    # ---- communication

    def issue(self, op: Gather | Reduce) -> None:
        """Puts a collective on its stream."""
        if isinstance(op, Gather):
            self._gather(op)
        else:
            self._reduce(op)

    def _gather(self, op: Gather) -> None:
        comms, rows = self.store.comms, self.store.working.rows
        if comms.ranks == 1:
            return  # slots alias the working copies
        pairs = zip(op.units, op.slots, strict=True)
        jobs = [(self.slots.weight(slot, unit)[0], rows[unit]) for unit, slot in pairs]

        def work() -> None:
            for out, shard in jobs:
                collectives.all_gather(out, shard, comms.gather_group)

        self._submit(op, comms.gather, work)

    def _reduce(self, op: Reduce) -> None:
        store, grads = self.store, self.grads
        assert grads is not None
        jobs: list[ReduceJob] = []
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            self._unreduced.pop(slot, None)
            if not store.grads_alias:
                full, shard = self.slots.grad(slot, unit, grads)[0], grads.rows[unit]
                add = unit in self._touched
                straight = store.comms.ranks > 1 and not add and shard.dtype == full.dtype
                jobs.append((full, shard, None if straight else store.receive(unit), add))
            self._touched.add(unit)
        if store.comms.ranks > 1:
            self._submit(op, store.comms.reduce, lambda: _reduce_all(jobs, store.comms))
        else:
            with torch.no_grad():
                _reduce_all(jobs, store.comms)

    def _submit(self, op: Gather | Reduce, stream: Stream, work: Callable[[], None]) -> None:
        comms = self.store.comms
        names = ", ".join(self.store.units[unit].name for unit in op.units)
        label = f"{type(op).__name__.lower()} of {names} (step {self._step})"
        comms.check()
        if self._checked:
            # nothing has proved that ranks issue the same op, and gloo aborts or hangs where they do not
            comms.must_agree(SAME_VISITS, {"op": label}, label)
        event = stream.event()
        waits = self.store.board.add(event, STREAM[type(op)], *uses(op, self.slots.number))
        stream.submit(work, waits, event, label)

    def finish_grads(self, leaf_grads: list[Tensor | None]) -> None:
        """Zeroes the gradient shards that nothing wrote, and adds the gradients that reached the leaves themselves."""
        if self.grads is None:
            return
        with torch.no_grad(), self.store.using_grads(self.grads):
            for unit, row in self.grads.rows.items():
                if unit not in self._touched:
                    row.zero_()
            for total, extra in zip(self.grads.tensors, leaf_grads, strict=True):
                if total is not None and extra is not None:
                    total.add_(extra)


def _reduce_all(jobs: list[ReduceJob], comms: Communicators) -> None:
    for full, shard, received, add in jobs:
        if received is None:
            collectives.reduce_scatter(shard, full, comms.reduce_group)
            continue
        if comms.ranks > 1:
            collectives.reduce_scatter(received, full, comms.reduce_group)
        else:
            received = full
        if add:
            shard.add_(received)
        else:
            shard.copy_(received)
