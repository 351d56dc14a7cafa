"""The memory of a sharded state: shards, working copies, gradient shards, and the hazards over them.

A `ShardedState` is a frozen view of a memory at one generation. The memory is updated in place: donation advances its
generation, and older views raise.
"""

import itertools
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication import formats
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.communication.groups import mesh_axes
from yafsdp_fn.communication.streams import Event, Scoreboard
from yafsdp_fn.params.layout import Group, TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Origin, placed
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.graph_walks import spaced
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.util.bits import sum_of_bits


def address_of(tensor: Tensor) -> int:
    """Returns the address of the tensor's memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


# ---- Whether leaves have been written to.

ALL = sys.maxsize


def content(leaves: Sequence[Tensor], most: int) -> list[tuple[int, int]]:
    """Fingerprints each of `leaves`: another one shows that it has been written to.

    most: elements of each whose bits are compared, at equal distances, since no version counts what is written by
        `.data`: 0, `SAMPLES` (a step has no memory for more), or `ALL`
    """
    return [(leaf._version, int(sum_of_bits(spaced(leaf, most))) if most else 0) for leaf in leaves]


# ---- The memory of a state, from its first step to its last.

COMPARED = 2
"""Calls before which what is gathered is compared with its masters: what writes by `.data` does so from the first step
on, and later ones are not to wait."""


class StateMemory(Placement[Communicators]):
    """Owns the shards of one layout on one mesh. make: returns them, one per group, for this placement

    master: in `precision.param` (frozen groups: in their own dtype); working: what is gathered, in the gather dtype,
        the master itself if the dtypes are equal or each gather casts it, or the bytes of a wire format
    versions: unit -> number of changes of its weights
    number: of the states on this mesh, the same on all ranks, which make them together
    moments: the tensors of the optimizer's state, which steps write to
    idle: slot sets for the next session (slots.py)
    """

    def __init__(
        self,
        layout: TreeLayout,
        make: Callable[[Placement[Communicators]], Sequence[Tensor]],
        mesh: DeviceMesh,
        precision: Precision,
        assignment: Assignment | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(layout, mesh_axes(mesh), precision, communicators(mesh), assignment)
        masters = make(self)
        self.mesh, self._copies = mesh, itertools.count()
        self.number = next(self.comms.states) if number is None else number
        for stages in sorted({stages for stages in self.holders if len(stages) > 1}):
            self.comms.share(stages)
        for unit, wide in self.sums.items():
            if wide is not None:
                self.ranks_of[unit].connect_sums(precision.param, self.wire_dtype(unit), wide)
        # shards, and what is gathered of them
        self.master = Shards(self.groups, masters)
        working = [self._working_copy(group, m) for group, m in zip(self.groups, masters, strict=True)]
        self.working = Shards(self.groups, working)
        # uses of its buffers, and buffers that are made when something asks for them
        self.versions: Counter[int] = Counter()
        self.board: Scoreboard[Event] = Scoreboard()
        self.moments: frozenset[weakref.ref[Tensor]] = frozenset()
        self._half_written = False
        self._grads: Shards | None = None
        self._buffers: dict[str, Tensor] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.idle: list[Any] = []
        self._written = [master._version for master in masters]
        self._compares = COMPARED
        self.nothing = self._bytes(0)  # what receives reductions that go straight into their shards
        self.made([("shard", unit) for unit in self.of_unit])
        for tensor in (*self.master.present, *self.working.present):
            self.comms.mark_used(tensor)  # gathers for a step that never comes may still read them

    # ---- copies

    def over(self, masters: Sequence[Tensor]) -> "StateMemory":
        """Makes another memory of the same layout, on the same mesh."""
        number = zlib.crc32(f"{self.number} {next(self._copies)}".encode())  # one rank alone may make a copy
        return StateMemory(self.layout, lambda _: masters, self.mesh, self.precision, self.assignment, number)

    def _working_copy(self, group: Group, master: Tensor) -> Tensor:
        format = group.wire.gather
        if format is not None:
            nbytes = format.nbytes(master.shape[-1])
            out = master.new_empty(*master.shape[:-1], nbytes, dtype=torch.uint8)
            formats.encode(format, master, out)
            return out
        keeps = group.trainable and self.precision.copy
        return master.to(self.gather_dtype(group.units[0])) if keeps else master

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a state belongs to ranks, and is not pickled: ya.checkpoint.save(folder, state) writes it, state.copy() "
            "copies it, and ya.unshard(state.params) makes whole tensors of it"
        )

    # ---- generations

    def begin_write(self) -> None:
        """Starts to overwrite the state: an interrupt before `end_write` leaves no usable state."""
        if not self._half_written:
            self.generation += 1
            self._half_written = True

    def end_write(self) -> None:
        """Makes the written memory a state again, the next generation."""
        self._half_written = False

    def owns(self, number: int, leaf: object) -> bool:
        own: Any = self.master.tensors[number]
        if leaf is own or not isinstance(leaf, Tensor):
            return leaf is own
        return address_of(leaf) == address_of(own) != 0  # a view of it

    def why_gone(self) -> str:
        if self._half_written:
            return "was being written when its step was interrupted; load a checkpoint into a new state"
        return "was donated: a later state uses its memory. Keep the state that the step returned, or pass donate=False"

    # ---- shards and their working copies

    def params(self, seed: int, step: int) -> Tree:
        """Returns the user's container with a handle per entry on the masters."""
        # as `handles` does, on the way of every step: no further file
        return placed(self.layout, self.master.tensors, Origin(self, self.generation, seed, step))

    def masters(self) -> list[Tensor]:
        """This rank's shards, by group."""
        return list(self.master.present)

    def copies(self, seed: int, step: int) -> Tree | None:
        """Returns `params` on the working copies, which may be masters; None if all are. What travels in a format is no
        copy that an optimizer could write: `refresh` encodes it."""
        copies: list[Tensor] = []
        same = True
        for group, master, working in zip(self.groups, self.master.present, self.working.present, strict=True):
            copy = working if group.wire.gather is None else master
            same &= copy is master
            copies.append(copy)
        return None if same else self.handles(copies, seed, step)

    def ready(self) -> None:
        """Detects masters that were written in place by hand, and refreshes their working copies. Raises RuntimeError
        for writes that nothing counts."""
        now = [master._version for master in self.master.present]
        if now != self._written:
            written = zip(self.groups, now, self._written, strict=True)
            units = [unit for group, after, before in written if after != before for unit in group.held]
            with self.using([], [("shard", unit) for unit in units]):
                self.refresh(units)
        if self._compares:
            # no version counts what is written by `.data`; a unit at a time, for which the host waits
            for group, master in zip(self.groups, self.master.present, strict=True):
                rows = master.reshape(len(group.held), -1) if group.held else ()
                for unit, row in zip(group.held, rows, strict=True):
                    if sum_of_bits(self._working_copy(group, row)) != sum_of_bits(self.working.rows[unit]):
                        raise errors.leaf_written_unseen()
            self._compares -= 1

    def refresh(self, units: Sequence[int] | None = None, *, copied: bool = False) -> None:
        """Records that the masters of these units, or of all trainable ones, have changed; refreshes their working
        copies.

        Writes by hand to other units are left for `ready`. copied: the working copies are up to date
        """
        # what slots hold of them is of an earlier version now
        changed = set(self.trained if units is None else units)
        self.versions.update(changed)
        for number, group in enumerate(self.groups):
            written = [unit for unit in group.held if unit in changed]
            if not written:
                continue
            master, working = self.master.present[number], self.working.present[number]
            self._written[number] = master._version
            if working is master or (copied and group.wire.gather is None):
                continue
            # a whole group at once, or row by row
            pairs = [(master, working)]
            if len(written) < len(group.held):
                pairs = [(self.master.rows[unit], self.working.rows[unit]) for unit in written]
            for values, copy in pairs:
                if group.wire.gather is None:
                    copy.copy_(values)
                else:
                    formats.encode(group.wire.gather, values, copy)

    # ---- gradients, and the buffers of reductions

    @torch.inference_mode(False)
    def new_grads(self) -> Shards:
        """Allocates gradient shards of the trainable groups."""
        grads: list[Tensor | None] = []
        for group, master in zip(self.groups, self.master.present, strict=True):
            grads.append(torch.empty_like(master) if group.trainable else None)
        return Shards(self.groups, grads)

    def kept_grads(self) -> Shards:
        """Returns the gradient shards of `train_step`, allocated once for the life of the memory."""
        if self._grads is None:
            self._grads = self.new_grads()
        return self._grads

    def buffer(self, name: Literal["receive", "replicate"]) -> Tensor:
        """Returns the buffer that receives reductions, or in which gradient shards travel between replicas, in
        bytes."""
        if name not in self._buffers:
            receive, staging = self.buffer_bytes()
            self._buffers[name] = self._bytes(receive if name == "receive" else staging)
            self.made([(name,)])
        return self._buffers[name]

    def scratch(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns memory for one fresh gradient of a leaf, on the compute stream; the next caller overwrites it."""
        found = self._scratch.get(dtype)
        if found is None:
            found = torch.empty(self.largest_leaf(dtype), dtype=dtype, device=self.comms.device)
            self._scratch[dtype] = found
        return found[: shape.numel()].view(shape)

    def _bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.comms.device)

    # ---- ordering

    def made(self, buffers: Sequence[Buffer]) -> None:
        """Registers buffers just made on the compute stream: other streams wait for its work up to here."""
        with self.using((), buffers):
            pass

    @contextmanager
    def using(self, reads: Sequence[Buffer], writes: Sequence[Buffer] = (), run: Any = None) -> Iterator[None]:
        """Orders a use on the compute stream: waits, and ends when the block ends. run: the op, if observed"""
        event = self.comms.event() if self.comms.streams else None
        succeeded = None
        try:
            self.board.begin(event, reads, writes, run)
            yield
            succeeded = run
        finally:
            self.board.end(event, succeeded)
