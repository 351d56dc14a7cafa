"""The same ten AdamW steps as FSDP2 (`fully_shard`) and DDP take, in the same processes, on the same batches."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F_
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import yafsdp_fn as ya
from tests.harness.oracle import plain, relative, whole
from tests.harness.pool import on_ranks
from tests.harness.problems import (
    SCHEDULES,
    Batch,
    Head,
    Layer,
    Params,
    V,
    base_params,
    block_with_y,
    embed,
)

LAYERS, STEPS = 3, 10
TX = ya.optim.adamw(1e-2, weight_decay=0.1)


def batch(rank: int, step: int) -> Batch:
    """Without a mask: the peers average the losses of their ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, V, (4, 5), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def head_loss(w: Head, x: Tensor, targets: Tensor) -> Tensor:
    return F_.cross_entropy(((x * w.scale) @ w.out.T).flatten(0, 1), targets.flatten())


def ours(params: Params, batch: Batch) -> Tensor:
    """A plain scalar: parts count equally."""
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, ys = ya.scan(block_with_y, x, params.layers)
    loss: Tensor = ya.apply(head_loss, params.head, x, batch["targets"])
    return loss + 1e-2 * ys.sum() / len(x)


class Module(nn.Module):
    """Parameters by the names that a block knows them by; `size` has one element, since FSDP2 shards a dimension."""

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            self.register_parameter(name, nn.Parameter(leaf.clone().reshape(leaf.shape or (1,))))


class LayerModule(Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return block_with_y(x, Layer(*(getattr(self, name) for name in Layer._fields)))


class Model(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        rows = [Layer(*(leaf[at] for leaf in params.layers)) for at in range(LAYERS)]
        self.layers = nn.ModuleList(LayerModule(row._asdict()) for row in rows)
        self.ends = Module({"embed": params.embed, "scale": params.head.scale, "out": params.head.out})

    def forward(self, batch: Batch) -> Tensor:
        x = embed(self.ends.embed, batch["tokens"])
        outputs = x.new_zeros(())
        for layer in self.layers:
            x, y = layer(x)
            outputs = outputs + y
        return head_loss(Head(self.ends.scale, self.ends.out), x, batch["targets"]) + 1e-2 * outputs / len(x)

    def tree(self) -> Params:
        """Whole parameters in the structure of ours."""
        whole = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in self.named_parameters()
        }
        columns = {name: torch.stack([whole[f"layers.{at}.{name}"] for at in range(LAYERS)]) for name in Layer._fields}
        layers = Layer(**columns)._replace(size=columns["size"].view(LAYERS))
        return Params(whole["ends.embed"], layers, Head(whole["ends.scale"], whole["ends.out"]))


def fsdp2(mesh: Any, params: Params) -> tuple[Model, nn.Module]:
    model = Model(params)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)  # the root's forward reads `ends`: it is the root that gathers them


def ddp(mesh: Any, params: Params) -> tuple[Model, nn.Module]:
    model = Model(params)
    return model, DistributedDataParallel(model, process_group=mesh.get_group())


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize("peer", ["fsdp2", "ddp"])
@pytest.mark.parametrize(
    ("world", "schedule", "microbatches"), [(2, "zero3", 1), (3, "zero3-remat-every", 2), (4, "zero2", 1)]
)
def test_the_same_ten_steps(mesh: Any, peer: str, schedule: str, microbatches: int) -> None:
    rank = mesh.get_local_rank()
    state = ya.init(base_params(LAYERS), TX, mesh=mesh)
    step = ya.train_step(ours, TX, schedule=SCHEDULES[schedule], microbatches=microbatches)
    model, wrapped = {"fsdp2": fsdp2, "ddp": ddp}[peer](mesh, whole(plain(base_params(LAYERS))))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(STEPS):
        state, metrics = step(state, batch(rank, number))
        loss = wrapped(batch(rank, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, group=mesh.get_group())
        assert relative(metrics["loss"], mean / mesh.size()) <= 1e-5, (number, metrics["loss"], mean / mesh.size())
    pairs = zip(optree.tree_leaves(ya.unshard(state)), optree.tree_leaves(model.tree()), strict=True)
    off = [float((a - b).abs().max()) for a, b in pairs]
    assert max(off) <= 1e-5, off
