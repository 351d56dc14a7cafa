"""Prints the files of yafsdp_fn that a training step enters, in order, and those that `ya.shard` enters: design.md.

torchrun --nproc-per-node 2 docs/examples/walks.py 1      # a batch and a shard, on two ranks
torchrun --nproc-per-node 2 docs/examples/walks.py 2      # a batch on two pipeline stages, as the second one sees it
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

import yafsdp_fn as ya

ROOT = str(Path(ya.__file__).parent) + os.sep
PARAMS = {
    "embed": ya.Unit({"table": ya.Param((256, 64))}),
    "layers": ya.Stacked({"up": ya.Param((4, 256, 64)), "down": ya.Param((4, 64, 256))}),
    "head": ya.Unit({"out": ya.Param((256, 64))}),
}


FOUND: dict[str, None] = {}


def called(frame: FrameType, event: str, _: Any) -> None:
    watches = threading.current_thread().name == "yafsdp-watchdog"  # by the clock, not by steps
    if event == "call" and not watches and frame.f_code.co_filename.startswith(ROOT):
        FOUND.setdefault(frame.f_code.co_filename.removeprefix(ROOT).removesuffix(".py"))


def entered(work: Callable[[], Any]) -> str:
    """Returns the files that `work` enters, in the order of their first calls, on all threads that `main` has made."""
    FOUND.clear()
    work()
    return f"{len(FOUND)} files: {' '.join(FOUND)}"


def embed(w: Any, tokens: Tensor) -> Tensor:
    return ya.embedding(tokens, w["table"])


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    return x + ya.linear(relu(ya.linear(x, w["up"])), w["down"]), None


def head(w: Any, x: Tensor, targets: Tensor) -> ya.Mean:
    return ya.Mean(ya.linear_cross_entropy(x, w["out"], targets), targets.numel())


def loss(params: Any, batch: Any) -> ya.Mean:
    x = ya.apply(embed, params["embed"], batch["tokens"])
    x, _ = ya.scan(block, x, params["layers"])
    mean: ya.Mean = ya.apply(head, params["head"], x, batch["targets"])
    return mean


def main(stages: int) -> None:
    threading.setprofile(called)  # before the threads of streams begin
    sys.setprofile(called)
    text = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    batch, tx = {"tokens": text[:, :-1], "targets": text[:, 1:]}, ya.optim.adamw(1e-3)
    if stages == 1:
        mesh = ya.mesh(device="cpu")
        state = ya.init(PARAMS, tx, mesh=mesh)
        step = ya.train_step(loss, tx)
        whole = ya.unshard(state.params)
        shard = entered(lambda: ya.shard(whole, tx, mesh=mesh))
    else:
        mesh = ya.mesh(device="cpu", stage=stages, shard=-1)
        cut = ya.schedules.assign(ya.planner.trace(loss, PARAMS, batch), stages=stages)
        state = ya.init(PARAMS, tx, mesh=mesh, stages=cut)
        step = ya.train_step(loss, tx, schedule=ya.schedules.one_f_one_b(ya.schedules.zero3()), microbatches=2)
        shard = ""
    for _ in range(3):
        state, _ = step(state, batch)
    walked = entered(lambda: step(state, batch))
    sys.setprofile(None)
    if mesh.get_rank() == stages - 1:
        print(f"a batch, {walked}" + f"\na shard, {shard}" * bool(shard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
