"""The memory behind a sharded state: shards, working copies, gradient shards, slots, and the scoreboard over them.

A `ShardedState` is a frozen view of a memory at one generation. The memory is what is updated in place: donation moves
its generation on, and older views raise.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm.communicators import Communicators, communicators
from yafsdp_fn.comm.grid import mesh_axes
from yafsdp_fn.comm.streams import Event
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.engine.protocols import Run
from yafsdp_fn.engine.shards import Shards
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Origin, placed
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.schedules.buffers import Buffer
from yafsdp_fn.schedules.scoreboard import Scoreboard
from yafsdp_fn.schedules.split import Assignment


class Memory(Placement[Communicators]):
    """Owns the shards of one layout on one mesh.

    master: in `precision.param` (frozen groups: in their own dtype); working: in the gather dtype, the master itself
    where the dtypes are equal; versions: unit -> how often its weights have changed
    holders: unit -> its stages, where the mesh has stages
    idle: slot sets that wait for the next session, of those that run programs and of those on demand (slots.py)
    """

    def __init__(
        self,
        layout: TreeLayout,
        masters: Sequence[Tensor],
        mesh: DeviceMesh,
        precision: Precision,
        assignment: Assignment | None = None,
    ) -> None:
        super().__init__(layout, mesh_axes(mesh), precision, communicators(mesh), assignment)
        self.mesh = mesh
        self.holders = () if assignment is None or self.comms.stages == 1 else assignment.holders
        for stages in sorted({stages for stages in self.holders if len(stages) > 1}):
            self.comms.share(stages)
        self.master = Shards(self.groups, masters)
        with self.comms.memory():
            working = [self._working_copy(g.trainable, m) for g, m in zip(self.groups, masters, strict=True)]
        self.working = Shards(self.groups, working)
        self.versions: Counter[int] = Counter()
        self.board: Scoreboard[Event] = Scoreboard()
        self._half_written = False
        self._grads: Shards | None = None
        self._receive: Tensor | None = None
        self._staging: Tensor | None = None
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.idle: dict[bool, list[Any]] = {True: [], False: []}
        self._written = [master._version for master in masters]
        self._nothing = self._wire_buffer(0)
        self.made([("shard", unit) for unit in self.of_unit])
        for tensor in (*self.master.present, *self.working.present):
            self.comms.keep(tensor)  # gathers of a step that nobody comes to take may still read them

    def over(self, masters: Sequence[Tensor]) -> "Memory":
        """Another memory of the same layout, on the same mesh."""
        return Memory(self.layout, masters, self.mesh, self.precision, self.assignment)

    def _working_copy(self, trainable: bool, master: Tensor) -> Tensor:
        same = not trainable or master.dtype == self.precision.gather_dtype
        return master if same else master.to(self.precision.gather_dtype)

    # ---- generations: who may still use this memory

    def begin_write(self) -> None:
        """From here on the state as it was is gone: an interrupt before `end_write` leaves no state at all."""
        if not self._half_written:
            self.generation += 1
            self._half_written = True

    def end_write(self) -> None:
        """What is written is a state again, the next generation."""
        self._half_written = False

    def owns(self, number: int, leaf: object) -> bool:
        return leaf is self.master.tensors[number]

    def why_gone(self) -> str:
        if self._half_written:
            return "was being written when its step was interrupted; load a checkpoint into a new state"
        return "was donated: a later state uses its memory. Keep the state that the step returned, or pass donate=False"

    # ---- shards and their working copies

    def params(self, seed: int, step: int) -> Tree:
        """The user's container with a handle per entry on the masters."""
        return placed(self.layout, self.master.tensors, Origin(self, self.generation, seed, step))

    def masters(self) -> list[Tensor]:
        """This rank's shards, by group."""
        return list(self.master.present)

    def copies(self, seed: int, step: int) -> Tree | None:
        """Like `params`, with the working copies that follow the masters; None where masters are what is gathered."""
        same = self.precision.gather_dtype == self.precision.param
        return None if same else self.handles(self.working.tensors, seed, step)

    def ready(self) -> None:
        """Takes note of writes by hand: if masters were written in place, the working copies follow."""
        now = [master._version for master in self.masters()]
        if now != self._written:
            written = zip(self.groups, now, self._written, strict=True)
            units = [unit for group, after, before in written if after != before for unit in group.held]
            with self.using([], [("shard", unit) for unit in units]):
                self.refresh(units)

    def refresh(self, units: Sequence[int] | None = None, *, copied: bool = False) -> None:
        """Takes note that masters have changed, of these units or of all trainable ones: the working copies follow.

        A write by hand to the others is left for `ready` to find. copied: they have followed already
        """
        changed = set(self.trained if units is None else units)
        for number, (group, master) in enumerate(zip(self.groups, self.masters(), strict=True)):
            if not changed.isdisjoint(group.units):
                self._written[number] = master._version
        self.versions.update(changed)
        if copied:
            return
        both = (self.master, self.working)
        copies = [s.present if units is None else [s.rows[unit] for unit in units] for s in both]
        for master, working in zip(*copies, strict=True):
            if working.data_ptr() != master.data_ptr():
                working.copy_(master)

    # ---- gradients, and the buffers of reductions

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
        """Gradient shards that live as long as the memory: what `train_step` uses, allocated once."""
        if self._grads is None:
            self._grads = self.new_grads()
        return self._grads

    def receive(self, straight: bool) -> Tensor:
        """The buffer that a reduction lands in, in the reduce dtype; empty where it goes straight into the shard."""
        if straight:
            return self._nothing
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

    @property
    def scratches(self) -> list[Tensor]:
        """What `scratch` has made so far."""
        return list(self._scratch.values())

    def _wire_buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.precision.reduce_dtype, device=self.comms.device)

    # ---- order

    def made(self, buffers: Sequence[Buffer]) -> None:
        """Buffers were just made on the compute stream: other streams wait for what it has to do until here."""
        with self.using((), buffers):
            pass

    @contextmanager
    def using(self, reads: Sequence[Buffer], writes: Sequence[Buffer] = (), run: Run | None = None) -> Iterator[None]:
        """A use on the compute stream: waits, and is over when the block ends. run: the op that it is, if observed"""
        event: Event | None = None
        waits: list[Event] = []
        if self.comms.streams:  # else all runs on one stream, in order
            event = self.comms.event()
            waits = self.board.use(event, "compute", reads, writes)
            self.board.open.append(event)
        try:
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
                if event in self.board.open:  # else a failure has cleared the board
                    self.board.open.remove(event)
