"""Leaves and states in formats, or in dtypes of their own: a model, its plain loop, and what their tests share.

@crossing(FORMATS)
def test_it(pools, where, kind, formats, parts, how):
    crossed(pools, on_a_rank, where, kind, formats, parts, how)    # on_a_rank(mesh, name, kind, formats, parts)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import by_day
from tests.harness.meshes import MESHES, made
from tests.harness.oracle import batch_of, by_autograd, compare, joined, whole
from tests.harness.pool import Pools
from tests.harness.problems import Batch, E, V, masked_loss
from tests.harness.watching import recorded
from yafsdp_fn.communication.formats import Format, Wire, passed
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.schedules import Program

F64 = torch.float64
LAYERS = 3
X = 5
EXACT = ya.Precision(F64)
STEPS = ("zero1", "zero3, recomputed", "hpz")
"""The schedules that take three steps, as well."""


B1, B2, RATE, EPS, DECAY = 0.9, 0.95, 1e-2, 1e-8, 0.1


def adamw(moments: Format | None) -> ya.optim.GradientTransformation:
    inside = ya.optim.adamw(RATE, B1, B2, EPS, DECAY)
    if moments is not None:
        inside = ya.optim.in_format(inside, moments)
    return ya.optim.chain(ya.optim.clip_by_global_norm(1.0), inside)


TX = adamw(None)


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


class Loop:
    """Clipped AdamW on whole leaves, by hand. Moments pass through a format, a layer of a stacked leaf at a time."""

    def __init__(self, plain: Plain, params: Any, moments: Format | None) -> None:
        self.plain, self.format, self.count = plain, moments, 0
        self.leaves = self.by_name(params)
        self.mu, self.nu = ({name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()} for _ in range(2))

    def by_name(self, params: Any) -> dict[str, Tensor]:
        """Whole leaves of any tree; what is frozen, and stored as it is gathered, in float64."""
        leaves = optree.tree_leaves(whole(params))
        named = zip(self.plain.names, leaves, strict=True)
        return {name: leaf.double() if name in self.plain.frozen else leaf for name, leaf in named}

    def step(self, batches: list[Batch], parts: int, deferred: bool, per_node: int = 1) -> None:
        _, found = self.plain.value_and_grad(list(self.leaves.values()), batches, parts, deferred, per_node)
        grads = self.plain.trained(found)
        self.count += 1
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for name, grad in grads.items():
            grad = grad / max(norm, 1.0)
            mu = B1 * self.mu[name] + (1 - B1) * grad
            nu = B2 * self.nu[name] + (1 - B2) * grad.square()
            update = mu / (1 - B1**self.count) / ((nu / (1 - B2**self.count)).sqrt() + EPS)
            self.leaves[name] = self.leaves[name] - RATE * (update + DECAY * self.leaves[name])
            format = self.format and self.format.at(self.count - 1)
            self.mu[name], self.nu[name] = (self.plain.passed(name, format, each) for each in (mu, nu))

    def compare(self, params: Any, tolerance: float, what: str) -> None:
        compare(self.by_name(params), self.leaves, tolerance, what)


def gradients(
    mesh: Any,
    name: str,
    plain: Plain,
    schedules: Mapping[str, ya.schedules.Schedule],
    parts: int,
    tolerance: float,
    precision: ya.Precision = EXACT,
) -> None:
    """By each schedule they are those of the plain loop. name: of the mesh"""
    for schedule, build in schedules.items():
        said = f"{name}, {parts} microbatches, {schedule}"
        state = ya.init(plain.abstract, TX, mesh=mesh, precision=precision)
        batches = [batch_of(rank) for rank in range(mesh.size())]
        how = parts, schedule == "zero1", per_node(mesh, name)
        expected = plain.value_and_grad(whole_in_double(state), batches, *how)
        function = ya.value_and_grad(plain.loss, schedule=build, microbatches=parts)
        value, grads = function(state.params, batches[mesh.get_rank()])
        compare(value, expected[0], 1e-6, f"{said}: value")
        compare(plain.trained(grads), plain.trained(expected[1]), tolerance, f"{said}: gradients")


def three_steps(
    mesh: Any,
    name: str,
    plain: Plain,
    schedules: Mapping[str, ya.schedules.Schedule],
    parts: int,
    tolerance: float,
    precision: ya.Precision = EXACT,
    moments: Format | None = None,
) -> None:
    """By each schedule they are those of the plain loop. name: of the mesh"""
    tx = adamw(moments)
    for schedule, build in schedules.items():
        state = ya.init(plain.abstract, tx, mesh=mesh, precision=precision)
        loop = Loop(plain, state, moments)
        step = ya.train_step(plain.loss, tx, schedule=build, microbatches=parts)
        for number in range(3):
            now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
            loop.step(now, parts, schedule == "zero1", per_node(mesh, name))
            state, _ = step(state, now[mesh.get_rank()])
            loop.compare(state, tolerance, f"{name}, {parts} microbatches, {schedule}: step {number}")


def gradients_and_steps(mesh: Any, name: str, plain: Plain, parts: int, tolerance: float) -> None:
    """Gradients by all schedules, and three steps by some."""
    schedules = schedules_for(mesh)
    gradients(mesh, name, plain, schedules, parts, tolerance)
    some = {schedule: build for schedule, build in schedules.items() if schedule in STEPS}
    three_steps(mesh, name, plain, some, parts, 10 * tolerance)


def per_node(mesh: Any, name: str) -> int:
    """Ranks whose sum passes once more."""
    return 2 if (name, mesh.size()) == ("nodes", 4) else 1


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


def across_stages(
    plain: Plain,
    sharding: ya.schedules.Schedule,
    tolerance: float,
    precision: ya.Precision = EXACT,
    moments: Format | None = None,
) -> None:
    """On two stages, gradients and two steps by two orders are those of the plain loop."""
    tx = adamw(moments)
    for order in (ya.schedules.one_f_one_b, ya.schedules.zero_bubble):
        state, batches, mine = on_two_stages(plain.loss, plain.abstract, tx, precision)
        loop = Loop(plain, state, moments)
        grads = plain.trained(plain.value_and_grad(whole_in_double(state), batches, 3)[1])
        _, found = ya.value_and_grad(plain.loss, schedule=order(sharding), microbatches=3)(state.params, mine)
        compare(plain.trained(found), grads, tolerance, f"stages, {order.__name__}")
        step = ya.train_step(plain.loss, tx, schedule=order(sharding), microbatches=3)
        for _ in range(2):
            loop.step(batches, 3, False)
            state, _ = step(state, mine)
        loop.compare(state, 10 * tolerance, f"stages, {order.__name__}: two steps")


def gradients_over_tensor(abstract: Any, precision: ya.Precision = EXACT) -> Iterator[tuple[Any, Any]]:
    """Value and gradients of `split_loss` on two ranks of `tensor`, by two schedules; and those of the plain loop."""
    mesh = ya.mesh(device="cpu", tensor=2)
    state = ya.init(abstract, TX, mesh=mesh, precision=precision)
    batch = batch_of(0, rows=4)
    mine = ya.shard_batch(batch, mesh)
    ranks = mesh.size() // 2
    own = [{key: leaf.chunk(ranks)[rank] for key, leaf in batch.items()} for rank in range(ranks)]
    expected = Plain(abstract, split_loss).value_and_grad(whole_in_double(state), own)
    for schedule in (ya.schedules.zero2(), ya.schedules.zero3(remat=ya.schedules.remat.all)):
        value, found = ya.value_and_grad(split_loss, schedule=schedule)(state.params, mine)
        yield (value, ya.unshard(found)), expected


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
    step = ya.train_step(loss, TX)
    state, _ = step(state, batch)
    with recorded() as calls:
        state, _ = step(state, batch)
        state.memory.comms.drain()
    said = step.program(state).wire_bytes()
    counted = [(sum(call.sent() for call in calls if call.kind == kind), said[kind]) for kind in ("gather", "reduce")]
    return [*counted, (max((call.together for call in calls if call.kind == "gather"), default=0), 2)]
