"""The trace: the visits of a loss function in order. A schedule is built from nothing else."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from yafsdp_fn.program.measured import Cost, OptimizerMemory
from yafsdp_fn.program.ops import ComputeOp, MessageOp, kind_of, weight_slots
from yafsdp_fn.program.split import Kind, Message, Natural, Positive, Split
from yafsdp_fn.util.mesh_axes import ALIGN, EXPERT, AxisCollective, MeshAxes, inside_of, padded_numel
from yafsdp_fn.util.schema import Limits

# ---- What a loss function does with its units: the visits, in order. A schedule is built from this and nothing else.
#
#     for m in range(microbatches):
#         for visit in visits:           Compute("forward", visit, m)
#         for visit in reversed(visits): Compute("backward", visit, m, closes)
#
# Visits are chained, so backward runs in exactly the reverse of the forward's order.

UpdateWhen = Literal["never", "after norm"]
"""The time a unit may be updated: never, since the step has no optimizer, or when the norm of the whole gradient is
known, which clips it, or skips a step that is not finite, and is told."""


Collectives = tuple[AxisCollective, ...]
Parts = Annotated[int, Limits(1, 2**10)]
"""Parts of an update, and elements of a block: a trace from elsewhere may ask for so many."""


# ---- Units, visits, computes.


class Encoding(NamedTuple):
    """The wire format of a unit, as data. name: equal for equal formats; block: elements that are encoded together, to
    `block_bytes` bytes; nbytes: of the padded flat vector"""

    name: str
    block: Parts
    block_bytes: Natural
    nbytes: Natural


class UnitSpec(NamedTuple):
    """One flat vector of parameters, sharded as one.

    stack: name of the stack it is a layer of, None if unstacked; layer: index in the stack, 0 if unstacked
    numel: elements, without padding; gather_bytes, reduce_bytes: one padded flat vector, as gathered and as reduced
    sum_bytes: the same vector in the dtype in which ranks sum themselves (`Precision.accumulate`), 0 if they do not
    over: axes inside blocks that it is split over: the vector is of one part, cut over the ranks that hold this part
    gathered_as, reduced_as: the wire formats in which it travels, None where these are dtypes
    state_block: elements between which its optimizer's state, in a format, is not cut

    >>> unit = trace.units[1]
    >>> unit.name, unit.stack, unit.layer, unit.numel
    ('head', None, 0, 128)
    """

    id: int
    name: str
    # where it is in the model
    stack: str | None
    layer: Natural
    # its size, on this mesh
    numel: Natural
    gather_bytes: Natural
    reduce_bytes: Natural
    trainable: bool
    sum_bytes: Natural = 0
    over: tuple[str, ...] = ()
    # what it travels in
    gathered_as: Encoding | None = None
    reduced_as: Encoding | None = None
    state_block: Positive = 1

    @property
    def align(self) -> int:
        """Elements at whose multiples its shards are cut."""
        formats = [each for each in (self.gathered_as, self.reduced_as) if each is not None]
        return math.lcm(ALIGN, self.state_block, *(each.block for each in formats))

    @property
    def gather_wire(self) -> int:
        """Bytes of the flat vector on the wire of a gather from all ranks."""
        return self.gather_bytes if self.gathered_as is None else self.gathered_as.nbytes

    @property
    def reduce_wire(self) -> int:
        """Bytes of the flat vector on the wire of a reduction."""
        return self.reduce_bytes if self.reduced_as is None else self.reduced_as.nbytes


class Visit(NamedTuple):
    """One use of units in a microbatch.

    units: ids, in the order the block takes them; trained: those that receive a gradient from this visit
    cost: as measured on fake tensors
    collectives: over axes inside blocks, of its forward, in order; adjoints: of its backward, a recomputation aside

    >>> visit = trace.visits[1]
    >>> visit.name, visit.units, visit.trained, visit.cost.flops
    ('layers[0]', (2,), (2,), 32768)
    """

    id: int
    name: str
    units: tuple[int, ...]
    trained: tuple[int, ...]
    cost: Cost = Cost()
    collectives: Collectives = ()
    adjoints: Collectives = ()


class Between(NamedTuple):
    """Collectives over axes inside blocks that the loss calls itself, until its next visit or its end.

    after: the visit before them, -1 where there is none; adjoints: those of the backward
    """

    after: int
    collectives: Collectives
    adjoints: Collectives


class Compute(NamedTuple):
    """Forward or backward of a visit, or a half of its backward. closes: units whose gradient is now complete in this
    microbatch.

    >>> trace.order[0]
    Compute(kind='forward', visit=0, microbatch=0, closes=())
    >>> trace.order[-1].kind, trace.order[-1].closes           # the gradient of the embedding is complete
    ('backward', (0,))
    """

    kind: Kind
    visit: int
    microbatch: int
    closes: tuple[int, ...] = ()


def arguments(sizes: Mapping[str, int]) -> str:
    """Writes sizes as arguments in a call: `replicate=2, shard=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


SHOWN = 16
"""Lines of a table that are shown at most."""


def shortened(rows: Sequence[str]) -> list[str]:
    """Returns the first and the last of many."""
    if len(rows) <= SHOWN:
        return list(rows)
    return [*rows[: SHOWN // 2], f"  ... {len(rows) - SHOWN} more ...", *rows[-(SHOWN // 2) :]]


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines: the first column is aligned to the left, the others to the right."""
    lines = [*rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justified = [[first.ljust(width[0]), *map(str.rjust, cells, width[1:])] for first, *cells in lines]
    return ["  ".join(cells).rstrip() for cells in justified]


# ---- The step.


class Lent(NamedTuple):
    """A unit whose leaves are lent to their owners by the optimizer.

    parts: number of parts of its update; leaves: as measured, `(offset, shape, bytes that would travel, flops)` of each

    >>> of = ya.planner.trace(loss_fn, params, batch, tx=ya.optim.muon(0.02))
    >>> [(of.units[lent.unit].name, lent.parts) for lent in of.lent][:2]
    [('layers[0]', 3), ('layers[1]', 3)]
    """

    unit: int
    parts: Parts
    leaves: tuple[tuple[Natural, tuple[Natural, ...], Natural, Natural], ...] = ()


class Trace(NamedTuple):
    """The whole step. mesh: `(axis name, size)` pairs, outermost first; order: computes as executed.

    lent: units whose update has several parts; ordered: microbatches are added one by one (a deterministic mesh), so
        that each gradient of a unit is reduced once in each of them
    split: the cut into pipeline stages, if there is one; stage: the stage whose trace this is, None for the whole step.
        A stage's trace has its own computes in `order`; units and visits of other stages keep only number and name.
        loss_of: the visits whose outputs the loss is made of, where it was traced
    between: collectives between visits
    kernels: one of `KERNELS`: which of `Moved` a prediction takes
    precision: `Precision.names`, and optimizer: where a trace was taken on fake tensors, for predicted memory

    >>> trace.mesh, trace.microbatches, len(trace.units), len(trace.visits), len(trace.order)
    ((('shard', 2),), 1, 6, 6, 12)
    """

    # what is computed, and where
    units: tuple[UnitSpec, ...]
    visits: tuple[Visit, ...]
    order: tuple[Compute, ...]
    mesh: tuple[tuple[str, Positive], ...]
    microbatches: Positive
    # the optimizer, and how gradients are added
    update_when: UpdateWhen = "never"
    precision: tuple[str, ...] = ()
    optimizer: OptimizerMemory = OptimizerMemory()
    lent: tuple[Lent, ...] = ()
    ordered: bool = False
    # stages, and what travels beside units
    split: Split | None = None
    stage: int | None = None
    loss_of: tuple[int, ...] = ()
    between: tuple[Between, ...] = ()
    kernels: str = "fused"

    def __str__(self) -> str:
        """Returns the step, a line for each visit, and the order of computes; of many the first and the last."""
        return _table(self)

    def __repr__(self) -> str:
        return f"Trace({str(self).partition(chr(10))[0]})"

    # ---- the mesh

    @property
    def ranks(self) -> int:
        """Ranks that shards are cut by: all axes but `stage` and `replicate`."""
        return math.prod(size for name, size in self.mesh if name not in ("stage", "replicate"))

    def ranks_of(self, unit: UnitSpec) -> int:
        """Returns the ranks that `unit` is cut by: those of axes that it is split over hold other parts."""
        return self.ranks // math.prod(dict(self.mesh)[name] for name in unit.over)

    @property
    def inside(self) -> MeshAxes:
        """The axes inside blocks with their sizes, outermost first."""
        names = inside_of([name for name, _ in self.mesh])
        return tuple((name, size) for name, size in self.mesh if name in names)

    @property
    def batch_ranks(self) -> int:
        """Parts that the rows of a batch go to, in one stage."""
        return self.stage_ranks // math.prod(size for name, size in self.inside if name != EXPERT)

    @property
    def cut(self) -> Split:
        """`split`; of a step that is not cut, all of its visits as one segment of one stage."""
        return self.split or Split(((0, len(self.visits)),), (0,), ())

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return dict(self.mesh).get("stage", 1)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return dict(self.mesh).get("replicate", 1)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage: all axes but `stage`."""
        return self.ranks * self.replicas

    @property
    def world(self) -> int:
        """Ranks of the mesh, all stages together."""
        return self.stage_ranks * self.stages

    @property
    def local_ranks(self) -> int:
        """Ranks of one node that share a replica; all of them where the mesh does not tell nodes apart."""
        return self.ranks // dict(self.mesh).get("node", 1)

    def local_ranks_of(self, unit: UnitSpec) -> int:
        """Returns the ranks of one node that `unit` is cut by."""
        return self.ranks_of(unit) // dict(self.mesh).get("node", 1)

    # ---- on another mesh

    def on(self, mesh: MeshAxes) -> "Trace":
        """This step on another mesh, `(axis name, size)` pairs: only the padding of units changes.

        The batch stays that of one rank. Axes inside blocks stay: what a rank computes depends on them.
        """
        moved = self._replace(mesh=mesh)
        before, after = ([axis for axis in each.inside if axis[1] > 1] for each in (self, moved))
        if before != after:
            raise ValueError(
                f"trace.on({mesh}): the step was traced with the axes inside blocks {dict(before) or 'none'}, and "
                "they cannot change: trace again"
            )
        both = [(unit, self.ranks_of(unit), moved.ranks_of(unit)) for unit in self.units]
        return moved._replace(units=tuple(_padded(unit, *ranks) for unit, *ranks in both))

    # ---- what an op names

    @property
    def trains(self) -> bool:
        """Tells whether there is a backward."""
        return any(compute.kind != "forward" for compute in self.order)

    def units_of(self, op: Any) -> tuple[int, ...]:
        """Returns the units that an op names, or its visit uses."""
        ids: tuple[int, ...] = self.visits[op.visit].units if hasattr(op, "visit") else op.units
        return ids

    def weights_of(self, op: Any) -> tuple[tuple[int, int], ...]:
        """Returns `(unit, weight slot)` of the weights that `op` reads from slots."""
        found: list[tuple[int, int]] = []
        for slots in weight_slots(op, "reads"):
            if slots:  # a half of a backward may read none
                found += zip(self.units_of(op), slots, strict=True)
        return tuple(found)

    def messages_of(self, op: Any) -> tuple[tuple[Message, int], ...]:
        """Returns `(message, carry slot)` of what `op` takes and gives, sends or receives, between segments of a
        pipeline."""
        if isinstance(op, MessageOp):
            return ((op.message, op.carry_slot),)
        if not isinstance(op, ComputeOp) or self.split is None:
            return ()
        of = kind_of(op), op.visit, op.microbatch
        return tuple(zip((*self.split.takes(*of), *self.split.gives(*of)), (*op.takes, *op.gives), strict=False))

    # ---- stages, collectives, updates

    @property
    def shared(self) -> tuple[int, ...]:
        """The units that this stage trains together with others."""
        if self.split is None or not self.trains:
            return ()
        return tuple(u for u, stages in self.split.shared if self.stage in stages and self.units[u].trainable)

    def called_by(self, visit: int) -> tuple[tuple[str, ...], ...]:
        """Returns the collectives of `visit` and of the loss after it in words without bytes, which depend on the
        batch: of both forwards, and of both backwards."""
        own = self.visits[visit]
        beside = self.beside(visit)
        each = own.collectives, beside.collectives, own.adjoints, beside.adjoints
        return tuple(tuple(f"{kind} {axis}" for axis, kind, _ in calls) for calls in each)

    @property
    def agreed(self) -> dict[str, Any]:
        """The step by name, as ranks must have it alike and a program must fit it: without measured costs, and without
        the order of computes, which ops have."""
        names = ("mesh", "units", "microbatches", "split", "update_when", "ordered")
        visits = [(visit.units, visit.trained, self.called_by(visit.id)) for visit in self.visits]
        lent = [(of.unit, of.parts) for of in self.lent]
        return {name: getattr(self, name) for name in names} | {"lent": lent, "visits": visits}

    def beside(self, visit: int) -> Between:
        """Returns the collectives of the loss after `visit`, and before the first one."""
        here = [each for each in self.between if max(each.after, 0) == visit]
        calls = tuple(call for each in here for call in each.collectives)
        return Between(visit, calls, tuple(call for each in here for call in each.adjoints))

    def parts(self, unit: int) -> int:
        """Returns the number of parts in which the optimizer updates `unit`."""
        return next((lent.parts for lent in self.lent if lent.unit == unit), 1)

    @property
    def trained(self) -> tuple[int, ...]:
        """The units that an optimizer updates, used or not."""
        return tuple(unit.id for unit in self.units if unit.trainable)


# ---- Weights and gradients of a compute.


def reads_of(compute: Compute, trace: Trace) -> tuple[int, ...]:
    """Returns the units whose weights a compute reads; gradients of weights need none."""
    return trace.visits[compute.visit].units if compute.kind != "weights" else ()


def writes_of(compute: Compute, trace: Trace) -> tuple[int, ...]:
    """Returns the units whose gradient a compute writes."""
    return trace.visits[compute.visit].trained if compute.kind in ("backward", "weights") else ()


# ---- Units of other stages, and on other meshes.


def elsewhere(unit: UnitSpec) -> UnitSpec:
    """Returns `unit` to a stage that does not hold it: a number and a name."""
    unit = unit._replace(gathered_as=None, reduced_as=None, state_block=1)
    return unit._replace(numel=0, gather_bytes=0, reduce_bytes=0, trainable=False, sum_bytes=0)


def _padded(unit: UnitSpec, before: int, after: int) -> UnitSpec:
    """Returns `unit` cut over `after` ranks instead of `before`."""
    old = padded_numel(unit.numel, before, unit.align)
    new = padded_numel(unit.numel, after, unit.align)
    sizes = (unit.gather_bytes, unit.reduce_bytes, unit.sum_bytes)
    gather, reduce, wide = (nbytes // old * new if old else 0 for nbytes in sizes)
    encodings = (unit.gathered_as, unit.reduced_as)
    gathered, reduced = (each and each._replace(nbytes=new // each.block * each.block_bytes) for each in encodings)
    return unit._replace(
        gather_bytes=gather, reduce_bytes=reduce, sum_bytes=wide, gathered_as=gathered, reduced_as=reduced
    )


# ---- The order of a loss.


def chained_order(visits: Sequence[Visit], microbatches: int, backward: bool = True) -> tuple[Compute, ...]:
    """Returns the order of computes: depth-first over microbatches, backward in exactly the reverse of forward.

    >>> [(compute.kind, compute.visit) for compute in ya.schedules.chained_order(trace.visits[:2], microbatches=1)]
    [('forward', 0), ('forward', 1), ('backward', 1), ('backward', 0)]
    """
    order: list[Compute] = []
    for microbatch in range(microbatches):
        order += [Compute("forward", visit.id, microbatch) for visit in visits]
        if backward:
            order += [Compute("backward", visit.id, microbatch) for visit in reversed(visits)]
    return closing(order, visits)


def closing(order: Sequence[Compute], visits: Iterable[Visit]) -> tuple[Compute, ...]:
    """Returns `order` with the units whose gradient is complete, in a microbatch, after each compute."""
    trained = {visit.id: dict.fromkeys(visit.trained) for visit in visits}
    closed: set[tuple[int, int]] = set()  # (unit, microbatch)
    backwards: list[Compute] = []
    for now in reversed(order):  # the first that is met is the last to write a gradient
        writes = trained[now.visit] if now.kind in ("backward", "weights") else ()
        closes = tuple(unit for unit in writes if (unit, now.microbatch) not in closed)
        closed.update((unit, now.microbatch) for unit in writes)
        backwards.append(now._replace(closes=closes))
    return tuple(reversed(backwards))


def _table(trace: Trace) -> str:
    """Returns a trace as a table: its visits, the sizes of their units and their costs, and the order of computes."""
    what = "a training step" if trace.trains else "an evaluation"
    stage = "" if trace.stage is None else f", stage {trace.stage} alone"
    numel = sum(unit.numel for unit in trace.units)
    head = (
        f"trace of {what} on the mesh ({arguments(dict(trace.mesh))}){stage}: {len(trace.units)} units, "
        f"{numel:,} parameters, {len(trace.visits)} visits, microbatches: {trace.microbatches}"
    )
    # visits
    rows = [["visit", "units", "trained", "parameters", "gathered", "FLOPs forward", "backward", "its graph keeps"]]
    for visit in trace.visits:
        units = [trace.units[unit] for unit in visit.units]
        cost = visit.cost
        costs = ["-", "-", "-"]  # nothing has measured them
        forward = cost.flops + cost.attention_flops
        if forward:
            backward = cost.bwd_flops + cost.bwd_attention_flops
            costs = [f"{forward:.3g}", f"{backward:.3g}", f"{cost.kept_bytes / 2**20:.2f} MiB"]
        ids = [", ".join(map(str, each)) for each in (visit.units, visit.trained)]
        parameters = f"{sum(unit.numel for unit in units):,}"
        size = f"{sum(unit.gather_bytes for unit in units) / 2**20:.2f} MiB"
        rows.append([f"{visit.id} {visit.name}", *ids, parameters, size, *costs])
    # computes
    several = trace.microbatches > 1
    order = [f"{now.kind} {now.visit}" + f" of {now.microbatch}" * several for now in trace.order]
    count = f"; {len(order)} computes" + ", as visit of microbatch" * several
    shown = order if len(order) <= 8 else [*order[:5], "...", *order[-3:]]
    return "\n".join(
        [head, *shortened(columns(rows)), "order: " + ", ".join(shown) + count, f"updates: {trace.update_when}"]
    )
