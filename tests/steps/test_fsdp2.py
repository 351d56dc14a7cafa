"""The program of `ya.schedules.fsdp2` is what FSDP2 does: its gathers and reductions, in their order, on gloo ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

import yafsdp_fn as ya
from tests.harness.pool import Pool
from yafsdp_fn.lab import peers
from yafsdp_fn.program.ops import Forward, Gather, Reduce
from yafsdp_fn.util.torch_private import fsdp_groups

L, SIZE, VOCAB, M = 4, 6, 10, 2
INSIDE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 8), nn.Linear(8, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(L))
        self.head = nn.Linear(SIZE, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- ways to apply it


def layers_and_whole(module: Model, mesh: Any, **options: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh)


def held(module: Model, mesh: Any) -> None:
    layers_and_whole(module, mesh, reshard_after_forward=False)


def every(module: Model, mesh: Any, **options: Any) -> None:
    fully_shard(module.embed, mesh=mesh, **options)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module.head, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)


def some(module: Model, mesh: Any) -> None:
    for number, layer in enumerate(module.layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=number % 2 == 0)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def listed(module: Model, mesh: Any) -> None:
    every(module, mesh)
    wrapped: Any = [module.embed, *module.layers, module.head]
    for number, part in enumerate(wrapped):
        part.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 3])
        part.set_modules_to_backward_prefetch(wrapped[max(0, number - 2) : number][::-1])


def one_listed(module: Model, mesh: Any) -> None:
    """One list alone: elsewhere it prefetches as without."""
    layers_and_whole(module, mesh)
    modules: Any = module.layers
    modules[0].set_modules_to_forward_prefetch([modules[1]])
    modules[3].set_modules_to_backward_prefetch([modules[2], modules[1]])


def whole_listed(module: Model, mesh: Any) -> None:
    """Lists of the whole, too, which is entered once: at the embedding, and not again at the head."""
    layers_and_whole(module, mesh)
    wrapped: Any = [module, *module.layers]
    for number, part in enumerate(wrapped):
        part.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 2])
        part.set_modules_to_backward_prefetch(wrapped[max(0, number - 1) : number])


def skipping(module: Model, mesh: Any) -> None:
    """Each layer asks for the one after the next."""
    layers_and_whole(module, mesh)
    modules: Any = module.layers
    for number in range(L - 2):
        modules[number].set_modules_to_forward_prefetch([modules[number + 2]])
        modules[number + 2].set_modules_to_backward_prefetch([modules[number]])


def staying(module: Model, mesh: Any) -> None:
    """Weights that stay after a backward are there in the next microbatch's forward."""
    layers_and_whole(module, mesh)
    whole: Any = module
    whole.set_reshard_after_backward(False)


def kept_by_two(module: Model, mesh: Any) -> None:
    every(module, mesh, reshard_after_forward=2)


SAME: dict[str, tuple[Callable[..., None], dict[str, Any] | None]] = {
    "layers": (layers_and_whole, {}),
    "held": (held, {"reshard_after_forward": False}),
    "every": (every, {"wrap": "all"}),
    "some": (some, None),
    "listed": (listed, {"wrap": "all", "prefetch": 2}),
    "one list": (one_listed, None),
    "whole listed": (whole_listed, {"prefetch": 1}),
    "skipping": (skipping, None),
    "staying": (staying, None),
    "kept by two": (kept_by_two, {"reshard_after_forward": 2, "wrap": "all"}),
}
"""And the settings that say the same, where there are some."""


def check(_: Any, names: list[str], shape: tuple[tuple[str, int], ...]) -> None:
    ranks = torch.distributed.get_world_size()
    tokens, targets = (torch.arange(8).view(4, 2) % VOCAB for _ in range(2))
    params, model = ya.functionalize(Model(), "layers")

    def loss(params: Any, batch: Any) -> Tensor:
        return loss_of(model(params, batch["tokens"]), batch["targets"])

    batch = {"tokens": tokens, "targets": targets}
    trace = ya.planner.trace(loss, params, batch, mesh=shape, microbatches=M)
    for name in names:
        module = Model()
        apply, settings = SAME[name]
        apply(module, init_device_mesh("cpu", (ranks,)))
        programs = [ya.schedules.fsdp2(module)(trace)]
        programs += [ya.schedules.fsdp2(**settings)(trace)] if settings is not None else []
        seen, freed, most = recorded(module, tokens, targets)
        programs += [ya.schedules.fsdp2(module)(trace)]  # what it says of itself after a step
        for program in programs:
            assert said(ya.verify(program)) == seen, f"{name}: {said(program)} is not {seen}"
            gathers = [op for op in program.ops if isinstance(op, Gather) and names_of(program, op) <= freed]
            slots = {slot for op in gathers for slot in op.slots}
            assert len(slots) == (max(2, most) if freed else 0), f"{name}: {len(slots)} slots, and FSDP2 holds {most}"
        assert [op for op in peers.fsdp2(module)(trace).ops if isinstance(op, Gather | Reduce)] == [
            op for op in programs[0].ops if isinstance(op, Gather | Reduce)
        ]


Event = tuple[str, frozenset[str]]


def said(program: ya.schedules.Program) -> list[Event]:
    """What a program gathers, computes forward, and reduces, by names of modules."""
    ops = [op for op in program.ops if isinstance(op, Gather | Forward | Reduce)]
    return [(type(op).__name__, names_of(program, op)) for op in ops]


def names_of(program: ya.schedules.Program, op: Gather | Forward | Reduce) -> frozenset[str]:
    units = program.trace.units
    return frozenset(re.sub(r"\[(\d+)\]$", r".\1", units[unit].name) for unit in program.trace.units_of(op))


def recorded(module: Model, tokens: Tensor, targets: Tensor) -> tuple[list[Event], frozenset[str], int]:
    """What FSDP2 gathers, computes forward, and reduces in a step; the layers that it frees after a forward and after a
    backward, and how many of these it holds at once at most, what is on its way included."""
    layers: Any = module.layers
    groups = {
        f"layers.{n}": group for n, each in enumerate(layers) for group in each._get_fsdp_state()._fsdp_param_groups
    }
    freed = {n: of for n, of in groups.items() if of.post_forward_mesh_info is not None and of.reshard_after_backward}
    most = 0
    visited: Any = {"embed": module.embed, "head": module.head}
    visited |= {f"layers.{number}": layer for number, layer in enumerate(module.layers)}
    found: list[Event] = []

    def of(params: list[Any]) -> frozenset[str]:
        owners = [param._module_info.module for param in params]
        inside = {
            name for name, part in visited.items() if any(each is own for own in owners for each in part.modules())
        }
        return frozenset(inside)

    def noted(kind: str, real: Any) -> Any:
        def run(params: list[Any], *args: Any, **options: Any) -> Any:
            nonlocal most
            found.append((kind, of(params)))
            held = {n for n, each in freed.items() if each.is_unsharded or each._all_gather_result is not None}
            most = max(most, len(held | (found[-1][1] & freed.keys() if kind == "Gather" else set())))
            return real(params, *args, **options)

        return run

    for name, part in visited.items():
        forward = part.forward
        part.forward = lambda *args, n=name, f=forward: found.append(("Forward", frozenset([n]))) or f(*args)
    group = __import__(INSIDE, fromlist=["foreach_all_gather"])
    with (
        mock.patch(f"{INSIDE}.foreach_all_gather", noted("Gather", group.foreach_all_gather)),
        mock.patch(f"{INSIDE}.foreach_reduce", noted("Reduce", group.foreach_reduce)),
    ):
        for rows in zip(tokens.chunk(M), targets.chunk(M), strict=True):
            loss_of(module(rows[0]), rows[1]).backward()
    return found, frozenset(freed), most


def test_it_is_what_fsdp2_does(pools: dict[int, Pool]) -> None:
    pools[2].run(check, [name for name in SAME if name != "kept by two"], (("shard", 2),))


@pytest.mark.nightly
def test_weights_that_a_node_keeps(pools: dict[int, Pool]) -> None:
    pools[4].run(check, ["kept by two", "every"], (("node", 2), ("local", 2)))


# ---- errors


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fsdp2\(Model\): expected a module that fully_shard was applied to"):
        ya.schedules.fsdp2(Model())
    for wrong in ({"prefetch": -1}, {"prefetch": "2"}, {"reshard_after_forward": None}, {"wrap": "none"}):
        with pytest.raises(ValueError, match=r"fsdp2\((reshard_after_forward|wrap)="):
            ya.schedules.fsdp2(**wrong)
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    params, model = ya.functionalize(Model(), "layers")
    trace = ya.planner.trace(lambda p, b: model(p, b).sum(), params, tokens, ranks=4)
    with pytest.raises(ValueError, match=r"2 ranks keep weights after forward, on the mesh \{'shard': 4\}.*local=2"):
        ya.schedules.fsdp2(reshard_after_forward=2)(trace)


UNREAD: dict[str, Callable[[Any], None]] = {
    r"set_requires_gradient_sync\(False\).*defer=True": lambda module: module.set_requires_gradient_sync(False),
    r"set_requires_all_reduce\(False\)": lambda module: module.set_requires_all_reduce(False),
    r"set_unshard_in_backward\(False\)": lambda module: module.layers[1].set_unshard_in_backward(False),
    "set_all_reduce_hook": lambda module: module.layers[1].set_all_reduce_hook(lambda grads: None),
    "set_reduce_scatter_max_input_buffers": lambda module: module.set_reduce_scatter_max_input_buffers(3),
}
"""Settings that are refused by these names."""


def one_rank(_: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    module = Model()
    for part in module.layers[0].children():
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    assert isinstance(module, FSDPModule) and len(fsdp_groups(module)) == 3
    for what, change in UNREAD.items():
        changed = Model()
        layers_and_whole(changed, mesh)
        change(changed)
        with pytest.raises(ValueError, match=rf"fsdp2\(FSDPModel\): the group of \w+\S+ has {what}"):
            ya.schedules.fsdp2(changed)
    offloaded = fully_shard(Model(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match=r"the group of embed\.weight has offload_policy=CPUOffloadPolicy\(\)"):
        ya.schedules.fsdp2(offloaded)
    params, model = ya.functionalize(Model(), "layers")
    trace = ya.planner.trace(lambda p, b: model(p, b).sum(), params, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"unit layers\[0\] of the trace: its parameters are in 2 groups; expected"):
        ya.schedules.fsdp2(module)(trace)
    other = {"body": ya.Param((4, 4))}
    plain = ya.planner.trace(lambda p, b: ya.apply(lambda w, x: (x @ w).sum(), p["body"], b), other, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"unit body of the trace: no parameter of it is in the module"):
        ya.schedules.fsdp2(module)(plain)


def test_units_that_are_not_its_groups(pools: dict[int, Pool]) -> None:
    pools[1].run(one_rank)
