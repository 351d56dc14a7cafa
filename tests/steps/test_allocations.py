"""From the third step on nothing of weight size is allocated but the fresh gradients of one block at a time.

The main thread, which is autograd's too, is measured by the profiler: every allocation and every release, scratch
memory of kernels included. Worker threads are out of its sight: there a dispatch mode looks for outputs with new
storage. So it does in the main thread, since bf16 products of the CPU have scratch memory as large as weights.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

import yafsdp_fn as ya
from tests.harness.collector import no_collection
from tests.harness.histories import BUILDERS
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import by_autograd
from tests.harness.pool import on_ranks
from tests.harness.problems import SCHEDULES, Batch, Head, Params, param, with_ends
from tests.harness.watching import Watch, tensors
from yafsdp_fn.communication.streams import Event, HostStream

E, F, V, LAYERS = 64, 96, 72, 5
ACTIVATIONS = 8 << 10
"""Bytes that nothing exceeds but weights, gradients and buffers of their size. A saved RNG state has 5,056; the norm's
sums over blocks of 64 elements have at most 7,720, of all layers."""

TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-3))


class Weights(NamedTuple):
    up: Any  # [F, E]
    down: Any  # [E, F]
    scale: Any  # [E]


def params() -> Params:
    layers = Weights(param(LAYERS, F, E), param(LAYERS, E, F), param(LAYERS, E))
    return Params(param(V, E), ya.Stacked(layers), Head(param(E), param(V, E)))


def block(x: Tensor, w: Weights) -> tuple[Tensor, None]:
    return x + torch.tanh((x * w.scale) @ w.up.T) @ w.down.T, None


@with_ends
def loss(params: Params, x: Tensor) -> Any:
    return ya.scan(block, x, params.layers)[0]


def batch() -> Batch:
    """Three tokens: every activation is far smaller than every weight."""
    tokens = torch.tensor([[1], [2], [3]])
    return {"tokens": tokens, "targets": tokens + 1}


@contextlib.contextmanager
def watched_streams() -> Iterator[Watch]:
    """What the work on the streams of this process allocates."""
    mode = Watch()
    submit = HostStream.submit

    def watched(self: HostStream, work: Callable[[], None], waits: Sequence[Event], event: Any, label: str) -> None:
        def run() -> None:
            with mode:
                work()

        submit(self, run, waits, event, label)

    with mock.patch.object(HostStream, "submit", watched):
        yield mode


class Measured(NamedTuple):
    """Of one step. main: allocations (positive) and releases of the main thread, in order of time; outputs: sizes of
    the new storages of its operations; streams: of those in worker threads"""

    main: list[int]
    outputs: list[int]
    streams: list[int]
    stream_ops: int

    def large(self) -> list[int]:
        return [size for size in self.main if abs(size) > ACTIVATIONS]

    def peak(self) -> int:
        return max(itertools.accumulate([0, *self.large()]))


def measured(step: Callable[[], object]) -> Measured:
    with (
        no_collection(),
        watched_streams() as mode,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof,
        Watch() as own,
    ):
        step()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    main = [event.nbytes() for event in events if event.name() == "[memory]"]
    return Measured(main, own.fresh, mode.fresh, len(mode.ops))


@by_autograd()
def steps(state: ya.ShardedState, step: Any) -> list[Measured]:
    """The first step, the third and the fourth; all gradients of weights are fresh ones."""
    out = []
    addresses = set()

    def one() -> None:
        nonlocal state
        state, _ = step(state, batch())

    for number in range(4):
        if number == 1:
            one()
        else:
            out.append(measured(one))
        addresses.add(tuple(leaf.data_ptr() for leaf in tensors(optree.tree_leaves((state.params, state.opt_state)))))
    assert len({address[: len(optree.tree_leaves(state.params))] for address in addresses}) == 1
    return out


FP32 = ya.Precision()
BF16 = ya.Precision(compute=torch.bfloat16)
TXS = {True: TX, False: ya.optim.adamw(1e-3)}
"""By whether updates wait for the norm."""

AFTER = [(False, True)]
INSIDE = [(True, True), (True, False)]
EVERY = [*AFTER, *INSIDE, (False, False)]
"""Whether updates are in the program, and whether they wait for the norm."""

Way = tuple[str, Callable[..., Any], ya.Precision, int, list[tuple[bool, bool]]]
WAYS: dict[str, Way] = {
    "zero3": ("shard", BUILDERS["zero3"], FP32, 1, EVERY),
    "microbatches": ("shard", BUILDERS["zero3"], FP32, 3, AFTER),
    "remat": ("shard", functools.partial(BUILDERS["zero3"], remat="all"), FP32, 3, AFTER),
    "zero2": ("shard", BUILDERS["zero2"], FP32, 1, EVERY),
    "bf16": ("shard", functools.partial(BUILDERS["zero3"], resident=1, prefetch=2), BF16, 3, AFTER),
    "zero1": ("shard", BUILDERS["zero1"], FP32, 1, INSIDE),
    "resident": ("shard", BUILDERS["resident"], FP32, 1, INSIDE),
    "ddp": ("copies", BUILDERS["ddp"], FP32, 1, INSIDE),
    "hsdp": ("replicate", BUILDERS["hsdp"], FP32, 1, INSIDE),
    "hpz": ("nodes", BUILDERS["hpz"], FP32, 1, INSIDE),
}
"""Mesh, builder, precision, microbatches, updates."""

CASES = [(1, way) for way in list(WAYS)[:5]] + [(2, way) for way in list(WAYS)[:8]] + [(4, "hsdp"), (4, "hpz")]
BY_NIGHT = ("zero2", "zero1", "resident")


@pytest.mark.sampled
@on_ranks()
@pytest.mark.parametrize(("world", "way"), [nightly(*case) if case[1] in BY_NIGHT else case for case in CASES])
def test_only_fresh_gradients_of_one_block_are_allocated(mesh: Any, way: str) -> None:
    """With the optimizer after the program, and in it."""
    kind, builder, precision, parts, updates = WAYS[way]
    size = precision.gather_dtype.itemsize
    fresh = {"layer": 2 * [E * F * size], "embed": [V * E * size], "head": [V * E * size]}
    per_step = sorted(parts * (LAYERS * fresh["layer"] + fresh["embed"] + fresh["head"]))
    for update, clips in updates:
        state = ya.init(params(), TXS[clips], mesh=made(kind), precision=precision)
        step = ya.train_step(
            loss, TXS[clips], schedule=builder(update=update), microbatches=parts, skip_nonfinite=clips
        )
        first, *later = steps(state, step)
        for each in later:
            assert sorted(n for n in each.outputs if n > ACTIVATIONS) == per_step
            assert [n for n in each.streams if n > ACTIVATIONS] == []
            if precision.gather_dtype == torch.float32:
                assert sorted(n for n in each.large() if n > 0) == per_step
                assert sum(each.large()) == 0, "something of weight size outlives the step, or died in it"
                assert each.peak() == sum(fresh["layer"])
        # the measurement sees what the first step allocates: slots and gradient shards, and the worker threads
        assert first.peak() > 2 * sum(fresh["layer"])
        assert mesh.size() == 1 or all(each.stream_ops >= 2 * LAYERS for each in later)


@on_ranks(1, 2)
def test_a_step_leaves_no_cycles(mesh: Any) -> None:
    """Cycles would keep activations until the collector runs, which counts objects and not their bytes."""
    state = ya.init(params(), TX, mesh=mesh)
    found = []
    step = ya.train_step(loss, TX, schedule=SCHEDULES["zero3-remat-every"], microbatches=3)
    for _ in range(4):
        with no_collection():
            state, _ = step(state, batch())
            found.append(gc.collect())
    assert found[1:] == [0, 0, 0]


def graphs(mesh: Any, schedule: str) -> list[list[tuple[list[int], list[int]]]]:
    """For each step, and in it for each backward of a layer: whose intermediate results and outputs are alive."""
    made: tuple[dict[int, StorageWeakRef], ...] = ({}, {})  # memory: the tensors themselves come and go
    alive: list[tuple[list[int], list[int]]] = []

    def look(_: Tensor) -> None:
        inner, outer = ([at for at, memory in of.items() if not memory.expired()] for of in made)
        alive.append((inner, outer))

    def squared(x: Tensor, item: tuple[Weights, Tensor]) -> tuple[Tensor, None]:
        w, number = item
        h = x @ w.up.T
        out = x + 1e-3 * (h * h) @ w.down.T  # a product saves its factors
        for of, tensor in zip(made, (h, out), strict=True):
            of[int(number)] = StorageWeakRef(tensor.untyped_storage())
        if h.requires_grad:
            h.register_hook(look)
        return out, None

    @with_ends
    def loss(params: Params, x: Tensor) -> Any:
        return ya.scan(squared, x, (params.layers, torch.arange(LAYERS)))[0]

    state = ya.init(params(), TX, mesh=mesh)
    found = []
    step = ya.train_step(loss, TX, schedule=SCHEDULES[schedule])
    with no_collection():
        for _ in range(3):
            state, _ = step(state, batch())
            found.append(alive[:])
            alive.clear()
    return found


@on_ranks(1, 2)
def test_a_backward_drops_the_graph_of_its_visit(mesh: Any) -> None:
    """One by one, not all together when the loss dies; a visit that recomputes has none but in its own backward."""
    backwards = range(LAYERS - 1, -1, -1)
    alone = [([], list(range(at + 1))) for at in backwards]
    kept = [(list(range(at)), list(range(at))) for at in backwards]
    found = graphs(mesh, "zero3")
    assert found == [kept, kept, kept]
    found = graphs(mesh, "zero3-remat-all")
    assert found == [alone, alone, alone]
