"""Fully sharded training in one file of plain torch: what yafsdp_fn generalises. docs/from_scratch.md explains it.

    torchrun --nproc-per-node 2 docs/examples/from_scratch.py

Every rank keeps 1/R of each unit: the embedding, the head, or one of the layers. Layers share two slots, in turn:

    gather stream    embed   layer 0   layer 1   layer 2   ...
    compute                  embed     layer 0   layer 1   ...

and backward in reverse, where a layer's gradient is reduced while the layer before it computes:

    gather stream    ...   layer 1   layer 0   embed
    compute          ...   layer 2   layer 1   layer 0   embed
    reduce stream    ...             layer 2   layer 1   layer 0   embed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Wait = Callable[[], Any]

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name has changed in torch 2.13


# ---- A stream runs its jobs one after the other, beside the caller: a CUDA stream on a GPU, else a thread.


class Stream:
    """A queue of collectives with a process group of its own, so that the order of another stream does not matter."""

    def __init__(self, device: torch.device) -> None:
        self.group = dist.new_group()
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)

    def run(self, job: Callable[[], None]) -> Wait:
        """Starts `job` after all that the caller has computed; returns a function that waits for its end."""
        if self.cuda is None:  # the caller computes at once: it has read and written what comes before this call
            return self.thread.submit(job).result
        self.cuda.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.cuda):
            job()
        done = self.cuda.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


# ---- Units and slots: what a rank keeps, and where weights are whole for a while.


class Slot:
    """A buffer of whole weights and one of whole gradients, in which units follow each other."""

    def __init__(self) -> None:
        self.weights = self.grads = torch.empty(0)
        self.holds: Unit | None = None
        self.gathered: Wait = lambda: None
        self.reduced: Wait = lambda: None

    def make_room(self, numel: int, device: torch.device) -> None:
        if numel > self.weights.numel():
            self.weights, self.grads = torch.zeros(2, numel, device=device)


class Unit:
    """Parameters that travel as one flat vector, of which each rank owns an equal slice: its shard."""

    def __init__(self, params: Weights, slot: Slot, device: torch.device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.shapes = {name: params[name].shape for name in sorted(params)}
        leaves = [params[name].flatten() for name in sorted(params)]
        flat = torch.cat([_padded(leaf, 8) for leaf in leaves])  # each leaf begins at a multiple of 32 bytes
        flat = _padded(flat, 8 * ranks)
        self.numel, self.slot = flat.numel(), slot
        self.shard = flat.view(ranks, -1)[rank].to(device, copy=True)
        self.grad = torch.zeros_like(self.shard)
        self.anchor = torch.empty(0, requires_grad=True)  # makes autograd come back to a unit whose inputs are integers
        slot.make_room(self.numel, device)

    def views(self, flat: Tensor) -> Weights:
        """Returns the leaves in a flat vector, without a copy."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            found[name] = flat[start : start + shape.numel()].view(shape)
            start += shape.numel() + -shape.numel() % 8
        return found


def _padded(flat: Tensor, multiple: int) -> Tensor:
    return F.pad(flat, (0, -flat.numel() % multiple))


# ---- The sharded model: gathers ahead, reduces behind, updates shards.


class Model:
    """Units in the order in which the loss uses them, and the two streams that move them."""

    def __init__(self, params: dict[str, list[Weights]], device: torch.device) -> None:
        """params: the layers of each stack; what is no stack is one layer."""
        self.gathers, self.reduces = Stream(device), Stream(device)
        self.stacks: dict[str, list[Unit]] = {}
        for name, layers in params.items():
            slots = Slot(), Slot()
            self.stacks[name] = [Unit(layer, slots[number % 2], device) for number, layer in enumerate(layers)]
        self.units = [unit for stack in self.stacks.values() for unit in stack]

    def gather(self, unit: Unit) -> None:
        """Begins to gather a unit into its slot, unless it is there."""
        slot = unit.slot
        if slot.holds is not unit:
            whole = slot.weights[: unit.numel]
            slot.holds = unit
            slot.gathered = self.gathers.run(lambda: all_gather(whole, unit.shard, group=self.gathers.group))

    def whole(self, unit: Unit, ahead: int) -> Weights:
        """Waits until a unit's weights are whole, while the next one's (`ahead`: 1 or -1) are already under way."""
        self.gather(unit)
        following = self.units.index(unit) + ahead
        if 0 <= following < len(self.units):
            self.gather(self.units[following])
        unit.slot.gathered()
        # `.data` has a version counter of its own: autograd does not notice that the slot is used by another layer
        # before the backward, and by then the same weights are in the same place again
        return {name: view.requires_grad_() for name, view in unit.views(unit.slot.weights.data).items()}

    def reduce(self, unit: Unit, grads: Sequence[Tensor]) -> None:
        """Begins to sum a unit's gradient over ranks, each of which receives its shard of the sum."""
        slot = unit.slot
        slot.reduced()  # the gradient that was here has left
        for view, grad in zip(unit.views(slot.grads).values(), grads, strict=True):
            view.copy_(grad)
        whole = slot.grads[: unit.numel]
        slot.reduced = self.reduces.run(lambda: reduce_scatter(unit.grad, whole, self.reduces.group))

    def finish(self) -> None:
        """Waits for all gradients, and forgets what the slots hold: the update that follows changes the weights."""
        for slot in {unit.slot for unit in self.units}:
            slot.reduced()
            slot.holds = None


def reduce_scatter(shard: Tensor, whole: Tensor, group: Any) -> None:
    """Writes this rank's slice of the sum of `whole` over ranks, added in rank order: the same bits in each run."""
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=group)
    first, *others = parts.view(-1, shard.numel())
    shard.copy_(first)
    for part in others:
        shard.add_(part)


# ---- Visits: where the user's functions meet whole weights. Autograd calls `backward` in reverse order.


class Visit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, model: Model, unit: Unit, f: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        weights = model.whole(unit, ahead=1)
        own = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            out = f(weights, *own)
        ctx.kept = model, unit, weights, own, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        model, unit, weights, own, out = ctx.kept
        model.whole(unit, ahead=-1)  # where the graph of `out` saw them
        out.backward(grad)
        model.reduce(unit, [weight.grad for weight in weights.values()])
        return None, None, None, None, *[x.grad for x in own]


def apply(f: Callable[..., Tensor], model: Model, name: str, *inputs: Tensor) -> Tensor:
    """Computes `f(weights, *inputs)` on the whole weights of a unit."""
    (unit,) = model.stacks[name]
    return Visit.apply(unit.anchor, model, unit, f, *inputs)


def scan(block: Callable[[Tensor, Weights], Tensor], x: Tensor, model: Model, name: str) -> Tensor:
    """Computes `x = block(x, weights)` for each layer of a stack."""
    for unit in model.stacks[name]:
        x = Visit.apply(unit.anchor, model, unit, lambda weights, x: block(x, weights), x)
    return x


# ---- A training step: the loss is a mean over all ranks' tokens, and the optimizer sees shards alone.


Loss = Callable[[Model, dict[str, Tensor]], tuple[Tensor, int]]


def train_step(model: Model, loss: Loss, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """Takes a step on this rank's part of a batch, and returns the mean loss over all parts."""
    total, count = loss(model, batch)
    total.backward()
    sums = torch.stack([total.detach().double(), torch.tensor(count, device=total.device).double()])
    dist.all_reduce(sums)
    model.finish()
    for unit in model.units:
        unit.shard.grad = unit.grad.div_(sums[1].float())
    optimizer.step()
    return (sums[0] / sums[1]).float()


def adamw(model: Model, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW is elementwise: it needs no more than shards, and its moments are shards too."""
    return torch.optim.AdamW([unit.shard for unit in model.units], lr=lr, weight_decay=weight_decay, fused=True)


# ---- The model of the example: three functions of whole weights.

V, E, H, L = 256, 64, 256, 6


def params() -> dict[str, list[Weights]]:
    draw = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

    return {
        "embed": [{"table": matrix(V, E)}],
        "layers": [{"up": matrix(H, E), "down": matrix(E, H)} for _ in range(L)],
        "head": [{"out": matrix(V, E)}],
    }


def embed(w: Weights, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, w["table"])


def block(x: Tensor, w: Weights) -> Tensor:
    return x + F.linear(F.relu(F.linear(x, w["up"])), w["down"])


def head(w: Weights, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w["out"]).flatten(0, 1), targets.flatten(), reduction="sum")


def loss(model: Model, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    x = apply(embed, model, "embed", batch["tokens"])
    x = scan(block, x, model, "layers")
    return apply(head, model, "head", x, batch["targets"]), batch["targets"].numel()


def rows(step: int, device: torch.device) -> dict[str, Tensor]:
    """Returns this rank's rows of a batch that is the same for any number of ranks."""
    text = torch.randint(V, (8, 33), generator=torch.Generator().manual_seed(step % 2))
    mine = text.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    model = Model(params(), device)
    optimizer = adamw(model, lr=3e-3, weight_decay=1e-4)
    for step in range(10):
        mean = train_step(model, loss, optimizer, rows(step, device))
        if dist.get_rank() == 0:
            print(f"step {step}: {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
