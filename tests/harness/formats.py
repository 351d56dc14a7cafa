"""Leaves and states in formats, or in dtypes of their own: a model, its plain loop, and what their tests share.

@crossing(FORMATS)
def test_it(pools, where, kind, formats, parts, how):
    crossed(pools, on_a_rank, where, kind, formats, parts, how)    # on_a_rank(mesh, name, kind, formats, parts)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import by_day
from tests.harness.meshes import MESHES, made
from tests.harness.oracle import batch_of, by_autograd, compare, joined
from tests.harness.pool import Pools
from tests.harness.problems import Batch, E, V, masked_loss
from yafsdp_fn.communication.formats import Format, Wire, passed
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.schedules import Program

F64 = torch.float64
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-2, weight_decay=0.1))
LAYERS = 3
X = 5
EXACT = ya.Precision(F64)
STEPS = ("zero1", "zero3, recomputed", "hpz")
"""The schedules that take three steps, as well."""


@dataclasses.dataclass(frozen=True)
class Halves(Format):
    """bfloat16, as a user would write it."""

    name: str = "halves"
    block: int = 4
    block_bytes: int = 8

    def encode(self, blocks: Tensor) -> Tensor:
        return blocks.bfloat16().view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.contiguous().view(torch.bfloat16).to(dtype)


# ---- a model


def normal(*shape: int, **more: Any) -> ya.Param:
    return ya.Param(shape, init=ya.params.initializers.normal(0.5), **more)


def tree(wire: Wire, kind: str = "plain") -> dict[str, Any]:
    """Matrices of layers, and the head's, travel in formats; gains, a router and the embedding do not."""
    L = LAYERS
    layer: dict[str, Any] = {
        "up": normal(L, X, E, wire=wire),
        "router": normal(L, X, E),
        "down": normal(L, E, X, wire=wire),
        "gain": normal(L, E),
    }
    if kind == "marked":
        layer["gain"] = ya.Pinned(normal(L, E, wire=wire))
        layer["router"] = ya.Unit({"up": normal(L, X, E, wire=wire)})
        layer["down"] = ya.frozen(layer["down"])
    if kind == "tied":
        embed = normal(V, E, wire=Wire(gather=wire.gather))
        return {"embed": embed, "layers": ya.Stacked(layer), "head": {"scale": normal(E)}}
    head = {"scale": normal(E), "out": normal(V, E, wire=wire)}
    return {"embed": normal(V, E), "layers": ya.Stacked(layer), "head": head}


def block(x: Tensor, w: dict[str, Any]) -> tuple[Tensor, None]:
    router = w["router"]["up"] if isinstance(w["router"], dict) else w["router"]
    y = torch.tanh(ya.linear(x, w["up"])) * ya.linear(x, router).softmax(-1)
    return x + ya.linear(y, w["down"]) * w["gain"], None


def head(w: dict[str, Tensor], table: Tensor, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear(x * w["scale"], table), targets)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table)


Loss = Callable[[Any, Batch], ya.Mean]


def loss_of(embed: Callable[..., Any], block: Callable[..., Any], head: Callable[..., Any]) -> Loss:
    """The loss of an embedding, a stack of blocks, and a head, which takes the embedding's table if it has none."""

    def loss(params: Any, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params["embed"], batch["tokens"])
        x, _ = ya.scan(block, x, params["layers"])
        found: ya.Mean
        if "out" in names_of(params["head"]):
            found = ya.apply(lambda w, x, t: head(w, w["out"], x, t), params["head"], x, batch["targets"])
        else:
            both = params["head"], params["embed"]
            found = ya.apply(lambda w, x, t: head(w[0], w[1], x, t), both, x, batch["targets"])
        return found

    return loss


loss = loss_of(embed, block, head)


def names_of(node: Any) -> Sequence[str]:
    if isinstance(node, dict):
        return list(node)
    return [path.rpartition(".")[2] for path, _, _ in node.wholes()]


def split_tree(features: int, hidden: int, wire: Wire = Wire(), gain: Wire = Wire()) -> dict[str, Any]:  # noqa: B008
    """Two layers of matrices that are split over `tensor`, and of a gain that is not."""
    layer = {
        "up": normal(2, hidden, features, split={"tensor": -2}, wire=wire),
        "down": normal(2, features, hidden, split={"tensor": -1}, wire=wire),
        "gain": normal(2, features, wire=gain),
    }
    return {"embed": normal(V, features), "layers": ya.Stacked(layer)}


def split_loss(params: Any, batch: Batch) -> ya.Mean:
    """Of layers that are split over `tensor`."""

    def block(x: Tensor, w: dict[str, Any]) -> tuple[Tensor, None]:
        y = torch.tanh(ya.linear(x, w["up"])) * w.get("scale", 1.0)
        return x + ya.psum(ya.linear(y, w["down"].to(x.dtype)), "tensor") * w["gain"], None

    x = ya.apply(embed, params["embed"], batch["tokens"])
    x, _ = ya.scan(block, x, params["layers"])
    return ya.Mean(x.square().sum(), x.numel())


# ---- its plain loop


def added(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [functools.reduce(torch.add, of_leaf) for of_leaf in zip(*each, strict=True)]


def through(format: Format | None, leaf: Tensor) -> Tensor:
    """A stacked leaf, each layer of which comes out of a format by itself."""
    return leaf if format is None else torch.stack([passed(format, row) for row in leaf])


class Plain:
    """The plain loop. Weights and gradients pass through formats, a layer of a leaf at a time, or a pinned leaf; blocks
    see weights in a dtype of their own, or in `compute`."""

    def __init__(self, abstract: Any, loss: Loss = loss, compute: torch.dtype = F64) -> None:
        self.abstract = abstract
        self.loss = loss
        bare = ya.params.without_markers(abstract)
        leaves, self.spec = optree.tree_flatten(bare)
        self.wires = [leaf.wire for leaf in leaves]
        self.dtypes = [leaf.compute or compute for leaf in leaves]
        self.names: list[str] = optree.tree_leaves(ya.params.leaf_names(bare))
        self.frozen = set[str]()
        self.stacked = set[str]()
        for group in tree_layout(abstract)[0].groups:
            self.frozen.update(() if group.trainable else group.layout.names)
            self.stacked.update(group.layout.names if group.stacked else ())

    def passed(self, name: str, format: Format | None, leaf: Tensor) -> Tensor:
        if format is None or name in self.stacked:
            return through(format, leaf)
        return passed(format, leaf)

    def all_passed(self, leaves: Sequence[Tensor], way: str) -> list[Tensor]:
        formats = [getattr(wire, way) for wire in self.wires]
        return [self.passed(*each) for each in zip(self.names, formats, leaves, strict=True)]

    def seen(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """What blocks see of whole leaves, to be differentiated."""
        passed = zip(self.all_passed(whole, "gather"), self.dtypes, strict=True)
        return [leaf.detach().to(dtype).requires_grad_() for leaf, dtype in passed]

    def value_and_grad(
        self, params: Any, batches: list[Batch], parts: int = 1, deferred: bool = False, per_node: int = 1
    ) -> tuple[Tensor, Any]:
        """`deferred`: a rank reduces the sum over its microbatches, else each one. `per_node`: ranks whose sum, of each
        reduction, passes once more; 1: none does."""
        whole = optree.tree_leaves(ya.params.without_markers(params))
        leaves = self.seen(whole)
        sums = [torch.zeros_like(leaf) for leaf in whole]
        value = torch.zeros((), dtype=F64)
        weights = 0.0
        reduced: list[list[list[Tensor]]] = []  # by rank and reduction
        for batch in batches:
            rows = batch["tokens"].shape[0] // parts
            found = []
            for part in range(parts):
                mine = {key: leaf[part * rows : (part + 1) * rows] for key, leaf in batch.items()}
                total, weight = self.loss(optree.tree_unflatten(self.spec, leaves), mine)
                value = value + total.detach()
                weights = weights + float(weight)
                grads = torch.autograd.grad(total, leaves)
                found.append([grad.to(leaf.dtype) for grad, leaf in zip(grads, whole, strict=True)])
            found = [added(found)] if deferred else found
            reduced.append([self.all_passed(grads, "reduce") for grads in found])
        for first in range(0, len(batches), per_node):
            for of_ranks in zip(*reduced[first : first + per_node], strict=True):
                of_node = added(of_ranks)
                sums = added([sums, self.all_passed(of_node, "reduce") if per_node > 1 else of_node])
        grads = optree.tree_unflatten(self.spec, [grad / weights for grad in sums])
        return (value / weights).to(total.dtype), grads

    def trained(self, params: Any) -> dict[str, Tensor]:
        """Whole leaves of any tree but the frozen ones, by name."""
        leaves = optree.tree_leaves(ya.params.without_markers(ya.unshard(params)))
        return {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if name not in self.frozen}


def whole_in_double(state: Any) -> Any:
    return optree.tree_map(Tensor.double, ya.unshard(state))


def gradients_and_steps(
    mesh: Any,
    plain: Plain,
    schedules: Mapping[str, ya.schedules.Schedule],
    parts: int,
    tolerance: float,
    what: str,
    *,
    precision: ya.Precision = EXACT,
    per_node: int = 1,
    steps: Sequence[str] = STEPS,
) -> None:
    """By each schedule, gradients are those of the plain loop; by those named in `steps`, three steps, too."""
    for schedule, build in schedules.items():
        said = f"{what}, {parts} microbatches, {schedule}"
        state = ya.init(plain.abstract, TX, mesh=mesh, precision=precision)
        params = whole_in_double(state)
        batches = [batch_of(rank) for rank in range(mesh.size())]
        how = parts, schedule == "zero1", per_node
        expected = plain.value_and_grad(params, batches, *how)
        function = ya.value_and_grad(plain.loss, schedule=build, microbatches=parts)
        value, grads = function(state.params, batches[mesh.get_rank()])
        compare(value, expected[0], 1e-6, f"{said}: value")
        compare(plain.trained(grads), plain.trained(expected[1]), tolerance, f"{said}: gradients")
        if schedule not in steps:
            continue
        step = ya.train_step(plain.loss, TX, schedule=build, microbatches=parts)
        oracle = ya.PlainState.create(plain.trained(params), TX)
        for number in range(3):
            now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
            before = zip(plain.names, optree.tree_leaves(params), strict=True)
            latest = [oracle.params.get(name, leaf) for name, leaf in before]
            oracle = oracle.apply_gradients(plain.trained(plain.value_and_grad(latest, now, *how)[1]), TX)
            state, _ = step(state, now[mesh.get_rank()])
        compare(plain.trained(state), oracle.params, 10 * tolerance, f"{said}: three steps")


def derivatives(mesh: Any, plain: Plain, state: Any, tolerance: float) -> tuple[Tensor, Any]:
    """Outside of steps, those of torch.func: gradients are the plain loop's, which comes back, and a tangent that of
    autograd on what blocks see, to `tolerance`."""
    params, batches = whole_in_double(state), [batch_of(rank) for rank in range(mesh.size())]
    expected = plain.value_and_grad(params, batches)
    mine, weight = batches[mesh.get_rank()], sum(int((batch["targets"] >= 0).sum()) for batch in batches)

    def total(params: Any) -> Tensor:
        return plain.loss(params, mine).total.double() * mesh.size() / weight

    # gradients are scaled before they are rounded, by no power of two
    compare(ya.unshard(torch.func.grad(total)(state.params)), expected[1], 2e-2, "torch.func.grad")
    tangents = ya.normal_like(3, state.params)
    with torch.no_grad():
        _, along = torch.func.jvp(total, (state.params,), (tangents,))
    leaves = plain.seen(optree.tree_leaves(params))
    slopes = torch.autograd.grad(total(optree.tree_unflatten(plain.spec, leaves)), leaves)
    pairs = zip(slopes, optree.tree_leaves(ya.unshard(tangents)), strict=True)
    each = torch.stack([(slope.double() * direction).sum() for slope, direction in pairs])
    assert abs(float(along - each.sum())) < tolerance * float(each.abs().sum()), "tangents do not pass through a format"
    return expected


def across_stages(plain: Plain, sharding: ya.schedules.Schedule, tolerance: float, precision: ya.Precision) -> None:
    """On two stages, gradients by two orders and a step are those of the plain loop."""
    state, batches, mine = on_two_stages(plain.loss, plain.abstract, TX, precision)
    params = whole_in_double(state)
    grads = plain.trained(plain.value_and_grad(params, batches, 3)[1])
    for order in (ya.schedules.one_f_one_b, ya.schedules.zero_bubble):
        schedule = order(ya.schedules.zero3())
        _, found = ya.value_and_grad(plain.loss, schedule=schedule, microbatches=3)(state.params, mine)
        compare(plain.trained(found), grads, tolerance, f"stages, {schedule}")
    step = ya.train_step(plain.loss, TX, schedule=ya.schedules.one_f_one_b(sharding), microbatches=3)
    oracle = ya.PlainState.create(plain.trained(params), TX).apply_gradients(grads, TX)
    compare(plain.trained(step(state, mine)[0]), oracle.params, 10 * tolerance, "stages, a step")


# ---- the crossing


def schedules_for(mesh: Any) -> dict[str, ya.schedules.Schedule]:
    s = ya.schedules
    found = {"zero1": s.zero1(), "zero2": s.zero2(), "zero3, recomputed": s.zero3(remat=s.remat.all)}
    found |= {"zero3, far": s.zero3(prefetch=3), "fsdp2": s.fsdp2()}
    return found | ({"hpz": s.hpz(2 * LAYERS)} if "local" in (mesh.mesh_dim_names or ()) else {})


WHERE = by_day(
    ["1 shard", "2 shard", "3 shard", *(f"4 {mesh}" for mesh in MESHES)], "1 shard", "2 shard", "3 shard", "4 nodes"
)
"""Numbers of ranks, and meshes of so many."""


def crossing(formats: Iterable[str]) -> Callable[[Any], Any]:
    """Parametrizes a test with meshes, kinds of `tree`, these formats, microbatches, and how gradients of weights come:
    written into slots, or by autograd."""
    values = {
        "where": WHERE,
        "kind": ["plain", "marked", "tied"],
        "formats": formats,
        "parts": [1, 3],
        "how": ["slots", "autograd"],
    }

    def marked(test: Any) -> Any:
        for name, each in values.items():
            test = pytest.mark.parametrize(name, each)(test)
        return pytest.mark.sampled(test)

    return marked


def crossed(
    pools: Pools, function: Callable[..., None], where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    world, mesh = where.split()
    pools[int(world)].run(_on_a_rank, function, mesh, kind, formats, parts, how)


def _on_a_rank(_: Any, function: Callable[..., None], mesh: str, kind: str, formats: str, parts: int, how: str) -> None:
    with by_autograd() if how == "autograd" else contextlib.nullcontext():
        function(made(mesh), mesh, kind, formats, parts)


# ---- stages, plans and whole leaves


def on_two_stages(loss: Loss, abstract: Any, tx: Any, precision: ya.Precision) -> tuple[Any, list[Batch], Batch]:
    """A state, the batches of the ranks of a stage, and this rank's part of all, for three microbatches of two rows."""
    mesh = ya.mesh(device="cpu", stage=2)
    batches = [batch_of(rank, rows=6) for rank in range(mesh.size() // 2)]
    part = {key: value[:2] for key, value in batches[0].items()}
    assignment = ya.schedules.assign(ya.planner.trace(loss, abstract, part, precision=precision, tx=tx), 2)
    state = ya.init(abstract, tx, mesh=mesh, precision=precision, stages=assignment)
    return state, batches, ya.shard_batch(joined(batches), mesh)


def planned_program(loss: Loss, abstract: Any, state: Any, tx: Any) -> Program:
    """The program of a step, whose trace is one without ranks, also after it was JSON."""
    program = ya.train_step(loss, tx).lower(state, batch_of(0))
    shape: Any = {"mesh": program.trace.mesh, "tx": tx, "device": "cpu", "precision": state.memory.precision}
    assert ya.planner.trace(loss, abstract, batch_of(0), **shape) == program.trace
    again = type(program).from_json(program.to_json())
    assert again.ops == program.ops
    assert again.trace == program.trace
    return program


def two_steps_are_plain(mesh: Any, plain: Plain, tx: Any, precision: ya.Precision = EXACT) -> None:
    """Of an optimizer that does not know formats on the wire, by its own definition on whole leaves."""
    state = ya.init(plain.abstract, tx, mesh=mesh, precision=precision)
    step = ya.train_step(plain.loss, tx)
    params = whole_in_double(state)
    oracle = ya.PlainState.create({**params, "layers": ya.Stacked(params["layers"])}, tx)
    for number in range(2):
        now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
        _, grads = plain.value_and_grad(oracle.params, now)
        oracle = oracle.apply_gradients({**grads, "layers": ya.Stacked(grads["layers"])}, tx)
        state, _ = step(state, now[mesh.get_rank()])
    compare(state, oracle.params, 1e-10, repr(tx))


# ---- bits, and bytes


def alike(pools: Pools, worlds: Sequence[int], function: Callable[..., Any], *args: Any) -> None:
    """The same comes out on all ranks of pools of these sizes."""
    assert len({found for world in worlds for found in pools[world].run(function, *args)}) == 1


def two_steps_of_micro_shards(loss: Loss, abstract: Any, tx: Any, precision: ya.Precision | None = None) -> int:
    """A checksum of the state after two steps on a deterministic mesh of four micro-shards."""
    mesh = ya.mesh(device="cpu", deterministic=4)
    state = ya.init(abstract, tx, mesh=mesh, precision=precision or ya.Precision())
    step = ya.train_step(loss, tx)
    for number in range(2):
        state, _ = step(state, ya.shard_batch(batch_of(0, seed=number, rows=4), mesh))
    return ya.checksum(state)


def sent(loss: Loss, state: Any, batch: Batch) -> list[tuple[int, int]]:
    """Bytes that this rank sends in a step to gather and to reduce, as counted and as a program says; and the largest
    number of vectors that are gathered together, beside 2."""
    step, counted, others = ya.train_step(loss, TX), {"gather": 0, "reduce": 0}, state.mesh.size() - 1
    state, _ = step(state, batch)
    gathers = [0]
    comms = state.memory.comms

    def watched(name: str, what: str, sizes: Callable[..., int]) -> None:
        real = getattr(GlooGroup, name)

        def call(group: Any, outs: Any, ins: Any) -> None:
            counted[what] += sizes(outs, ins)
            gathers.append(len(ins) if what == "gather" else 0)
            real(group, outs, ins)

        patch.setattr(GlooGroup, name, call)

    with pytest.MonkeyPatch.context() as patch:
        watched("all_gathers", "gather", lambda outs, ins: sum(shard.nbytes for shard in ins) * others)
        watched("reduce_scatters", "reduce", lambda outs, ins: sum(x.nbytes for x in ins) // (others + 1) * others)
        watched("all_to_all", "reduce", lambda out, full: full.nbytes // (others + 1) * others)
        state, _ = step(state, batch)
        comms.drain()
    said = step.program(state).wire_bytes()
    return [*((counted[what], said[what]) for what in counted), (max(gathers), 2)]
