"""`python -m train bench axes`: a step with axes inside blocks against torch's own, in turn, on four ranks.

    tensor       ours, shard 2 x tensor 2                    torch-tensor     DTensor's plan of torchtitan, and FSDP2
    sequence     the same, with sequence parallelism         torch-sequence   the same, with SequenceParallel
    context      ours, shard 2 x context 2                   torch-context    torch's ring attention, and FSDP2 over all

All train one Llama on the same tokens with AdamW: `tensor` and `sequence` the config's, `context` one long sequence for
two ranks. Each of ours is followed by the peer that it is compared with. torch's context parallelism has handlers for
CUDA's kernels alone; here its ring calls the fused kernel of the CPU, and without the dispatch of DTensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import yafsdp_fn as ya
from models.llama import model as llama
from models.llama.config import Config
from models.parts.rotary import turn
from train.bench import harness, names
from train.bench.contenders import Batch, Ours, Part, Stepper, adamw, make_batches, materialize, peer_optimizer
from train.bench.options import SHAPES, ConfigName, Timed
from train.bench.report import Rows, apart, check_losses, mib, ratios, spread, table
from yafsdp_fn.params.tree import named_leaves

GOAL = 1.0
"""Goal of a step, and of its memory, over the peer's."""
RANKS = 4


class Way(NamedTuple):
    """One of ours. axis: that has two ranks; axes: of the model"""

    axis: str
    axes: llama.Axes


WAYS = {
    "tensor": Way("tensor", llama.Axes(tensor=True)),
    "sequence": Way("tensor", llama.Axes(tensor=True, sequence=True)),
    "context": Way("context", llama.Axes(context=True)),
}


@dataclasses.dataclass(frozen=True)
class AxesInside(Timed):
    """Time steps with tensor, sequence and context parallelism, ours and torch's, interleaved, with their memory."""

    config: ConfigName = "A"
    """The model, as in `python -m train bench`."""
    schedule: str = "zero3"
    """Ours, as in `python -m train bench --schedules`."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Ways that are compared: tensor, sequence, context."""
    context_length: int = 2048
    """Tokens of a sequence in `context`, of which a rank has half."""
    steps: int = 10
    """Timed rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ways or not set(self.ways) <= set(WAYS):
            raise ValueError(f"--ways {' '.join(self.ways)}: expected some of {', '.join(WAYS)}")
        if self.context_length < 4 or self.context_length % 4:
            raise ValueError(
                f"--context-length {self.context_length}: expected a multiple of 4, two parts for each rank"
            )
        names.check(self.schedule, ranks=2, layers=SHAPES[self.config].layers)


# ---- torch's own: modules of `nn.Linear`, with the names of the weights in `models.llama`.


class Attention(nn.Module):
    """Self-attention of the heads that its matrices have here. ring: the group over which sequences are dealt"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        Q, KV = config.heads * config.head_dim, config.kv_heads * config.head_dim
        for name, sizes in {"q": (config.embed, Q), "k": (config.embed, KV), "v": (config.embed, KV)}.items():
            self.add_module(f"{name}_proj", nn.Linear(*sizes, bias=False))
        self.o_proj = nn.Linear(Q, config.embed, bias=False)
        self.head_dim, self.ring = config.head_dim, None

    def forward(self, x: Tensor, at: Any) -> Tensor:
        q, k, v = (getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k, v = (each.transpose(1, 2) for each in (turn(q, at), turn(k, at), v))
        if self.ring is not None:
            x = Ring.apply(q, k, v, self.ring)
        else:
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(x.transpose(1, 2).flatten(2))
        return out


class Ring(torch.autograd.Function):
    """torch's ring attention with the CPU's fused kernel: q, k, v [B, H, S, D] of the rank, zigzag."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = torch_ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums = ctx.saved_tensors

        def kernel(**given: Any) -> Any:
            order = ("grad_out", "query", "key", "value", "out", "logsumexp")
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return backward(*(given[name] for name in order), 0.0, given["is_causal"])

        ring: Any = torch_ring._templated_ring_attention_backward
        grads = ring(ctx.group, 2, kernel, grad, "grad_out", q, k, v, out, sums, True)
        return *grads[:3], None


class Layer(nn.Module):
    """A layer of Llama."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(config.embed, eps=config.norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(config), nn.Module()
        for name, sizes in {"gate": (0, 1), "up": (0, 1), "down": (1, 0)}.items():
            ends = config.embed, config.ffn
            self.mlp.add_module(f"{name}_proj", nn.Linear(ends[sizes[0]], ends[sizes[1]], bias=False))
        self.mlp.forward = self.feed_forward

    def feed_forward(self, x: Tensor) -> Tensor:
        mlp: Any = self.mlp
        out: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return out

    def forward(self, x: Tensor, at: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), at)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Llama of modules, with the weights of a plain tree."""

    def __init__(self, config: Config, params: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.embed)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        self.embed.load_state_dict({"weight": params.embed["weight"]})
        self.norm.load_state_dict({"weight": params.head["model.norm.weight"]})
        self.head.load_state_dict({"weight": params.head["lm_head.weight"]})
        for number, layer in enumerate(self.layers):
            layer.load_state_dict({name: leaf[number] for name, leaf in named_leaves(params.layers)})

    def forward(self, tokens: Tensor, at: Any) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, at)
        out: Tensor = self.head(self.norm(x))
        return out


def tensor_parallel(module: Decoder, mesh: Any, *, sequence: bool) -> None:
    """Splits it as torchtitan does. sequence: positions between sublayers, too"""
    between = Shard(1) if sequence else Replicate()
    given: Any = {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    for name, rest in {"self_attn": (None,), "mlp": ()}.items():  # attention is given the table of positions, too
        given[name] = PrepareModuleInput(
            input_layouts=(between, *rest),
            desired_input_layouts=(Replicate(), *rest),
        )
    out: Any = RowwiseParallel(output_layouts=between)
    plan: Any = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), ColwiseParallel())
    plan |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    plan |= {"self_attn.o_proj": out, "mlp.down_proj": out, **(given if sequence else {})}
    for layer in module.layers:
        parallelize_module(layer, mesh, plan)
    ends: Any = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, ends | ({"norm": SequenceParallel()} if sequence else {}))


class Torch:
    """A step of torch's own."""

    def __init__(self, way: str, config: Config, params: Any, device: torch.device) -> None:
        self._way, self._config = way, config
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("shard", WAYS[way].axis))
        self._module, self._inside = Decoder(config, params).to(device), mesh[WAYS[way].axis]
        over = mesh["shard"]
        if way == "context":
            over = mesh._flatten("all")
            for layer in self._module.layers:
                layer.get_submodule("self_attn").ring = self._inside.get_group()  # type: ignore[assignment]
        else:
            tensor_parallel(self._module, self._inside, sequence=way == "sequence")
        for each in (*self._module.layers, self._module):
            fully_shard(each, mesh=over)
        self._optimizer = peer_optimizer(self._module.parameters())

    def step(self, batch: Batch) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        tokens, targets = batch["tokens"], batch["targets"]
        at = llama.rotary(self._config, torch.arange(tokens.shape[1], device=tokens.device), torch.float32)
        if self._way == "context":
            assert at.cos is not None and at.sin is not None
            buffers = [tokens.clone(), targets.clone(), at.cos.clone(), at.sin.clone()]
            with context_parallel(self._inside, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0]):
                tokens, targets, cos, sin = buffers
                loss = self._loss(tokens, targets, at._replace(cos=cos, sin=sin))
        else:
            with loss_parallel():
                loss = self._loss(tokens, targets, at)
        self._optimizer.step()
        return loss

    def _loss(self, tokens: Tensor, targets: Tensor, at: Any) -> float:
        scores = self._module(tokens, at)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return loss.item()

    def program(self) -> None:
        return None


@dataclasses.dataclass
class Dealt:
    """A contender that takes its part of a batch as a model over axes has it dealt."""

    of: Stepper
    mesh: Any
    axes: llama.Axes

    def step(self, batch: Batch) -> float:
        return self.of.step(self.axes.shard_batch(batch, self.mesh))

    def program(self) -> None:
        return None


def build(name: str, task: harness.Task, device: torch.device) -> Dealt | Part:
    """One contender; all begin with the same weights."""
    config, way = task.shape.llama(), WAYS[name.removeprefix(names.PEER)]
    if name.startswith(names.PEER):
        whole = materialize(config, seed=task.seed, device=device)
        return Part(Torch(name.removeprefix(names.PEER), config, whole, device), dist.get_rank() // 2, 2)
    sizes: Any = {way.axis: 2}
    tx, mesh = adamw(), ya.mesh(device=device.type, shard=2, **sizes)
    state = ya.init(llama.params(config, axes=way.axes), tx, mesh=mesh, seed=task.seed)
    made: Any = names.make(task.schedule, config.layers)
    step = ya.train_step(llama.loss(config, axes=way.axes), tx, schedule=made, skip_nonfinite=False)
    return Dealt(Ours(state, step), mesh, way.axes)


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """All ranks have one batch, of which contenders take their part."""
    shape = dataclasses.replace(task.shape, batch=2 * task.shape.batch)
    batches = make_batches(shape, harness.BATCHES, seed=task.seed, rank=0, device=device)
    return harness.compared(task, build, batches, device)


def measure(options: AxesInside, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed and LossesDiffer."""
    found: dict[str, Any] = {}
    for way in options.ways:
        them, shape = (way, f"{names.PEER}{way}"), SHAPES[options.config]
        if way == "context":
            shape = dataclasses.replace(shape, seq=options.context_length, batch=1)
        with console.status(f"timing {' and '.join(them)} in turn on {RANKS} ranks"):
            each = harness.run(
                "train.bench.axes:rank", them, ranks=RANKS, shape=shape, schedule=options.schedule, **options.turns
            )
        check_losses(each["losses"])
        for name in them:
            found[name] = {
                "tokens": [shape.batch, shape.seq],
                "step_ms": spread([1e3 * s for s in each["seconds"][name]]),
                "cpu_ms": spread([1e3 * s for s in each["cpu_seconds"][name]]),
                "peak_bytes": each["bytes"][name]["peak_bytes"],
            }
        found[way] |= {
            "over_peer": ratios(*(each["seconds"][name] for name in them)),
            "peak_over_peer": found[way]["peak_bytes"] / found[them[1]]["peak_bytes"],
        }
    return {"ways": found}


def show(options: AxesInside, found: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"config {options.config}, fp32, AdamW, {RANKS} ranks: shard 2 x 2; ours: {options.schedule}; {options.steps} "
        "interleaved steps, medians. Ratios: over the line below. Tokens: of two ranks. Memory: the most live tensors "
        "of a rank"
    )
    rows: Rows = {}
    for name, each in found["ways"].items():
        over, memory = each.get("over_peer"), each.get("peak_over_peer")
        rows[name] = {
            "tokens": " x ".join(map(str, each["tokens"])),
            "step ms": f"{each['step_ms']['median']:.1f}",
            "ratio": f"{over['median']:.3f}{' MISSED' if over['median'] > GOAL else ''}" if over else "",
            "p10 - p90": apart(over) if over else "",
            "CPU ms": f"{each['cpu_ms']['median']:.1f}",
            "memory MiB": mib(each["peak_bytes"]),
            "ratio ": f"{memory:.3f}{' MISSED' if memory > GOAL else ''}" if memory else "",
        }
    yield table("per step and rank", rows)
