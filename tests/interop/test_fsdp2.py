"""The program of `ya.schedules.fsdp2` is what FSDP2 does: its gathers and reductions, in their order, on gloo ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import yafsdp_fn as ya
from tests.checkpoint.test_named import Model
from tests.harness.pool import on_ranks
from yafsdp_fn.lab import peers
from yafsdp_fn.program.ops import Forward, Gather, Reduce

M = 2
INSIDE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


# ---- ways to apply it


def layers_and_whole(module: Model, mesh: Any, **options: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh)


def held(module: Model, mesh: Any) -> None:
    layers_and_whole(module, mesh, reshard_after_forward=False)


def every(module: Model, mesh: Any) -> None:
    fully_shard(module.embed, mesh=mesh)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module.norm, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)


def prefetching(wrapped: list[Any], ahead: int) -> None:
    """Lists of the next `ahead` of what is wrapped."""
    for number, part in enumerate(wrapped):
        part.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 1 + ahead])
        part.set_modules_to_backward_prefetch(wrapped[max(0, number - ahead) : number][::-1])


def listed(module: Model, mesh: Any) -> None:
    every(module, mesh)
    prefetching([module.embed, *module.layers, module.norm], 2)


def whole_listed(module: Model, mesh: Any) -> None:
    """Lists of the whole, too, which is entered once: at the embedding, and not again at the norm."""
    layers_and_whole(module, mesh)
    prefetching([module, *module.layers], 1)


SAME: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "layers": (layers_and_whole, {}),
    "held": (held, {"reshard_after_forward": False}),
    "every": (every, {"wrap": "all"}),
    "listed": (listed, {"wrap": "all", "prefetch": 2}),
    "whole listed": (whole_listed, {"prefetch": 1}),
}
"""And the settings that say the same."""


Event = tuple[str, frozenset[str]]


def said(program: ya.schedules.Program) -> list[Event]:
    """What a program gathers, computes forward, and reduces, by names of modules."""
    ops = [op for op in program.ops if isinstance(op, Gather | Forward | Reduce)]
    return [(type(op).__name__, names_of(program, op)) for op in ops]


def names_of(program: ya.schedules.Program, op: Gather | Forward | Reduce) -> frozenset[str]:
    units = program.trace.units
    return frozenset(re.sub(r"\[(\d+)\]$", r".\1", units[unit].name) for unit in program.trace.units_of(op))


def recorded(module: Model, tokens: Tensor) -> tuple[list[Event], frozenset[str], int]:
    """What FSDP2 gathers, computes forward, and reduces in a step; the layers that it frees after a forward and after a
    backward, and how many of these it holds at once at most, what is on its way included."""
    layers: Any = module.layers
    groups = {f"layers.{n}": each._get_fsdp_state()._fsdp_param_group for n, each in enumerate(layers)}
    freed = {n: of for n, of in groups.items() if of.post_forward_mesh_info is not None and of.reshard_after_backward}
    most = 0
    visited: Any = {"embed": module.embed, "norm": module.norm}
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
        for rows in tokens.chunk(M):
            module(rows).backward()
    return found, frozenset(freed), most


@on_ranks(2)
def test_it_is_what_fsdp2_does(_: Any) -> None:
    ranks = torch.distributed.get_world_size()
    tokens = torch.arange(8).view(4, 2)
    params, model = ya.functionalize(Model(), "layers")
    trace = ya.planner.trace(model, params, tokens, ranks=ranks, microbatches=M)
    for name, (apply, settings) in SAME.items():
        module = Model()
        apply(module, init_device_mesh("cpu", (ranks,)))
        program = ya.schedules.fsdp2(**settings)(trace)
        seen, freed, most = recorded(module, tokens)
        assert said(ya.verify(program)) == seen, f"{name}: {said(program)} is not {seen}"
        gathers = [op for op in program.ops if isinstance(op, Gather) and names_of(program, op) <= freed]
        slots = {slot for op in gathers for slot in op.slots}
        assert len(slots) == (max(2, most) if freed else 0), f"{name}: {len(slots)} slots, and FSDP2 holds {most}"
        assert [op for op in peers.fsdp2(**settings)(trace).ops if isinstance(op, Gather | Reduce)] == [
            op for op in program.ops if isinstance(op, Gather | Reduce)
        ]


# ---- errors


def test_what_is_refused() -> None:
    for wrong in ({"prefetch": -1}, {"prefetch": "2"}, {"reshard_after_forward": 2}, {"wrap": "none"}):
        with pytest.raises(ValueError, match=r"fsdp2\((reshard_after_forward|wrap)="):
            ya.schedules.fsdp2(**wrong)
