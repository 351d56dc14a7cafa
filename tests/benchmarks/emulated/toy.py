"""A cluster of round numbers, and a model whose compute is sleep: what is tested is the schedule, not the machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from yafsdp_fn.planner import Cluster

E, L, B = 256, 4, 2
UNIT_BYTES = 4 * E * E


def cluster(seconds: float, ratio: float = 3.0) -> Cluster:
    """On which a ring over many nodes takes `seconds` for a unit; inside a node links are `ratio` times as fast."""
    return Cluster(
        name="toy",
        gpus_per_node=8,
        matmul_flops=1e9,
        attention_flops=1e9,
        memory_bandwidth=1e10,
        memory_bytes=2**30,
        node_bandwidth=ratio * UNIT_BYTES / seconds,
        network_bandwidth=UNIT_BYTES / seconds,
        node_latency=1e-6,
        network_latency=1e-6,
        host_computes=True,
    )


class Sleep(torch.autograd.Function):
    """The identity, for `forward` and `backward` seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


def params() -> Any:
    def square(*lead: int) -> ya.Param:
        return ya.Param((*lead, E, E), init=ya.params.initializers.normal(E**-0.5))

    return {"embed": square(), "layers": ya.Stacked(square(L)), "head": square()}


class Loss:
    """A loss whose blocks each sleep `seconds` in forward, and twice that in backward."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def _matmul(self, w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(Sleep.apply(x, self.seconds, 2 * self.seconds) @ w)

    def _block(self, x: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return x + self._matmul(w, x), None

    def _head(self, w: Tensor, x: Tensor) -> Tensor:
        return (self._matmul(w, x) - 0.5).square().mean()

    def __call__(self, params: Any, batch: Tensor) -> Tensor:
        x = ya.apply(self._matmul, params["embed"], batch)
        x, _ = ya.scan(self._block, x, params["layers"])
        return ya.apply(self._head, params["head"], x)


def batch() -> Tensor:
    return torch.randn(B, E, generator=torch.Generator().manual_seed(0))
