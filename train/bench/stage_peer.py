"""torch.distributed.pipelining on the blocks of `models.llama`, cut where ours are cut.

Segment               consecutive visits: embed, some layers, head; torch's `submod`
PipelineStage         one for each segment of this rank
Schedule...           Schedule1F1B, ScheduleInterleaved1F1B
fully_shard           inside of each segment, where a stage has several ranks: FSDP2
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from models.llama import model as llama
from models.llama.config import Config
from train.bench.contenders import Batch, peer_optimizer
from train.bench.peer_model import Holder


class Segment(nn.Module):
    """Visits `first` to `end` of `embed, layers, head`. forward: tokens or [B, S, E] -> [B, S, E], or the mean loss."""

    def __init__(self, config: Config, params: Any, first: int, end: int) -> None:
        """params: the whole plain tree, of which its part is copied."""
        super().__init__()
        block, last = llama.block(config), config.layers + 1
        self.rotary = functools.partial(llama.rotary, config)
        self.embed = Holder(params.embed, llama.embed) if first == 0 else None
        self.layers = nn.ModuleList(
            Holder(optree.tree_map(lambda stack, l=l: stack[l], params.layers), lambda w, x, rope: block(x, w, rope)[0])
            for l in range(max(first, 1) - 1, min(end, last) - 1)
        )
        self.head = Holder(params.head, llama.head_loss(config)) if end > last else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        rope = self.rotary(torch.arange(x.shape[1], device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        if self.head is None:
            return x
        mean = self.head(x, targets)
        loss: Tensor = mean.total / mean.weight
        return loss


class Pipelined:
    """A step of torch's own schedule, with `torch.optim.AdamW(fused=True)`.

    segments: (first, end) of the visits of each; homes: the stage of each; several of a stage make it interleaved
    shard: ranks of a stage, between which FSDP2 cuts its weights
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        segments: Sequence[tuple[int, int]],
        homes: Sequence[int],
        *,
        microbatches: int,
        shard: int,
        device: torch.device,
    ) -> None:
        ranks = max(homes) + 1
        mesh = init_device_mesh(device.type, (ranks, shard), mesh_dim_names=("stage", "shard"))
        here, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
        stages: list[Any] = []
        self._modules = nn.ModuleList()
        for number, (ends, home) in enumerate(zip(segments, homes, strict=True)):
            if home == here:
                module = Segment(config, params, *ends)
                if shard > 1:
                    _shard(module, mesh["shard"])
                self._modules.append(module)
                stages.append(PipelineStage(module, number, len(segments), device, group=group))
        self._first, self._last = here == homes[0], here == homes[-1]
        self._stages, self._microbatches = ranks, microbatches
        options: Any = {"loss_fn": lambda loss, _: loss / microbatches, "scale_grads": False}
        self._schedule: Any
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], microbatches, **options)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, microbatches, **options)
        self._optimizer = peer_optimizer(self._modules.parameters())

    def step(self, batch: Batch) -> float:
        """The mean over stages is the loss: only the last one knows it."""
        self._optimizer.zero_grad(set_to_none=True)
        tokens = (batch["tokens"],) if self._first else ()
        losses: list[Tensor] | None = [] if self._last else None
        more = {"target": batch["targets"], "targets": batch["targets"]} if self._last else {}
        self._schedule.step(*tokens, losses=losses, return_outputs=False, **more)
        self._optimizer.step()
        return self._stages * sum(loss.item() for loss in losses or ())

    def program(self) -> None:
        return None


def _shard(module: Segment, mesh: DeviceMesh) -> None:
    """As `contenders.shard_fsdp2`, but that a stage keeps its weights until its last microbatch is over, as torchtitan
    has it for pipelines."""
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
