"""Units that travel in wire formats, against the plain loop whose weights and gradients pass through the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import MESHES, made
from tests.harness.oracle import batch_of, by_autograd, compare
from tests.harness.pool import Pool
from tests.harness.problems import Batch, E, V, masked_loss
from yafsdp_fn.communication.formats import Format, Scaled, Wire, passed

F32, F64 = torch.float32, torch.float64
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-2, weight_decay=0.1))
LAYERS, X = 3, 5
EXACT = ya.Precision(F64)
TOLERANCE = 1e-12
"""What a format rounds otherwise is off by 1e-3 at least."""


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


INT8 = Scaled(torch.int8, 8)
FORMATS: dict[str, Wire] = {
    "int8": Wire(INT8, INT8),
    "gathers": Wire(gather=INT8),
    "reductions": Wire(reduce=Scaled(torch.float8_e5m2, 16)),
    "mixed": Wire(Scaled(torch.float8_e4m3fn, 8), Halves()),
}

# ---- a model, and its plain loop


def tree(wire: Wire, kind: str = "plain") -> dict[str, Any]:
    """Matrices of layers, and the head's, travel in formats; gains, a router and the embedding do not."""

    def own(*shape: int, **more: Any) -> ya.Param:
        return ya.Param(shape, init=ya.params.initializers.normal(0.5), **more)

    L = LAYERS
    layer: dict[str, Any] = {
        "up": own(L, X, E, wire=wire),
        "router": own(L, X, E),
        "down": own(L, E, X, wire=wire),
        "gain": own(L, E),
    }
    if kind == "marked":
        layer["gain"] = ya.Pinned(own(L, E, wire=wire))
        layer["router"] = ya.Unit({"up": own(L, X, E, wire=wire)})
        layer["down"] = ya.frozen(layer["down"])
    if kind == "tied":
        return {
            "embed": own(V, E, wire=Wire(gather=wire.gather)),
            "layers": ya.Stacked(layer),
            "head": {"scale": own(E)},
        }
    head = {"scale": own(E), "out": own(V, E, wire=wire)}
    return {"embed": own(V, E), "layers": ya.Stacked(layer), "head": head}


def block(x: Tensor, w: dict[str, Any]) -> tuple[Tensor, None]:
    router = w["router"]["up"] if isinstance(w["router"], dict) else w["router"]
    y = torch.tanh(ya.linear(x, w["up"])) * ya.linear(x, router).softmax(-1)
    return x + ya.linear(y, w["down"]) * w["gain"], None


def head(w: dict[str, Tensor], table: Tensor, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear(x * w["scale"], table), targets)


def loss(params: dict[str, Any], batch: Batch) -> ya.Mean:
    x = ya.apply(lambda table, tokens: F.embedding(tokens, table), params["embed"], batch["tokens"])
    x, _ = ya.scan(block, x, params["layers"])
    found: ya.Mean
    if "out" in names_of(params["head"]):
        found = ya.apply(lambda w, x, t: head(w, w["out"], x, t), params["head"], x, batch["targets"])
    else:
        both = params["head"], params["embed"]
        found = ya.apply(lambda w, x, t: head(w[0], w[1], x, t), both, x, batch["targets"])
    return found


def names_of(node: Any) -> Sequence[str]:
    if isinstance(node, dict):
        return list(node)
    return [path.rpartition(".")[2] for path, _, _ in node.wholes()]


class Plain:
    """The plain loop. Weights and gradients pass through formats, a layer of a leaf at a time, or a pinned leaf."""

    def __init__(self, abstract: Any) -> None:
        leaves, self.spec = optree.tree_flatten(ya.params.without_markers(abstract))
        self.wires = [leaf.wire for leaf in leaves]
        self.names = optree.tree_leaves(ya.params.leaf_names(ya.params.without_markers(abstract)))
        self.stacked = [name.startswith("layers") and name != "layers.gain" for name in self.names]
        down = abstract["layers"].tree["down"]
        self.frozen = () if isinstance(down, ya.Param) else ("layers.down",)

    def passed(self, leaves: Sequence[Tensor], way: str) -> list[Tensor]:
        out = []
        for leaf, wire, stacked in zip(leaves, self.wires, self.stacked, strict=True):
            format = getattr(wire, way)
            if format is None:
                out.append(leaf)
            elif stacked:
                out.append(torch.stack([passed(format, row) for row in leaf]))
            else:
                out.append(passed(format, leaf))
        return out

    def value_and_grad(self, params: Any, batches: list[Batch], parts: int, deferred: bool) -> tuple[Tensor, Any]:
        """`deferred`: a rank reduces the sum over its microbatches, else each one."""
        whole = optree.tree_leaves(ya.params.without_markers(params))
        leaves = [leaf.detach().requires_grad_() for leaf in self.passed(whole, "gather")]
        sums = [torch.zeros_like(leaf) for leaf in leaves]
        value, weights = torch.zeros((), dtype=F64), 0.0
        for batch in batches:
            own = [torch.zeros_like(leaf) for leaf in leaves]
            rows = batch["tokens"].shape[0] // parts
            for part in range(parts):
                mine = {key: leaf[part * rows : (part + 1) * rows] for key, leaf in batch.items()}
                total, weight = loss(optree.tree_unflatten(self.spec, leaves), mine)
                value, weights = value + total.detach(), weights + float(weight)
                grads = list(torch.autograd.grad(total, leaves))
                for at, grad in enumerate(grads if deferred else self.passed(grads, "reduce")):
                    own[at] = own[at] + grad
            for at, grad in enumerate(self.passed(own, "reduce") if deferred else own):
                sums[at] += grad
        return (value / weights).float(), optree.tree_unflatten(self.spec, [grad / weights for grad in sums])

    def trained(self, params: Any) -> dict[str, Tensor]:
        leaves = optree.tree_leaves(ya.params.without_markers(params))
        return {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if name not in self.frozen}


STEPS = ("zero1", "zero3, recomputed", "hpz")
"""The schedules that take three steps, as well."""


def schedules_for(mesh: Any) -> Iterator[tuple[str, Any]]:
    s = ya.schedules
    yield "zero1", s.zero1()
    yield "zero2", s.zero2()
    yield "zero3, recomputed", s.zero3(remat=s.remat.all)
    yield "zero3, far", s.zero3(prefetch=3)
    yield "fsdp2", s.fsdp2()
    if "local" in (mesh.mesh_dim_names or ()):
        yield "hpz", s.hpz(2 * LAYERS)


def exact(_: Any, name: str, kind: str, formats: str, parts: int) -> None:
    """One rank's part: gradients and three steps."""
    mesh = made(name)
    abstract = tree(FORMATS[formats], kind)
    plain = Plain(abstract)
    batches = [batch_of(rank) for rank in range(mesh.size())]
    for schedule, build in schedules_for(mesh):
        what = f"{name}, {kind}, {formats}, {parts} microbatches, {schedule}"
        state = ya.init(abstract, TX, mesh=mesh, precision=EXACT)
        params = ya.unshard(state)
        value, grads = plain.value_and_grad(params, batches, parts, schedule == "zero1")
        got, found = ya.value_and_grad(loss, schedule=build, microbatches=parts)(state.params, batches[mesh.get_rank()])
        compare(got.float(), value, 1e-6, f"{what}: value")
        compare(plain.trained(ya.unshard(found)), plain.trained(grads), TOLERANCE, f"{what}: gradients")
        if schedule not in STEPS:
            continue
        step = ya.train_step(loss, TX, schedule=build, microbatches=parts)
        oracle = ya.PlainState.create(plain.trained(params), TX)
        whole = optree.tree_leaves(ya.params.without_markers(params))
        for number in range(3):
            now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
            latest = [oracle.params.get(name, leaf) for name, leaf in zip(plain.names, whole, strict=True)]
            _, grads = plain.value_and_grad(latest, now, parts, schedule == "zero1")
            oracle = oracle.apply_gradients(plain.trained(grads), TX)
            state, _ = step(state, now[mesh.get_rank()])
        compare(plain.trained(ya.unshard(state)), oracle.params, 10 * TOLERANCE, f"{what}: three steps")


def both_ways(mesh: Any, *case: Any) -> None:
    """Gradients of weights that are written into slots, and by autograd."""
    exact(mesh, *case)
    with by_autograd():
        exact(mesh, *case)


@pytest.mark.parametrize(
    ("world", "kind", "formats"),
    [
        (1, "plain", "int8"),
        (1, "marked", "mixed"),
        (2, "plain", "mixed"),
        (2, "tied", "gathers"),
        (3, "marked", "int8"),
        (3, "plain", "reductions"),
    ],
)
def test_gradients_and_steps_are_those_of_the_plain_loop(
    pools: dict[int, Pool], world: int, kind: str, formats: str
) -> None:
    for parts in (1, 3):
        pools[world].run(both_ways, "shard", kind, formats, parts)


@pytest.mark.parametrize("mesh", MESHES)
def test_on_every_mesh(pools: dict[int, Pool], mesh: str) -> None:
    pools[4].run(exact, mesh, "marked", "int8", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_formats(pools: dict[int, Pool], world: int, kind: str, formats: str) -> None:
    for mesh in MESHES if world == 4 else ("shard",):
        for parts in (1, 3):
            pools[world].run(both_ways, mesh, kind, formats, parts)
