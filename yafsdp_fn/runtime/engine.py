"""The engine: puts ops on their streams under the scoreboard.

issue(Gather or Reduce)         returns at once; the stream does it when what it waits for is done
begin(Forward or Backward)      waits, on the compute stream, until the op may run
end()                           completes it, for whoever waits for it
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_fn.comm import collectives
from yafsdp_fn.comm.streams import Event
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.slots import Slots
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules.program import Backward, Forward, Gather, Reduce
from yafsdp_fn.schedules.scoreboard import STREAM, uses

SAME_VISITS = "what to communicate (every rank must visit the same units in the same order)"

ReduceJob = tuple[int, Tensor, Tensor, bool]
"""unit, full gradient in its slot, gradient shard, whether to add to the shard"""


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

    # ---- compute

    def begin(self, op: Forward | Backward, place: str) -> None:
        """Waits until `op` may run. `place` says where the step is, for errors."""
        if self._open is not None:
            raise RuntimeError(
                f"{place} begins inside {self._open[1]}: a block cannot visit sharded parameters; visit them "
                "beside it, or give them to the block (a pytree of units to ya.apply, two stacks to ya.scan)"
            )
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
        comms = self.store.comms
        label = f"{type(op).__name__.lower()} of {self._names(op.units)} (step {self._step})"
        if isinstance(op, Gather):
            jobs = [
                (self.slots.weight(slot, unit)[0], self.store.working.rows[unit])
                for unit, slot in zip(op.units, op.slots, strict=True)
            ]
        else:
            reductions = self._reductions(op)
        if comms.ranks == 1:
            if isinstance(op, Reduce):
                for job in reductions:
                    self._reduce(*job)
            return
        stream, group = (
            (comms.gather, comms.gather_group) if isinstance(op, Gather) else (comms.reduce, comms.reduce_group)
        )

        def work() -> None:
            if isinstance(op, Gather):
                for out, shard in jobs:
                    collectives.all_gather(out, shard, group)
            else:
                for job in reductions:
                    self._reduce(*job)

        comms.check()
        if self._checked:
            # nothing has proved that ranks issue the same op, and gloo aborts or hangs where they do not
            comms.must_agree(SAME_VISITS, {"op": label}, label)
        event = stream.event()
        waits = self.store.board.add(event, STREAM[type(op)], *uses(op, self.slots.number))
        stream.submit(work, waits, event, label)

    def _names(self, units: tuple[int, ...]) -> str:
        return ", ".join(self.store.units[unit].name for unit in units)

    def _reductions(self, op: Reduce) -> list[ReduceJob]:
        """What a reduction does; its buffers are made here, never on a stream."""
        assert self.grads is not None
        jobs: list[ReduceJob] = []
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            self._unreduced.pop(slot, None)
            if not self.store.grads_alias:
                full, shard = self.slots.grad(slot, unit, self.grads)[0], self.grads.rows[unit]
                self.store.receive(unit)
                jobs.append((unit, full, shard, unit in self._touched))
            self._touched.add(unit)
        return jobs

    def _reduce(self, unit: int, full: Tensor, shard: Tensor, add: bool) -> None:
        comms = self.store.comms
        if not add and shard.dtype == full.dtype and comms.ranks > 1:
            collectives.reduce_scatter(shard, full, comms.reduce_group)
            return
        received = full
        if comms.ranks > 1:
            received = self.store.receive(unit)
            collectives.reduce_scatter(received, full, comms.reduce_group)
        if add:
            shard.add_(received)
        else:
            shard.copy_(received)

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
