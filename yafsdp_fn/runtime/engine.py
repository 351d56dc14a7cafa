"""The engine: puts ops on their streams under the scoreboard.

issue(Gather, Stash, Reduce, AllReduce, Offload or Fetch)   returns at once; the stream does it when what it waits
                                            for is done
begin(Forward or Backward)                  waits, on the compute stream, until the op may run
end()                                       completes it, for whoever waits for it
run(Norm or Update, work)                   waits, and does `work` on the compute stream
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from yafsdp_fn.comm import flat
from yafsdp_fn.comm.streams import Event, Stream
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.slots import Slots
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules.ops import (
    STREAM,
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Reduce,
    Stash,
    Update,
)
from yafsdp_fn.schedules.scoreboard import Buffer, uses
from yafsdp_fn.schedules.trace import Visit
from yafsdp_fn.timeline.record import Recorder, Run

SAME_VISITS = "what to communicate (every rank must visit the same units in the same order)"

Communication = Gather | Stash | Reduce | AllReduce | Offload | Fetch

GradPlaces = list[tuple[Tensor, list[Tensor], bool]]
"""Per trained unit of a visit `(flat, leaves, add)`: where its gradient goes, and whether it adds to what is there."""


class Engine:
    """Executes ops of one session.

    grads: gradient shards, None for a forward without gradients
    checked: before each collective, ranks make sure that they issue the same one (when no program has proved it)
    recorder: gets every op, and when it ran
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        grads: Shards | None,
        *,
        checked: bool,
        step: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.store, self.slots, self.grads, self.recorder = store, slots, grads, recorder
        self.touched: set[int] = set()  # units whose gradient shard has been written in this step
        self.early: GradPlaces = []
        self._checked, self._step = checked, step
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self._open: tuple[Event | None, str, Run | None] | None = None
        cuda = store.comms.device.type == "cuda"
        self._compute_stream = torch.cuda.current_stream(store.comms.device) if cuda else None

    @property
    def inside(self) -> str | None:
        """The compute that runs now, if one does."""
        return None if self._open is None else self._open[1]

    # ---- compute

    def begin(self, op: Forward | Backward, visit: Visit, place: str, then: Backward | None = None) -> None:
        """Waits until `op` may run. `place` says where the step is, for errors.

        then: the visit's own backward, where it is the next compute after the forward `op`. If nothing is in its
            gradient slots, the forward may write there already: `early` says where, until `end`
        """
        if self._compute_stream is not None and self._compute_stream != torch.cuda.current_stream():
            # the scoreboard takes the last compute on a buffer for all earlier ones
            raise RuntimeError(f"{place}: runs on another CUDA stream than the step began on; visit on one stream")
        self.early = [] if then is None else self._early(then, visit.trained)
        event, waits = None, []
        if not self.store.comms.alone or op.carry_slot is not None:
            event = self.store.comms.compute_event()
            reads, writes = self._compute_uses(op, visit)
            if then is not None and self.early:
                writes = writes + self._compute_uses(then, visit)[1]
            waits = self.store.board.add(event, "compute", reads, writes)
        run = self._issued(op)
        self._open = (event, place, run)  # before waiting: if that raises, `end` must still complete the event
        for wait in waits:
            wait.wait()
        if run is not None:
            run.on("compute", event, waits)
            run.begin()

    def end(self) -> None:
        """Completes the op that began last, if one did."""
        if self._open is None:
            return
        event, _, run = self._open
        if run is not None:
            run.end()
        if event is not None:
            event.complete()
        self._open, self.early = None, []

    def _compute_uses(self, op: Forward | Backward, visit: Visit) -> tuple[list[Buffer], list[Buffer]]:
        """The op's uses; where slots are the shards themselves, those of the shards."""
        reads, writes = uses(op, self.slots.number)
        if self.store.weights_alias:
            reads = [b for b in reads if b[0] != "slot"] + [("shard", unit) for unit in visit.units]
        if self.store.grads_alias and isinstance(op, Backward):
            writes = [("grad shard", unit) for unit in visit.trained]
        return reads, writes

    def grad_views(self, op: Backward, trained: tuple[int, ...]) -> GradPlaces:
        """Where the gradients of the trained units go; takes note that they are there."""
        assert self.grads is not None
        out = []
        for unit, slot in zip(trained, op.grad_slots, strict=True):
            whole, leaves = self.slots.grad(slot, unit, self.grads)
            add = self._unreduced.get(slot) == unit
            self._unreduced[slot] = unit
            if self.store.grads_alias:  # the slot is the shard: it stays written after its reduction
                add = unit in self.touched
                self.touched.add(unit)
            out.append((whole, leaves, add))
        return out

    def _early(self, op: Backward, trained: tuple[int, ...]) -> GradPlaces:
        """What `grad_views` will give, if none of it adds to what is there, else nothing."""
        assert self.grads is not None
        pairs = list(zip(trained, op.grad_slots, strict=True))
        alias = self.store.grads_alias
        if any(unit in self.touched if alias else slot in self._unreduced for unit, slot in pairs):
            return []
        return [(*self.slots.grad(slot, unit, self.grads), False) for unit, slot in pairs]

    def run(self, op: Norm | Update, work: Callable[[], None]) -> None:
        """Does `work`, which is `op`, on the compute stream when it may; an untouched gradient counts as zero."""
        assert self.grads is not None
        with self.store.using(*uses(op), run=self._issued(op)), torch.no_grad():
            for unit in op.units:
                if unit not in self.touched:
                    self.grads.rows[unit].zero_()
                    self.touched.add(unit)
            work()

    # ---- communication

    def issue(self, op: Communication, why: str = "") -> None:
        """Puts a collective, or a copy between buffers, on its stream. why: it is done, for errors"""
        comms = self.store.comms
        run = self._issued(op)
        match op:
            case Gather(units, slots, source):
                self.slots.gathered(units, slots)
                if not self.store.weights_alias:
                    self._submit(op, comms.gather, self._gather(units, slots, source == "node"), run, why)
            case Stash(units, slots):
                if not self.store.weights_alias:
                    self._submit(op, comms.gather, self._stash(units, slots), run)
            case Reduce(units, slots):
                work = self._reduce(units, slots)
                if self.store.grads_alias:
                    return
                if comms.alone:
                    if run is not None:
                        run.on("compute", None)
                        work = run.timed(work)
                    with torch.no_grad():
                        work()
                else:
                    self._submit(op, comms.reduce, work, run)
            case AllReduce(units):
                if comms.replicas > 1:
                    self._submit(op, comms.replicate, self._all_reduce(units), run)
            case Offload(visit, slot):
                self._submit(op, comms.offload, self.slots.carries.to_host(visit, slot), run)
            case Fetch(visit, slot):
                self._submit(op, comms.offload, self.slots.carries.to_device(visit, slot), run)

    def _issued(self, op: Op) -> Run | None:
        """What records `op`; None where nobody does."""
        return None if self.recorder is None else self.recorder.issue(op)

    def _gather(self, units: tuple[int, ...], slots: tuple[int, ...], in_node: bool) -> Callable[[], None]:
        comms, rows = self.store.comms, self.store.working.rows
        wholes = [self.slots.weight(slot, unit)[0] for unit, slot in zip(units, slots, strict=True)]
        parts = [self.slots.secondary(unit) if in_node else rows[unit] for unit in units]
        gather = flat.gather_local_all_into if in_node else flat.gather_all_into
        return partial(gather, comms, wholes, parts)

    def _stash(self, units: tuple[int, ...], slots: tuple[int, ...]) -> Callable[[], None]:
        comms = self.store.comms
        jobs = [
            (self.slots.secondary(unit), flat.node_slice(comms, self.slots.weight(slot, unit)[0]))
            for unit, slot in zip(units, slots, strict=True)
        ]

        def work() -> None:
            for kept, part in jobs:
                kept.copy_(part)

        return work

    def _reduce(self, units: tuple[int, ...], slots: tuple[int, ...]) -> Callable[[], None]:
        store, grads = self.store, self.grads
        assert grads is not None
        wholes = [self.slots.grad(slot, unit, grads)[0] for unit, slot in zip(units, slots, strict=True)]
        shards = [grads.rows[unit] for unit in units]
        adds = [unit in self.touched for unit in units]
        for slot in slots:
            self._unreduced.pop(slot, None)
        self.touched.update(units)
        if store.grads_alias:
            return _nothing
        # a sum lands in its shard where it need not be converted or added
        receive = store.receive(not any(adds) and all(w.dtype == s.dtype for w, s in zip(wholes, shards, strict=True)))
        accumulate = store.precision.sum_dtype
        return partial(flat.reduce_all_into, store.comms, shards, wholes, receive, adds=adds, accumulate=accumulate)

    def _all_reduce(self, units: tuple[int, ...]) -> Callable[[], None]:
        store, grads = self.store, self.grads
        assert grads is not None
        staging, rows = store.staging(), [grads.rows[unit] for unit in units]
        wire, accumulate = store.precision.reduce_dtype, store.precision.sum_dtype

        def work() -> None:
            for shard in rows:
                flat.all_reduce_replicas(store.comms, shard, staging, wire=wire, accumulate=accumulate)

        return work

    def _submit(
        self, op: Communication, stream: Stream, work: Callable[[], None], run: Run | None, why: str = ""
    ) -> None:
        comms = self.store.comms
        if isinstance(op, Offload | Fetch):
            names = f"visit {op.visit}"
        else:
            names = ", ".join(self.store.units[unit].name for unit in op.units)
        label = f"{type(op).__name__.lower()} of {names} (step {self._step}){why}"
        comms.check()
        if self._checked:
            # nothing has proved that ranks issue the same op, and gloo aborts or hangs where they do not
            comms.must_agree(SAME_VISITS, {"op": label}, label)
        event = stream.event()
        waits = self.store.board.add(event, STREAM[type(op)], *uses(op, self.slots.number))
        if run is not None:
            run.on(STREAM[type(op)], event, waits)
            work = run.timed(work)
        stream.submit(work, waits, event, label)

    def finish_grads(self, leaf_grads: list[Tensor | None]) -> None:
        """Zeroes the gradient shards that nothing wrote, and adds the gradients that reached the leaves themselves."""
        if self.grads is None:
            return
        with torch.no_grad(), self.store.using_grads(self.grads):
            for unit, row in self.grads.rows.items():
                if unit not in self.touched:
                    row.zero_()
                    self.touched.add(unit)
            for total, extra in zip(self.grads.tensors, leaf_grads, strict=True):
                if total is not None and extra is not None:
                    total.add_(self.store.comms.sum_over_replicas(extra.contiguous()))


def _nothing() -> None:
    """The reduction of a gradient that is in its shard already."""
