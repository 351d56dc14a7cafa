"""Programs, written as rows by `to_actions`, that torch.distributed.pipelining runs: gradients of the plain loop.

Torch's own runtime loads the CSV, on segments that are modules of torch; on stages of two ranks they are cut by FSDP2,
which gathers and reduces where the rows say it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import yafsdp_fn as ya
from tests.harness.pool import Pools
from tests.harness.unlike import Model
from tests.interop.test_to_actions import WAITS
from tests.program.traces import cut, model
from tests.steps.test_written import WEAK
from yafsdp_fn import schedules as s
from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner.orders import CallGraph, Search, evaluate
from yafsdp_fn.program.split import Call, Split

TOLERANCE = 1e-12
SIZE, ROWS = 6, 2  # of a layer; of a microbatch
LAYERS = 2  # of a segment
MOVES = 40


# ---- programs


def homes(stages: int, per_stage: int, v: bool = False) -> tuple[int, ...]:
    there = tuple(range(stages))
    return there + there[::-1] if v else there * per_stage


def by_chance(seed: int, split: Split, microbatches: int) -> list[list[Call]]:
    """Calls that could follow each other on one rank, in a random order, dealt to their stages: no builder's order."""
    draw = random.Random(seed)
    segments = range(len(split.homes))
    todo: dict[Call, set[Call]] = {}  # call -> those that must have been
    for segment, m in itertools.product(segments, range(microbatches)):
        halves = draw.random() < 0.5
        first = Call("inputs" if halves else "backward", segment, m)
        forward = Call("forward", segment, m)
        todo[forward] = {forward._replace(segment=segment - 1)} if segment else set()
        todo[first] = {forward}
        if halves:
            todo[first._replace(kind="weights")] = {first}
    for call, waits in todo.items():
        if call.kind in ("inputs", "backward") and call.segment + 1 < len(segments):
            after = [call._replace(kind=kind, segment=call.segment + 1) for kind in ("inputs", "backward")]
            waits.update(one for one in after if one in todo)
    rows: list[list[Call]] = [[] for _ in range(split.stages)]
    done: set[Call] = set()
    while len(done) < len(todo):
        call = draw.choice([call for call, waits in todo.items() if call not in done and waits <= done])
        rows[split.homes[call.segment]].append(call)
        done.add(call)
    return rows


def written(split: Split, microbatches: int, memory: float) -> s.Schedule:
    """The order that a search writes in the memory of so many microbatches of a segment: no builder's. Backwards of
    weights take less than the others, and segments are not alike."""
    count = range(len(split.homes))
    forward = tuple(1.0 + 0.2 * (k % 3) for k in count)
    held = (1.0,) * len(count)
    between = (0.5,) * len(count)
    inputs = tuple(1.2 * f for f in forward)
    weights = tuple(0.7 * f for f in forward)
    calls = CallGraph(split.homes, microbatches, forward, inputs, weights, 0.3, held, between)
    search = Search(calls, memory, seed=0)
    search.run(MOVES)
    rows = search.rows
    assert max(evaluate(calls, rows).memory) <= memory
    for builder in orders.ORDERS.values():
        with contextlib.suppress(ValueError):  # of another shape, or of other numbers of microbatches
            assert rows != builder(split, microbatches)
    return s.staged(lambda *_: rows, s.zero1(), pace=calls.pace)


def searched(stages: int) -> s.Program:
    """What `ya.planner.search` writes for as many microbatches as stages."""
    few = Model((("global", 4 * stages - 2),))
    trace = ya.planner.trace(few.loss, few.params(), few.batch(stages), tx=ya.optim.sgd(0.1), microbatches=stages)
    found = ya.planner.search(trace, WEAK, memory=2**30, stages=(stages,), ranks=stages, synthesize=600, moves=10)
    assert found.synthesized is not None
    assert found.synthesized.design.rows
    assert found.synthesized.step_s < found.synthesized.builder_s
    return found.program


def programs(stages: int) -> dict[str, s.Program]:
    """By name, most of 2 P microbatches and more, that torch's DualPipeV wants."""

    def on(places: tuple[int, ...]) -> s.Trace:
        return cut(model(LAYERS * len(places) - 2, 2 * stages + 1), places)

    def chance(seed: int) -> s.Schedule:
        return s.staged(lambda split, m: by_chance(seed, split, m), s.zero1())

    def of_less_memory(trace: s.Trace, memory: float) -> s.Program:
        return written(trace.split, trace.microbatches, memory)(trace)

    rows = get_schedule_ops("DualPipeV", stages, 2 * stages + 1, 2)
    found = {
        "1f1b": s.one_f_one_b()(on(homes(stages, 1))),
        "zbv": s.v_shaped(s.zero1())(on(homes(stages, 2, v=True))),
        "dualpipev": s.from_actions(rows)(on(homes(stages, 2, v=True))),
        "gathered anew": s.interleaved(s.zero3())(on(homes(stages, 2))),
        "chance 0": chance(0)(on(homes(stages, 1))),
        "chance 1": chance(1)(on(homes(stages, 2))),
        "written V": of_less_memory(on(homes(stages, 2, v=True)), 2 * stages - 0.5),
        "written, less than 1F1B": of_less_memory(on(homes(stages, 1)), stages - 0.5),
        "searched": searched(stages),
    }
    return {name: s.verify(program) for name, program in found.items()}


# ---- one rank's part


class Segment(nn.Module):
    """Layers of the whole model, `LAYERS` of them from that of `number` on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        layers = [nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        draw = torch.Generator().manual_seed(number)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Stage(PipelineStage):
    """Torch's, without the first messages, which make NCCL's communicators: gloo needs none. Torch 2.11 also sends them
    from a rank to itself, where two segments that follow each other are on it, and gloo refuses that."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def loss_of(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().mean()


def batch_of(rank: int, microbatches: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    both = [torch.randn(ROWS * microbatches, SIZE, generator=draw, dtype=torch.float64) for _ in range(2)]
    return both[0], both[1]


def plain(segments: int, ranks: int, microbatches: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Gradients of each segment, and losses of each rank's batch, of a loop over ranks and microbatches."""
    whole = [Segment(number) for number in range(segments)]
    losses: list[float] = []
    for rank in range(ranks):
        parts = [tensor.chunk(microbatches) for tensor in batch_of(rank, microbatches)]
        total = 0.0
        for x, target in zip(*parts, strict=True):
            for segment in whole:
                x = segment(x)
            loss = loss_of(x, target) / (microbatches * ranks)
            loss.backward()
            total += ranks * loss.item()
        losses.append(total)
    return [{name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in whole], losses


Case = tuple[str, str, str, tuple[int, ...], int, Counter[str]]
"""A program's name, its CSV and the format of it, segment -> stage, microbatches, and actions by word."""


def check(_: Any, ranks: int, cases: list[Case]) -> None:
    """ranks: of a stage, with FSDP2 where there are several"""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("stage", "shard"))
    here = mesh["stage"].get_local_rank()
    shard = mesh["shard"].get_local_rank()
    for name, path, of, places, microbatches, words in cases:
        own = {number: Segment(number) for number, home in enumerate(places) if home == here}
        for segment in own.values() if ranks > 1 else ():
            for layer in segment.layers:
                fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=False)
            fully_shard(segment, mesh=mesh["shard"], reshard_after_forward=False)
        group = mesh["stage"].get_group()
        stages = [Stage(own[n], n, len(places), torch.device("cpu"), group=group) for n in own]
        divided = {"loss_fn": lambda x, t, m=microbatches: loss_of(x, t) / m, "scale_grads": False}
        schedule = _PipelineScheduleRuntime(stages, microbatches, **divided)
        schedule._load_csv(path, of)
        x, target = batch_of(shard, microbatches)
        losses: list[Tensor] = []
        with mock.patch.object(FSDPModule, "unshard", autospec=True, side_effect=FSDPModule.unshard) as gathers:
            schedule.step(*[x] * (0 in own), target=target, losses=losses, return_outputs=False)
        what = f"{name}, {of}, {len(places)} segments on {world // ranks} stages of {ranks}, rank {here}.{shard}"
        expected, totals = plain(len(places), ranks, microbatches)
        if len(places) - 1 in own:
            assert abs(sum(loss.item() for loss in losses) - totals[shard]) < TOLERANCE, what
        for number, segment in own.items():
            for key, parameter in segment.named_parameters():
                grad: Any = parameter.grad
                assert grad is not None, f"{what}: segment {number}, {key}"
                grad = grad.full_tensor() if ranks > 1 else grad
                error = (grad - expected[number][key]).abs().max().item()
                assert error < TOLERANCE, f"{what}: segment {number}, {key} is off by {error}"
        if of == "compute_comms":
            assert gathers.call_count == (LAYERS + 1) * words[f"{here} UNSHARD"] * (ranks > 1), what


def cases_of(folder: Path, stages: int, names: set[str] | None, formats: tuple[Any, ...]) -> list[Case]:
    found: list[Case] = []
    for (name, program), of in itertools.product(programs(stages).items(), formats):
        if names is not None and name not in names:
            continue
        path = folder / f"{name}-{stages}-{of}.csv"
        actions = s.to_actions(program, of, waits=WAITS and of == "compute_comms")
        actions.save(path)
        assert not any("wait for ever" in line for line in actions.left_out)
        words = Counter(f"{rank} {word.lstrip('0123456789')}" for rank, row in enumerate(actions.rows) for word in row)
        found.append((name, str(path), of, program.trace.split.homes, program.trace.microbatches, words))
    return found


def test_torch_runs_what_is_written(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(check, 1, cases_of(tmp_path, 2, {"zbv", "chance 1", "searched"}, ("compute_comms",)))


BOTH = ("compute_only", "compute_comms")


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "ranks"), [(2, 1), (4, 1), (4, 2)])
def test_torch_runs_every_program(pools: Pools, tmp_path: Path, world: int, ranks: int) -> None:
    pools[world].run(check, ranks, cases_of(tmp_path, world // ranks, None, BOTH))
