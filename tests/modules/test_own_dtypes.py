"""Parameters of a module that are gathered in a dtype of their own: by name, and as transformers keeps them."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from tests.harness.oracle import compare, looped
from tests.harness.pool import Pools
from tests.harness.small import one_rank
from tests.modules.test_architectures import CASES, by_name, inputs_of, module_of, squares

BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
HALF = ya.Precision(F64, compute=BF16, reduce=F64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.gate = nn.Linear(4, 4, bias=False)
        self.A_log = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x.to(self.gate.weight.dtype)) * self.A_log.exp()
        return x + self.up(x) * scores.to(x.dtype)


class Model(nn.Module):
    _keep_in_fp32_modules = ("up",)
    _keep_in_fp32_modules_strict = ("layers.*.gate",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def own(module: nn.Module, **options: Any) -> dict[str, torch.dtype]:
    """The leaves with a dtype of their own."""
    params, _ = ya.functionalize(module, "layers", **options)
    names = optree.tree_leaves(ya.params.leaf_names(params))
    leaves = optree.tree_leaves(params)
    return {name: leaf.compute for name, leaf in zip(names, leaves, strict=True) if leaf.compute is not None}


def test_what_transformers_keeps_and_what_the_user_says() -> None:
    """The list for float16 alone has no effect: nothing is gathered in that."""
    gate = "layers.gate.weight"
    decay = "layers.A_log"
    assert own(Model()) == {gate: F32} == own(Model().bfloat16())
    assert own(Model().double()) == {}  # float32 would be less
    assert own(Model(), compute={"*.A_log": F32}) == {gate: F32, decay: F32}
    assert own(Model(), compute={"*.gate.*": None, "*": BF16, "norm.*": None}) == {
        gate: BF16,
        "layers.up.weight": BF16,
        decay: BF16,
    }
    frozen = Model()
    frozen.layers[0].gate.requires_grad_(False), frozen.layers[1].gate.requires_grad_(False)
    state = ya.shard(ya.functionalize(frozen, "layers")[0], None, mesh=one_rank(), precision=ya.Precision(compute=BF16))
    dtypes = {group.name: leaf.dtype for _, group, leaf in state.params["layers"].group_leaves()}
    assert dtypes == {"layers.frozen(float32)": F32, "layers": F32}


def test_layers_that_differ_are_stacks_of_their_own() -> None:
    module = Model()
    params, model = ya.functionalize(module, "layers", compute={"layers.1.A_log": F32})
    assert list(params) == ["layers.0", "layers.1", "norm"]
    state = ya.shard(params, None, mesh=one_rank())
    x = torch.randn(2, 4)
    assert torch.equal(model(state.params, x), module(x))
    ya.load_into(Model(), state.params, model=model)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"*.a_log": F32}, r"compute: '\*.a_log' fits no parameter; the first one is layers.0.A_log"),
        ({"*.A_log": torch.float16}, "Lazy.compute: float16 overflows"),
        ({"*.A_log": torch.int8}, "Lazy.compute: expected a 16, 32 or 64-bit floating dtype, got torch.int8"),
    ],
)
def test_errors(compute: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ya.functionalize(Model(), "layers", compute=compute)


def test_between_visits_a_weight_has_the_dtype_that_blocks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    params, model = ya.functionalize(Model(), "layers", compute={"norm.bias": F64})
    seen = []
    forward = Model.forward

    def looks(self: Any, x: Tensor) -> Tensor:
        seen.append([w.dtype for w in (self.layers[1].gate.weight, self.layers[0].up.weight, self.norm.bias)])
        assert self.layers[0].up.weight.shape == (4, 4)
        return self.layers[0](x)

    monkeypatch.setattr(Model, "forward", looks)
    for dtype in (BF16, F32):
        state = ya.shard(params, None, mesh=one_rank(), precision=ya.Precision(compute=dtype))
        assert model(state.params, torch.ones(2, 4, dtype=dtype)).dtype == dtype
        assert seen.pop() == [F32, dtype, F64]
        assert not seen
    monkeypatch.setattr(Model, "forward", forward)


def trains_a_hybrid(mesh: Any, name: str) -> None:
    """One rank's part: a bf16 model with `A_log` in float32, beside the plain loop and the module itself."""
    case = CASES[name]
    module = module_of(name).float()
    world = mesh.size()
    with torch.no_grad():
        for path, param in module.named_parameters():
            if path.endswith("A_log"):
                param.add_(torch.rand_like(param) / 128)  # more than bf16 has
    whole, others = inputs_of(case.inputs, 2 * world)
    rows = [{key: leaf.chunk(world)[rank] for key, leaf in whole.items()} for rank in range(world)]
    params, model = ya.functionalize(module, case.layers, compute={"*.A_log": F32})
    state = ya.shard(params, ya.optim.sgd(0.1), mesh=mesh, precision=HALF)

    def loss(params: Any, batch: dict[str, Tensor]) -> ya.Mean:
        return squares(model(params, **batch, **others))

    masters = optree.tree_map(Tensor.double, ya.materialize(params))
    dtypes = optree.tree_map(lambda leaf: leaf.compute or BF16, ya.params.without_markers(params))

    def cast(params: Any, batch: dict[str, Tensor]) -> ya.Mean:
        return loss(optree.tree_map(Tensor.to, params, dtypes), batch)

    wanted, expected = looped(cast, masters, rows)
    gradients = ya.value_and_grad(loss, schedule=ya.schedules.zero3(remat="all"))
    for _ in range(2):
        value, grads = gradients(state.params, rows[mesh.get_rank()])
        compare(value.float(), wanted, 1e-6, "value")
        compare(grads, expected, 1e-10, name)

    reference = copy.deepcopy(module).bfloat16()
    kept = {path: param for path, param in module.named_parameters() if path.endswith("A_log")}
    for path, param in reference.named_parameters():
        if path in kept:
            param.data = kept[path].detach().clone()
    for batch in rows:
        found, weight = squares(reference(**batch, **others))
        found.backward()  # float32 leaves add up in float32, others in bfloat16
        assert torch.equal(found, cast(masters, batch).total)
    got = by_name(module, grads, model)
    assert kept
    for path in kept:
        theirs = reference.get_parameter(path).grad
        assert theirs is not None
        assert theirs.dtype == F32
        off = (got[path].double() - theirs.double() / weight / world).norm() / got[path].double().norm()
        assert float(off) < 1e-6, path


@pytest.mark.parametrize("world", [1, 2])
def test_a_hybrid_whose_decay_stays_in_float32(pools: Pools, world: int) -> None:
    pytest.importorskip("transformers", reason="trains a model of transformers")
    pools[world].run(trains_a_hybrid, "Bamba")
