"""The interpreter: slots, and ops on their streams, after the ops that they have to wait for.

weight slot s   holds unit u:  view [padded numel of u] in u's gather dtype
gradient slot s holds unit u:  view [padded numel of u] in the reduce dtype
secondary shard of unit u:     [padded numel / local ranks], for gathers inside the node

for op in program:                              # what all of it comes to, in issue order, on one rank
    work[type(op)](op)                          # fills a slot from shards, or shards from a slot
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from yafsdp_fn.dist import flat
from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.dist.streams import Work
from yafsdp_fn.nn.linear import DESTINATION, Destination, GradViews, Place, destination, weight_leaf
from yafsdp_fn.program import ops
from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    Buffer,
    Exchange,
    Forward,
    Gather,
    Norm,
    Op,
    Receive,
    Reduce,
    Send,
    Stash,
    Update,
)
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime.block_call import address_of
from yafsdp_fn.runtime.memory import Memory, Shards
from yafsdp_fn.runtime.protocols import StepHooks, Works

# ---- Slots: preallocated flat buffers into which weights are gathered, and from which gradients are reduced.
#
# A slot is raw bytes, as large as its largest unit. If one rank has all of a unit, its shard is the whole vector: slots
# alias the shard, and nothing is copied.

Views = dict[tuple[int, int], Any]
"""Views of a unit in a slot, by (slot, unit)."""


class Bound(NamedTuple):
    """An op bound to a slot set: name, stream and uses; its work, if that depends on the slots alone; views of the
    gradients that it writes or reduces; `(unit, slot, source)` of the weights that it puts into slots, where source is
    the slot that it has them from, None where it gathers them."""

    name: str
    stream: str
    reads: list[Buffer]
    writes: list[Buffer]
    work: Work | None
    grads: list[GradViews]
    fills: tuple[tuple[int, int, int | None], ...]


def fills_of(op: Op) -> tuple[tuple[int, int, int | None], ...]:
    """`Bound.fills` of an op."""
    filled = ops.filled(op)
    read = ops.weight_slots(op, "reads") if filled else []
    sources = {unit: slot for slots in read for (unit, _), slot in zip(filled, slots, strict=True)}
    return tuple((unit, slot, sources.get(unit)) for unit, slot in filled)


def acquire(memory: Memory) -> "Slots":
    """Returns slots for a session."""
    idle: list[Slots] = memory.idle
    return idle.pop() if idle else Slots(memory)


class Slots:
    """The slots of one session, taken from its memory and given back.

    number: names the set on the scoreboard; bound: what the interpreter knows of ops here, until a slot moves; by kind
        and op, since ops are tuples: a stash and a reduction of the same numbers are equal
    contents: weight slot -> unit, version of its weights; storages: addresses of the memory that blocks see as weights
    carries: the content of carry slots, if the program has any: `StepHooks.carries`
    """

    def __init__(self, memory: Memory) -> None:
        self.memory: Memory = weakref.proxy(memory)  # which keeps its idle slots: a dropped state must not linger
        self.number = object()
        self.bound: dict[tuple[type[Op], Op], Bound] = {}
        self.carries: Any = None
        self._reserved: Program | None = None
        self._carried: dict[int, int] = {}  # of the program it is reserved for
        self.contents: dict[int, tuple[int, int]] = {}
        rows = memory.working.rows
        self._shards = self.storages = {address_of(rows[unit]) for unit in rows.keys() & memory.weights_alias}
        self._secondary: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._views: Views = {}
        self._grad_views: Views = {}
        self._leaves: dict[tuple[int, int, bool], list[Tensor]] = {}
        self._kept: dict[tuple[int, int], list[tuple[Tensor, Destination | None]]] = {}

    def release(self) -> None:
        """Gives the slots to the next session."""
        self.memory.idle.append(self)

    # ---- contents

    def reserve_for(self, program: Program) -> None:
        """Makes every slot of `program` as large as what it holds."""
        if self._reserved is not program:
            with self.memory.comms.memory():
                alias = self.memory.weights_alias
                self.reserve(program.slot_bytes(alias), program.grad_slot_bytes(self.memory.grads_alias))
                for unit, size in program.secondary_bytes().items():
                    if unit not in self._secondary and unit not in alias:
                        self._secondary[unit] = self._new(("secondary", self.number, unit), size)
            self._carried, self._reserved = program.carried(), program
            self.bound.clear()

    def missing(self) -> list[tuple[int, int]]:
        """Returns `(unit, slot)` pairs that the program reads first, and that this set does not hold in the current
        version."""
        versions = self.memory.versions
        return [(u, slot) for slot, u in self._carried.items() if self.contents.get(slot) != (u, versions[u])]

    # ---- memory

    def reserve(self, weights: Mapping[int, int], grads: Mapping[int, int]) -> None:
        """Makes every slot at least that many bytes large."""
        self._reserve("slot", self._weights, self._views, weights)
        self._reserve("grad slot", self._grads, self._grad_views, grads)

    def _reserve(self, kind: str, buffers: dict[int, Tensor], views: Views, sizes: Mapping[int, int]) -> None:
        for slot, size in sizes.items():
            if slot not in buffers or buffers[slot].numel() < size:
                if slot in buffers:
                    self.memory.comms.drain()  # a stream may still use the smaller buffer
                buffers[slot] = self._new((kind, self.number, slot), size)
                self.bound.clear()
                for key in [key for key in views if key[0] == slot]:
                    del views[key]
                if kind == "slot":
                    self.contents.pop(slot, None)
                    self._leaves = {key: leaves for key, leaves in self._leaves.items() if key[0] != slot}
                    self._kept = {key: pairs for key, pairs in self._kept.items() if key[0] != slot}
                    self.storages = self._shards | set(map(address_of, buffers.values()))

    def _new(self, name: Buffer, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.memory.comms.device)
        # the memory may have had another owner, whose kernels still run on the compute stream
        self.memory.made([name])
        # a state may be dropped while it gathers for its next step
        self.memory.comms.keep(buffer)
        return buffer

    def secondary(self, unit: int) -> Tensor:
        """Returns the secondary shard of `unit`, in its gather dtype."""
        return self._secondary[unit].view(self.memory.gather_dtype(unit))

    def weight(self, slot: int, unit: int) -> tuple[Tensor, list[Tensor]]:
        """Returns `(flat, leaves)`: views of `unit` in weight slot `slot`."""
        memory = self.memory
        if unit in memory.weights_alias:
            return memory.working.rows[unit], memory.working.leaves(unit)
        found: tuple[Tensor, list[Tensor]] | None = self._views.get((slot, unit))
        if found is None:
            flat = self._flat(self._weights[slot], memory.units[unit].gather_bytes, memory.gather_dtype(unit))
            found = self._views[slot, unit] = (flat, memory.layout_of(unit).split(flat))
        return found

    def grad(self, slot: int, unit: int, shards: Shards) -> GradViews:
        """Returns views of the gradient of `unit` in gradient slot `slot`, or in its shard if they alias."""
        memory = self.memory
        if unit in memory.grads_alias:
            return GradViews(shards.rows[unit], shards.leaves(unit), shards.gaps(unit))
        found: GradViews | None = self._grad_views.get((slot, unit))
        if found is None:
            layout = memory.layout_of(unit)
            flat = self._flat(self._grads[slot], memory.units[unit].reduce_bytes, memory.precision.reduce_dtype)
            found = self._grad_views[slot, unit] = GradViews(flat, layout.split(flat), layout.gaps(flat))
        return found

    def leaves(self, slot: int, unit: int, track: bool) -> list[Tensor]:
        """Returns a block's leaves of `unit` in weight slot `slot`; track: under autograd, with their destinations."""
        found = self._leaves.get((slot, unit, track))
        if found is not None:
            # what a block did to its weights, a hook or `requires_grad_`, is for that visit alone
            for leaf in found:
                if leaf._backward_hooks or leaf.requires_grad != track:
                    found = None
                    break
        if found is None:
            memory = self.memory  # a weak proxy; a bound method would be a cycle
            scratch = (lambda shape, dtype: memory.scratch(shape, dtype)) if track else None
            found = [weight_leaf(view, scratch) for view in self.weight(slot, unit)[1]]
            self._leaves[slot, unit, track] = found
        return found

    def kept_leaves(self, slot: int, unit: int) -> list[Tensor]:
        """Returns `leaves` for a visit that keeps its graph: tensors of its own, which are no leaves of autograd."""
        pairs = self._kept.get((slot, unit))
        if pairs is None:
            views, leaves = self.weight(slot, unit)[1], self.leaves(slot, unit, True)
            pairs = self._kept[slot, unit] = [(v, destination(leaf)) for v, leaf in zip(views, leaves, strict=True)]
        out = []
        for view, found in pairs:
            leaf = view.data  # not `detach`: see `weight_leaf`
            if found is not None:
                setattr(leaf, DESTINATION, found)
            out.append(leaf)
        return out

    @staticmethod
    def _flat(buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return buffer[:size].view(dtype)


def _aliased(
    uses: list[Buffer], slot: str, shard: str, pairs: Iterable[tuple[int, int]], alias: Collection[int]
) -> list[Buffer]:
    """Returns `uses` with shards in place of slots. pairs: `(unit, slot)`; alias: units whose slots are their shards"""
    found = {number: unit for unit, number in pairs if unit in alias}
    kept = [use for use in uses if use[0] != slot or use[2] not in found]
    return [*kept, *((shard, unit) for unit in found.values())]


# ---- The interpreter: puts ops on their streams, in the order that the scoreboard derives.
#
# issue(Gather, Stash, Reduce, AllReduce, ...)    returns at once; the stream does it when what it waits for is done
# run(Norm or Update, work)                       waits, and does `work` on the compute stream
#
# Computes are begun and ended by the session, around the user's block. A table maps each kind of issued op to the
# function that returns its work: a new kind of op is one more row.


class Interpreter:
    """Executes the ops of one session.

    grads: gradient shards, None if the session trains nothing; step_hooks: of the step
    touched: units whose gradient shard has been written in this step
    """

    def __init__(
        self,
        memory: Memory,
        slots: Slots,
        grads: Shards | None,
        step_hooks: StepHooks,
        *,
        step: int,
    ) -> None:
        self.memory, self.slots, self.grads, self.observer = memory, slots, grads, step_hooks.observer
        self.touched: set[int] = set()
        self._step = step
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self._updates = step_hooks.updates
        self._further: Works = {} if slots.carries is None else slots.carries.works()

    # ---- computes: see `Session.compute`

    def places(self, op: Backward, trained: Sequence[int]) -> list[Place]:
        """Returns the gradient slots of the trained units, and records that they will hold gradients."""
        bound, out = self.slots.bound.get((type(op), op)), list[Place]()
        all_views: Sequence[GradViews] = () if bound is None else bound.grads
        if not all_views and self.grads is not None:
            pairs = zip(trained, op.grad_slots, strict=True)
            all_views = [self.slots.grad(slot, unit, self.grads) for unit, slot in pairs]
        for unit, slot, views in zip(trained, op.grad_slots, all_views, strict=True):
            if unit in self.memory.grads_alias:  # the slot is the shard: it stays written after its reduction
                add = unit in self.touched
                self.touched.add(unit)
            else:
                add = self._unreduced.get(slot) == unit
                self._unreduced[slot] = unit
            out.append(Place(views, add))
        return out

    def early_places(self, op: Forward, trained: Sequence[int]) -> list[Place]:
        """The slots that `places` will return for the backward of `op`, if `op` may write there already; else none."""
        alias = self.memory.grads_alias
        if self.grads is None or (alias and any(unit in alias and unit in self.touched for unit in trained)):
            return []  # a shard that stands for its slot already has an earlier microbatch's gradient
        pairs = zip(trained, op.early, strict=True)
        return [Place(self.slots.grad(slot, unit, self.grads), False) for unit, slot in pairs]

    def run(self, op: Norm | Update, work: Callable[[], None]) -> None:
        """Runs `work`, the content of `op`, on the compute stream when it may; an untouched gradient counts as zero."""
        run = None if self.observer is None else self.observer.issue(op)
        bound = self.slots.bound.get((type(op), op)) or self.bind(op)
        with self.memory.using(bound.reads, bound.writes, run), torch.no_grad():
            self.zero_untouched(op.units)
            work()

    def zero_untouched(self, units: Iterable[int]) -> None:
        """Zeroes the gradient shards of `units` that nothing has written."""
        assert self.grads is not None
        for unit in units:
            if unit not in self.touched:
                self.grads.rows[unit].zero_()
                self.touched.add(unit)

    # ---- issued ops

    def issue(self, op: Op, why: str = "", number: int | None = None) -> None:
        """Puts an op on its stream. why: reason, for errors; number: position of an op before the program"""
        run = None if self.observer is None else self.observer.issue(op, number)
        bound = self.slots.bound.get((type(op), op)) or self.bind(op)
        work = bound.work or self._work(op)
        for unit, slot, source in bound.fills:
            if source is None:
                self.slots.contents[slot] = unit, self.memory.versions[unit]
            else:  # what is copied is as old as it was
                self.slots.contents[slot] = self.slots.contents[source]
        if work is None:  # slots are the shards
            return
        comms = self.memory.comms
        stream = comms.streams.get(bound.stream)
        if stream is None:  # one rank: what is left is a copy, on the compute stream
            if run is not None:
                run.on("compute", None)
                work = run.timed(work)
            with torch.no_grad():
                work()
            return
        if comms.lost is not None:
            comms.check()
        label = f"{bound.name} (step {self._step}){why}"
        event = comms.event()
        waits = self.memory.board.use(event, bound.stream, bound.reads, bound.writes)
        if run is not None:
            run.on(bound.stream, event, waits)
            work = run.timed(work)
        stream.submit(work, waits, event, label)

    def bind(self, op: Op, visit: Visit | None = None) -> Bound:
        """Collects, once, all that is known of `op` in these slots. visit: of a compute"""
        memory, grads = self.memory, self.grads
        if isinstance(op, Forward | Backward):  # the session itself copies what travels between segments
            reads, writes = op._replace(takes=(), gives=()).uses(self.slots.number)
        else:
            reads, writes = op.uses(self.slots.number)
        if isinstance(op, Forward | Backward) and visit is not None:  # where slots are the shards
            pairs = zip(visit.units, op.slots, strict=False)  # a half of a backward may read none
            reads = _aliased(reads, "slot", "shard", pairs, memory.weights_alias)
            pairs = zip(visit.trained, op.early if isinstance(op, Forward) else op.grad_slots, strict=False)
            writes = _aliased(writes, "grad slot", "grad shard", pairs, memory.grads_alias)
        views: list[GradViews] = []
        if isinstance(op, Backward | Reduce) and grads is not None:
            ids = op.units if isinstance(op, Reduce) else () if visit is None or not op.grad_slots else visit.trained
            if memory.grads_alias.isdisjoint(ids):  # else they are of this session's gradients
                views = [self.slots.grad(slot, unit, grads) for unit, slot in zip(ids, op.grad_slots, strict=True)]
        names = ", ".join(memory.units[unit].name for unit in getattr(op, "units", ()))
        mail: Any = self.slots.carries
        what = names or (mail.named(op) if isinstance(op, Send | Receive) else f"visit {op[0]}")
        name = f"{type(op).__name__.lower()} of {what}"
        work = self._work(op) if op.stream == "gather" else None  # depends on these slots alone
        found = Bound(name, op.stream, reads, writes, work, views, fills_of(op))
        self.slots.bound[type(op), op] = found
        return found

    # ---- the work of an op for its stream, None if there is nothing to do

    def _work(self, op: Op) -> Work | None:
        kind: type[Any] = type(op)
        return self._further[kind](op) if kind in self._further else WORKS[kind](self, op)

    def _gather(self, op: Gather) -> Work | None:
        rows, in_node, alias = self.memory.working.rows, op.source == "node", self.memory.weights_alias
        gather = flat.gather_local_into if in_node else flat.gather_into
        pairs = [pair for pair in zip(op.units, op.slots, strict=True) if pair[0] not in alias]
        wholes = [self.slots.weight(slot, unit)[0] for unit, slot in pairs]
        parts = [self.slots.secondary(unit) if in_node else rows[unit] for unit, _ in pairs]
        return self._by_ranks([unit for unit, _ in pairs], gather, wholes, parts)

    def _reduce(self, op: Reduce) -> Work | None:
        memory, grads = self.memory, self.grads
        assert grads is not None
        units = op.units
        if not memory.grads_alias.isdisjoint(units):
            units = tuple(unit for unit in units if unit not in memory.grads_alias)
        adds = [unit in self.touched for unit in units]
        self.touched.update(op.units)
        if not units:
            return None
        for slot in op.grad_slots:
            self._unreduced.pop(slot, None)
        all_views = self.slots.bound[Reduce, op].grads
        if not all_views:  # some units alias
            pairs = zip(op.units, op.grad_slots, strict=True)
            all_views = [self.slots.grad(slot, unit, grads) for unit, slot in pairs if unit in units]
        wholes, shards = [views.flat for views in all_views], [grads.rows[unit] for unit in units]
        # a sum lands in its shard where it need not be converted or added
        straight = not any(adds) and memory.wire_dtype == shards[0].dtype and memory.sum_dtype is None
        receive, wide = memory.receive(straight), memory.sum_dtype

        def reduce(comms: Communicators, shards: Any, wholes: Any, adds: Any) -> None:
            flat.reduce_into(comms, shards, wholes, receive, adds=adds, accumulate=wide)

        return self._by_ranks(units, reduce, shards, wholes, adds)

    def _by_ranks(self, units: Sequence[int], work: Callable[..., None], *columns: Sequence[Any]) -> Work | None:
        """Returns `work(comms, *columns)`, once for all units that are cut over the same ranks; None without units."""
        ranks_of = self.memory.ranks_of
        together: dict[Communicators, list[int]] = {}
        for at, unit in enumerate(units):
            together.setdefault(ranks_of[unit], []).append(at)
        if len(together) < 2:
            return partial(work, *together, *columns) if together else None
        jobs = [partial(work, comms, *([c[at] for at in some] for c in columns)) for comms, some in together.items()]

        def in_turn() -> None:
            for job in jobs:
                job()

        return in_turn

    # ---- of ops that a plain `zero3` does not have

    def _stash(self, op: Stash) -> Work | None:
        jobs = [
            (self.slots.secondary(unit), flat.node_slice(self.memory.ranks_of[unit], self.slots.weight(slot, unit)[0]))
            for unit, slot in zip(op.units, op.slots, strict=True)
            if unit not in self.memory.weights_alias
        ]
        if not jobs:
            return None

        def work() -> None:
            for kept, part in jobs:
                kept.copy_(part)

        return work

    def _all_reduce(self, op: AllReduce) -> Work | None:
        memory, grads = self.memory, self.grads
        assert grads is not None
        comms = memory.comms
        if op.over == "stages":
            (unit,) = op.units
            return partial(comms.sharing(memory.holders[unit]).all_reduce, grads.rows[unit], ReduceOp.SUM)
        if comms.replicas == 1:
            return None
        staging, rows = memory.staging(), [grads.rows[unit] for unit in op.units]
        wire, wide = memory.wire_dtype, memory.sum_dtype

        def work() -> None:
            for shard in rows:
                flat.all_reduce_replicas(comms, shard, staging, wire=wire, accumulate=wide)

        return work

    def _exchange(self, op: Exchange) -> Work | None:
        assert self._updates is not None, "only an optimizer exchanges"
        return None if self.memory.comms.ranks == 1 else self._updates.exchange(op.units)


WORKS: dict[type[Any], Callable[[Interpreter, Any], Work | None]] = {
    Gather: Interpreter._gather,
    Reduce: Interpreter._reduce,
    Stash: Interpreter._stash,
    AllReduce: Interpreter._all_reduce,
    Exchange: Interpreter._exchange,
}
"""Kind of op -> its work. Unbound functions: a cycle through the interpreter would keep a step's memory until the
garbage collector runs."""
