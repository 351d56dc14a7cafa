"""A steady step never makes the host wait for the device: it may run ahead by as much as there is to do.

Steps 1, 2, 4, 8 and so on do, to look whether blocks return the same when they run again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import yafsdp_fn as ya
from tests.cuda.days import BUILDERS, MESHES, PRECISIONS, REMATS
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA, HostSync
from tests.harness.marks import by_day
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from yafsdp_fn.communication.micro_shards import mark

OPTIMIZERS: dict[str, Any] = {
    "adamw": ya.optim.adamw(1e-2),
    "clipped": ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2)),
    "scheduled": ya.optim.adamw(ya.optim.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "momentum": ya.optim.sgd(1e-2, momentum=0.9),
}


class Case(NamedTuple):
    builder: str
    remat: str
    problem: str
    tx: str
    precision: int
    options: tuple[str, ...] = ()
    deterministic: bool = False


CASES = [
    Case("zero3", "none", "tied", "adamw", 0),
    Case("zero3", "all", "pinned", "clipped", 1),
    Case("zero3", "all", "units", "scheduled", 1),
    Case("resident", "offload-ahead", "frozen", "scheduled", 2, ("update",)),
    Case("hsdp", "every", "twice", "adamw", 3, ("update", "defer")),
    Case("hpz", "offload", "stacks", "clipped", 3),
    Case("zero1", "none", "unrolled", "momentum", 2),
    Case("ddp", "all", "dropout", "adamw", 1, ("update",)),
    Case("zero3", "none", "tied", "clipped", 1, deterministic=True),
]


@pytest.mark.parametrize(
    "case", by_day(CASES, *(CASES[at] for at in (1, 7))), ids=lambda case: "-".join(map(str, case[:4]))
)
@in_child_process
def test_the_host_runs_ahead(case: Case) -> None:
    """Nothing makes the host wait in steps of a program; metrics are read at the end."""
    build, axes = BUILDERS[case.builder]
    problem = PROBLEMS[case.problem]
    tx = OPTIMIZERS[case.tx]
    with fake_cuda() as device, rank_of(MESHES[axes]) as mesh:
        if case.deterministic:
            mark(mesh, 2 * mesh.size())
        state = ya.init(problem.params(4), tx, mesh=mesh, precision=PRECISIONS[case.precision])
        schedule = build(remat=REMATS[case.remat], **dict.fromkeys(case.options, True))
        step = ya.train_step(problem.loss, tx, schedule=schedule, microbatches=2)
        batches = [{k: v.to(CUDA) for k, v in batch_of(0, seed=n, rows=4).items()} for n in range(7)]
        for number, batch in enumerate(batches):
            if number == 5:  # the first is recorded, and 1, 2, 4 and 8 look again
                device.syncs.clear()
                device.may_sync = False
            state, metrics = step(state, batch)
        waited = list(device.syncs)
        device.may_sync = True
        assert metrics["loss"].isfinite()
        assert waited == []


@in_child_process
def test_the_fake_device_sees_who_waits() -> None:
    with fake_cuda() as device:
        x = torch.ones(3, device=CUDA)
        host = torch.ones(3)
        for look in (
            lambda: x.sum().item(),
            lambda: float(x[0]),
            lambda: bool(x[0]),
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: x.to("cpu"),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: torch.equal(x, x),
            lambda: torch.tensor(1.0, device=CUDA),
            lambda: host.to(CUDA),
            lambda: x.copy_(host),
            lambda: x.copy_(host, non_blocking=True),  # the host's memory is not pinned
            lambda: torch.cuda.synchronize(),
        ):
            device.may_sync = False
            with pytest.raises(HostSync, match=r"^the host waits for the device"):
                look()
            device.may_sync = True
