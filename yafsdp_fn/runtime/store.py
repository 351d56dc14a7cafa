"""The memory behind a sharded state: shards, working copy, gradient shards, slots, and the scoreboard over them.

A `ShardedState` is a frozen view of a store at one generation. The store is what is updated in place: donation moves
its generation on, and older views raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm.communicators import Communicators, communicators
from yafsdp_fn.comm.streams import Event
from yafsdp_fn.layout import TreeLayout
from yafsdp_fn.mesh import mesh_axes
from yafsdp_fn.precision import Precision
from yafsdp_fn.runtime.abstract import AbstractStore
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.slots import Slots
from yafsdp_fn.schedules.ops import Norm, Update
from yafsdp_fn.schedules.scoreboard import Buffer, Scoreboard, uses
from yafsdp_fn.timeline.record import Run, after_step
from yafsdp_fn.tree import Tree


class Store(AbstractStore):
    """Owns the shards of one layout on one mesh.

    master: in `precision.param` (frozen groups: in their own dtype); working: in the gather dtype, the master itself
    where the dtypes are equal; versions: unit -> how often its weights have changed
    """

    comms: Communicators

    def __init__(self, layout: TreeLayout, masters: Sequence[Tensor], mesh: DeviceMesh, precision: Precision) -> None:
        super().__init__(layout, mesh_axes(mesh), precision, communicators(mesh))
        self.mesh = mesh
        self.master = Shards(self.groups, masters)
        with self.comms.memory():
            working = [self._working_copy(g.trainable, m) for g, m in zip(self.groups, masters, strict=True)]
        self.working = Shards(self.groups, working)
        self.key = (layout, self.mesh_axes, precision)  # equal where programs can be shared
        self.versions: Counter[int] = Counter()
        self.board: Scoreboard[Event] = Scoreboard()
        self.writing = False
        self._grads: Shards | None = None
        self._receive: Tensor | None = None
        self._staging: Tensor | None = None
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._free: dict[bool, list[Slots]] = {True: [], False: []}
        self._versions = [master._version for master in masters]
        self.made([("shard", unit) for unit in self.of_unit])
        for stream in self.comms.streams:
            for tensor in (*self.master.present(), *self.working.present()):
                stream.keep(tensor)  # gathers of a step that nobody comes to take may still read them

    def _working_copy(self, trainable: bool, master: Tensor) -> Tensor:
        same = not trainable or master.dtype == self.precision.gather_dtype
        return master if same else master.to(self.precision.gather_dtype)

    def using_grads(self, grads: Shards, op: Norm | None = None) -> AbstractContextManager[None]:
        """Waits until the gradient shards are complete; they may be read and written in the block. op: that it is"""
        run = None if op is None else after_step(self.key, op)
        return self.using([], [("grad shard", unit) for unit in grads.rows], run)

    def params(self, seed: int, step: int) -> Tree:
        """The user's container with a handle per entry on the masters."""
        return self.handles(self.master.tensors, seed, step)

    def masters(self) -> list[Tensor]:
        return self.master.present()

    def updating(self) -> AbstractContextManager[None]:
        """Waits until the optimizer may write the shards, which it does in the block."""
        update = Update(self.trained)
        return self.using(*uses(update), run=after_step(self.key, update))

    def begin_write(self) -> None:
        """From here on the state as it was is gone: an interrupt before `writing` ends leaves no state at all."""
        self.generation += 1
        self.writing = True

    def why_gone(self) -> str:
        """What happened to an earlier generation."""
        if self.writing:
            return "was being written when its step was interrupted; load a checkpoint into a new state"
        return "was donated: a later state uses its memory. Keep the state that the step returned, or pass donate=False"

    def made(self, buffers: Sequence[Buffer]) -> None:
        """Buffers were just made on the compute stream: other streams wait for what it has to do until here."""
        if not self.comms.alone:
            event = self.comms.compute_event()
            self.board.add(event, "compute", (), buffers)
            event.complete()

    def ready(self) -> None:
        """Takes note of writes by hand: if masters were written in place, the working copies follow."""
        now = [master._version for master in self.masters()]
        if now != self._versions:
            written = zip(self.groups, now, self._versions, strict=True)
            units = [unit for group, after, before in written if after != before for unit in group.units]
            with self.using([], [("shard", unit) for unit in units]):
                self.refresh(units)

    def copies(self, seed: int, step: int) -> Tree | None:
        """Like `params`, with the working copies that follow the masters; None where masters are what is gathered."""
        same = self.precision.gather_dtype == self.precision.param
        return None if same else self.handles(self.working.tensors, seed, step)

    def refresh(self, units: Sequence[int] | None = None, *, copied: bool = False) -> None:
        """Takes note that masters have changed, of these units or of all trainable ones: the working copies follow.

        A write by hand to the others is left for `ready` to find. copied: they have followed already
        """
        changed = set(self.trained if units is None else units)
        for number, (group, master) in enumerate(zip(self.groups, self.masters(), strict=True)):
            if not changed.isdisjoint(group.units):
                self._versions[number] = master._version
        self.versions.update(changed)
        if copied:
            return
        both = (self.master, self.working)
        copies = [s.present() if units is None else [s.rows[unit] for unit in units] for s in both]
        for master, working in zip(*copies, strict=True):
            if working.data_ptr() != master.data_ptr():
                working.copy_(master)

    def new_grads(self) -> Shards:
        """Fresh gradient shards, of the trainable groups."""
        return Shards(
            self.groups,
            [
                torch.empty_like(master) if group.trainable and master is not None else None
                for group, master in zip(self.groups, self.master.tensors, strict=True)
            ],
        )

    def kept_grads(self) -> Shards:
        """Gradient shards that live as long as the store: what `train_step` uses, allocated once."""
        if self._grads is None:
            self._grads = self.new_grads()
        return self._grads

    def receive(self, straight: bool) -> Tensor:
        """The buffer that a reduction lands in, in the reduce dtype; empty where it goes straight into the shard."""
        if straight and self.precision.sum_dtype is None:
            return self._wire_buffer(0)
        if self._receive is None:
            self._receive = self._wire_buffer(self.receive_numel())
            self.made([("receive",)])
        return self._receive

    def staging(self) -> Tensor:
        """The buffer that gradient shards travel in between replicas, in the reduce dtype."""
        if self._staging is None:
            self._staging = self._wire_buffer(self.staging_numel())
            self.made([("replicate",)])
        return self._staging

    def scratch(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for one fresh gradient of a leaf, on the compute stream: the next caller overwrites it."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self.largest_leaf, dtype=dtype, device=self.comms.device)
        return self._scratch[dtype][: shape.numel()].view(shape)

    def _wire_buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.precision.reduce_dtype, device=self.comms.device)

    def acquire(self, planned: bool) -> Slots:
        """Slots for a session; sessions that run a program and those on demand have different ones."""
        free = self._free[planned]
        return free.pop() if free else Slots(self)

    def release(self, slots: Slots, planned: bool) -> None:
        self._free[planned].append(slots)

    @contextmanager
    def using(self, reads: Sequence[Buffer], writes: Sequence[Buffer] = (), run: Run | None = None) -> Iterator[None]:
        """A use on the compute stream: waits, and is over when the block ends. run: the op that it is, if recorded"""
        event = None if self.comms.alone else self.comms.compute_event()  # alone, all runs on one stream, in order
        try:
            waits = [] if event is None else self.board.add(event, "compute", reads, writes)
            for wait in waits:
                wait.wait()
            if run is not None:
                run.on("compute", event, waits)
                run.begin()
            yield
            if run is not None:
                run.end()
        finally:
            if event is not None:
                event.complete()
