"""On a real GPU: the README runs, the host waits for nothing, and no order of streams, however unlucky, changes a bit.

    plain      = train()
    disturbed  = train(), while
                     a random time passes on its stream before each piece of work   # who relies on luck comes too early
                     all that the allocator has free is overwritten with NaN        # who still reads it, reads that
    assert plain == disturbed

Ranks are emulated: collectives take their time on streams of their own, and leave contents that depend on what they
read. The same on a fake device, with every wait looked at: `test_races`, `test_host_syncs`. None of these tests has
run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from benchmarks.emulated import emulate
from models import llama
from tests.harness import readme
from tests.harness.child_process import InChild
from tests.harness.failing import same
from tests.harness.gpu import ON_GPU
from tests.harness.pages import ROOT
from yafsdp_fn.communication.cuda_streams import CudaEvent, CudaStream
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.schedules import Schedule

pytestmark = ON_GPU
RANKS = 8
STEADY, STEPS = 5, 8
"""The first call is recorded, and slots are made; steps 1, 2 and 4 look at blocks."""
MOST_CYCLES = 2_000_000
"""Of a delay: a millisecond or so, where an op of this model takes some ten microseconds."""
SMALL = 1 << 20
"""Bytes up to which the allocator serves requests from its pool of small blocks."""
CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=4)  # units of 2.2 MB: blocks of both of its pools
s = ya.schedules
remat = ya.schedules.remat


class Case(NamedTuple):
    """mesh: arguments of `ya.mesh`; a case that has some needs several ranks; wire: of the layers' matrices"""

    schedule: Schedule
    microbatches: int = 1
    mesh: dict[str, int] = {}  # noqa: RUF012
    wire: ya.Wire = ya.Wire()


CASES = {
    "kept graphs": Case(s.zero3()),
    "recomputed": Case(s.zero3(remat=remat.all)),
    "offloaded": Case(s.zero3(remat=remat.offload(ahead=1))),
    "offloaded, updates": Case(s.zero3(remat=remat.offload(ahead=0), update=True), microbatches=2),
    "updates": Case(s.zero3(prefetch=2, update=True)),
    "resident, deferred": Case(s.zero3(resident=1, prefetch=2, defer=True), microbatches=2),
    "zero2": Case(s.zero2(remat=remat.every(2)), microbatches=2),
    "in int8": Case(s.zero3(update=True), wire=ya.Wire(ya.formats.Scaled(), ya.formats.Scaled())),
    "hsdp": Case(s.hsdp(update=True), microbatches=2, mesh={"replicate": 2}),
    "hpz": Case(s.hpz(2, remat=remat.all), mesh={"local": 2}),
}
PLACES = [(name, ranks) for ranks in (1, RANKS) for name, case in CASES.items() if ranks > 1 or not case.mesh]


@contextlib.contextmanager
def mesh_of(case: Case, ranks: int, device: str) -> Iterator[Any]:
    try:
        with contextlib.nullcontext() if ranks == 1 else emulate("a100-80g", ranks):
            yield ya.mesh(device=device, **case.mesh)
    finally:
        if dist.is_initialized():  # of one rank; the next case makes its own
            dist.destroy_process_group()


def train(name: str, ranks: int, device: str = "cuda", steady: Any = None) -> list[Tensor]:
    """Metrics of every step and all weights in the end, on the host, which looks at nothing before.

    steady: a context for the steps from the fifth on
    """
    case = CASES[name]
    with mesh_of(case, ranks, device) as mesh:
        tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-3))
        precision = ya.Precision(compute=torch.bfloat16, reduce=torch.float32)
        params = llama.params(CONFIG)
        params = params if case.wire == ya.Wire() else ya.params.with_wire(params, case.wire)
        state = ya.init(params, tx, mesh=mesh, seed=0, precision=precision)
        options: dict[str, Any] = {"schedule": case.schedule, "microbatches": case.microbatches}
        step = ya.train_step(llama.loss(CONFIG), tx, **options)
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(CONFIG.vocab, (2, 65), generator=generator).to(device) for _ in range(STEPS)]
        batches = [{"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()} for text in texts]
        found: list[Any] = []

        def steps(some: list[Any]) -> None:
            nonlocal state
            for batch in some:
                state, metrics = step(state, batch)
                found.append(metrics)

        steps(batches[:STEADY])
        with steady or contextlib.nullcontext():
            steps(batches[STEADY:])
        found.append(ya.unshard(state.params))
        return [leaf.cpu() for leaf in optree.tree_leaves(found) if isinstance(leaf, Tensor)]


# ---- what everybody tries first


def test_the_readme_runs() -> None:
    """As it is, in a process of its own; state and batch are where `ya.mesh()` puts them by default."""
    code = readme.FIRST + "print(torch.cuda.is_initialized())\n"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("1 ranks: ")
    assert ran.stdout.endswith("False\n")
    code = readme.on("ya.mesh()") + 'print(metrics["loss"].item(), metrics["loss"].device, batch["tokens"].device)\n'
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loss, *devices = ran.stdout.split()
    assert 4 < float(loss) < 7
    assert devices == ["cuda:0", "cuda:0"]


# ---- the host


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait. torch's own check sees copies and looks, not waits that are asked for."""

    def asked(*args: object) -> None:
        raise RuntimeError("the host waits for the device")

    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            stack.enter_context(mock.patch.object(owner, "synchronize", asked))
        torch.cuda.set_sync_debug_mode("error")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield


def runs_ahead(name: str, ranks: int) -> bool:
    return all(bool(x.isfinite().all()) for x in train(name, ranks, steady=no_waiting()))


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_a_steady_step_never_makes_the_host_wait(in_child: InChild, name: str, ranks: int) -> None:
    """Its metrics are read when all is over."""
    assert in_child(runs_ahead, name, ranks)


def looks() -> list[str]:
    x, event = torch.ones(3, device="cuda"), torch.cuda.Event()
    ways: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "cpu": lambda: x.cpu(),
        "nonzero": lambda: x.nonzero(),
        "device": lambda: torch.cuda.synchronize(),
        "event": lambda: event.synchronize(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
    }
    found = []
    for name, look in ways.items():
        with contextlib.suppress(RuntimeError), no_waiting():
            look()
            found.append(name)
    return found


def test_a_waiting_host_is_seen(in_child: InChild) -> None:
    assert in_child(looks) == []


# ---- the device


def poison() -> None:
    """Overwrites what the allocator has free for the current stream, in that stream's order, with bytes 0xFF: NaN in
    every floating dtype. A request of a free block's very size gets that block."""
    if torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream().cuda_stream
    sizes = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == stream and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # not of a graph
        for block in segment["blocks"]
        if block["state"] == "inactive" and (block["size"] <= SMALL) == (segment["segment_type"] == "small")
    ]
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for memory in taken:
        memory.fill_(0xFF)


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """Delays on every stream, and poisoned memory of every stream, while this lasts."""
    rng = random.Random(seed)
    submit = CudaStream.submit
    begin = Session.begin_compute

    def late() -> None:
        if rng.random() < 0.5:  # else all streams are late alike
            torch.cuda._sleep(rng.randrange(MOST_CYCLES))

    def submitted(self: Any, work: Callable[[], None], *rest: Any, **options: Any) -> None:
        def worked() -> None:
            late()
            work()
            poison()

        submit(self, worked, *rest, **options)
        poison()

    def begun(self: Any, *args: Any) -> Any:
        op = begin(self, *args)
        late()
        poison()
        return op

    with mock.patch.object(CudaStream, "submit", submitted), mock.patch.object(Session, "begin_compute", begun):
        yield


def differences(name: str, ranks: int, seeds: int, ordered: bool = True) -> list[str]:
    """What a disturbed run changes. ordered: False takes all waits of streams for each other away"""
    expected = train(name, ranks)
    assert same(expected, train(name, ranks)), "two plain runs differ, so that this tells nothing"
    assert all(bool(x.isfinite().all()) for x in expected)
    found = []
    for seed in range(seeds):
        with disturbed(seed):
            unordered = mock.patch.object(CudaEvent, "wait", lambda self: None)
            with contextlib.nullcontext() if ordered else unordered:
                got = train(name, ranks)
        if not same(expected, got):
            wrong = [n for n, (x, y) in enumerate(zip(expected, got, strict=True)) if not torch.equal(x, y)]
            nans = sum(int(x.isnan().sum()) for x in got)
            found.append(f"seed {seed}: {len(wrong)} of {len(got)} tensors, the first is {wrong[0]}; {nans} NaN")
    return found


@pytest.mark.parametrize(("name", "ranks"), [("kept graphs", RANKS), ("offloaded", 1)])
def test_a_missing_wait_is_seen(in_child: InChild, name: str, ranks: int) -> None:
    """Else the delays are too short, and the next test tells nothing."""
    assert in_child(differences, name, ranks, 2, False)


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_delays_and_poison_change_no_bit(in_child: InChild, name: str, ranks: int) -> None:
    assert in_child(differences, name, ranks, 2) == []
