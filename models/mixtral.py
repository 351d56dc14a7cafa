"""Mixtral: Mistral with k of X experts in place of each feed-forward network. All experts of a layer are in its unit.

    scores = softmax(x router^T)                                   # [B, S, X], in fp32
    y = sum over the best k experts of (score / their sum) * expert(x)

With experts over `expert` (`Axes`, P ranks), tokens go to the ranks of their experts, and come back:

    all that come       sorted by expert, counts exchanged and read by the host once a layer, parts as long as they are
    `loss(capacity=)`   slots of a fixed number for each expert and row, equal parts, nothing is read by the host

X is the axis of experts. Functions: see `models/parts/decoder.py`.

**The router's loss** (`router_loss=True`, transformers' `output_router_logits`) is a product of two means, so that of a
batch is no mean over its parts. It is therefore computed for each row, over all its positions and layers, as
transformers computes it for a batch of that row, and averaged over rows by their numbers of targets:

    loss = sum over rows of (cross entropies of the row + router_coef * router_loss(row) * targets of the row) / targets

That is what transformers gives when rows are accumulated one by one, and the same for any number of microbatches and
ranks. The z loss is taken alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import yafsdp_fn as ya
from models.files.config_json import Json
from models.files.format import Form, Format
from models.parts import decoding, layers
from models.parts.attention import Cache, Positions
from models.parts.axes import NONE, Axes, counted_before
from models.parts.config import FieldError, boolean, finite, positive_int
from models.parts.rotary import RotaryShape
from models.parts.tree import Batch, Extra, Parts, Weights

MODEL_TYPE = "mixtral"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RotaryShape):
    """The shape of a Mixtral; `ffn` is that of one expert."""

    experts: int = 8
    """Experts of a layer, X."""
    chosen: int = 2
    """Experts of each token, k."""
    window: int | None = None
    """Positions that a query sees, itself included. None: all."""
    router_loss: bool = False
    """Adds the router's loss to the loss."""
    router_coef: float = 0.001
    """Factor of the router's loss."""
    router_z_coef: float = 0.0
    """Factor of the router's z loss, the mean of logsumexp^2 of its logits; 0: there is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("experts", "chosen", *(["window"] if self.window is not None else [])):
            positive_int(self, field)
        if self.chosen > self.experts:
            raise FieldError(self, "chosen", f"{self.chosen} experts for a token, and there are {self.experts}")
        boolean(self, "router_loss")
        for field in ("router_coef", "router_z_coef"):
            if not (finite(value := getattr(self, field)) and value >= 0.0):
                raise FieldError(self, field, f"expected a number of at least 0, got {value!r}")

    def _layer_parameters(self, experts: int) -> int:
        attention = 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)
        return attention + experts * 3 * self.embed * self.ffn + self.experts * self.embed + 2 * self.embed

    @property
    def layer_parameters(self) -> int:
        return self._layer_parameters(self.experts)

    @property
    def multiplied(self) -> int:
        idle = self.layers * (self.layer_parameters - self._layer_parameters(self.chosen))
        return super().multiplied - idle


CONFIGS: dict[str, Config] = {
    "debug-mixtral": Config(
        vocab=256,
        embed=192,
        ffn=192,
        layers=6,
        heads=4,
        kv_heads=2,
        head_dim=48,
        max_length=256,
        experts=4,
        chosen=2,
        router_loss=True,
        router_coef=0.02,
    ),
    "mixtral-8x7b": Config(
        vocab=32_000,
        embed=4096,
        ffn=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        max_length=32_768,
        rope_theta=1_000_000.0,
        router_coef=0.02,
    ),
}

GATE = "block_sparse_moe.gate.weight"
GATE_UP, DOWN = "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE, router: torch.dtype | None = None) -> Parts:
    """The parameters, described once, as those of `models.llama`; an expert's two first matrices are one, [2 F, E].
    pin_norms: all norms of the layers (`ya.Pinned`); axes: with `expert`, experts are split over it, with `tensor` also
    each of them, heads, embedding and head; router: the dtype that routers compute in, such as float32 in a model in
    bfloat16; None, as in transformers: that of all"""
    E, F_, L, X = config.embed, config.ffn, config.layers, config.experts
    experts = {
        GATE: ya.Param((L, X, E), compute=router),
        GATE_UP: ya.Param((L, X, 2 * F_, E), split=axes.of_experts(axes.split(-2, blocks=2))),
        DOWN: ya.Param((L, X, E, F_), init=layers.residual(config), split=axes.of_experts(axes.split(-1))),
    }
    more = {**layers.norm_params(config, pin_norms), **experts}
    return layers.whole(config, {**layers.attention_params(config, axes), **more}, axes)


class Routing(NamedTuple):
    """The routing of a layer for each row: sums over its S positions."""

    counts: Float[Tensor, "B X"]
    """Times that each expert was chosen: S k in all."""
    scores: Float[Tensor, "B X"]
    """Sum of each expert's scores, S in all; differentiable."""
    squares: Float[Tensor, " B"]
    """Sum of logsumexp^2 of the logits; differentiable."""


def experts(
    config: Config, w: Weights, x: Float[Tensor, "B S E"], axes: Axes = NONE, capacity: float | None = None
) -> tuple[Float[Tensor, "B S E"], Routing]:
    """Computes the feed-forward network of a layer, over `tensor` a part of the sum. capacity: see `loss`"""
    axes.must_have("experts", len(w[DOWN]), config.experts, "expert")
    logits = ya.linear(x.to(w[GATE].dtype), w[GATE]).to(torch.promote_types(x.dtype, torch.float32))
    scores = logits.softmax(-1)  # [B, S, X]
    best, chosen = scores.topk(config.chosen, -1)
    best = best / best.sum(-1, keepdim=True)
    picked = F.one_hot(chosen, config.experts).sum(2)  # [B, S, X]
    if capacity is None:
        out = _as_many_as_come(w, x, chosen, picked, axes)
    else:
        out = _at_most(capacity, w, x, chosen, picked, axes)
    routing = Routing(picked.sum(1).to(scores.dtype), scores.sum(1), logits.logsumexp(-1).square().sum(1))
    return (out * best[..., None].to(x.dtype)).sum(2), routing


def _as_many_as_come(
    w: Weights, x: Float[Tensor, "B S E"], chosen: Int[Tensor, "B S k"], picked: Int[Tensor, "B S X"], axes: Axes
) -> Float[Tensor, "B S k E"]:
    """Sends each token to its experts, sorted by expert, so that each multiplies its own only."""
    k = chosen.shape[-1]
    own = len(w[DOWN])
    order = chosen.flatten().argsort(stable=True)  # of the B S k pairs (token, expert), by expert
    sent, found = _sizes(picked.sum((0, 1)), chosen.numel(), own, axes)
    to = [sum(each) for each in sent]
    of = [sum(each) for each in found]
    rows = x.flatten(0, 1)[order // k]
    rows = axes.exchanged(rows, 0, 0, split_sizes=to, concat_sizes=of)
    parts = torch.split(rows, [n for of_rank in found for n in of_rank])  # by rank, and then by expert
    # unbind: indexing would make a gradient of all experts' size for each
    done = [
        torch.split(_expert(_joined(parts[i::own]), gate_up, down), [each[i] for each in found])
        for i, (gate_up, down) in enumerate(zip(w[GATE_UP].unbind(), w[DOWN].unbind(), strict=True))
    ]
    rows = torch.cat([part for of_rank in zip(*done, strict=True) for part in of_rank])
    rows = axes.exchanged(rows, 0, 0, split_sizes=of, concat_sizes=to)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return torch.unflatten(rows[back], 0, chosen.shape)


def _sizes(counts: Int[Tensor, " X"], total: int, own: int, axes: Axes) -> list[list[list[int]]]:
    """Returns how many of `total` rows go to each rank's experts, and how many come from each rank to the `own` ones
    here, [P][X / P] each. The host waits for them, once."""
    X = len(counts)
    ranks = len(counts) // own
    theirs = axes.exchanged(counts, 0, 0)
    if isinstance(counts, FakeTensor):  # without values: spread evenly, as a plan has to suppose
        even = [total // X + (i < total % X) for i in range(X)]
        sent = [even[i : i + own] for i in range(0, X, own)]
        return [sent, [sent[ya.axis_index("expert")]] * ranks]
    both: list[list[list[int]]] = torch.stack([counts, theirs]).view(2, ranks, -1).tolist()
    return both


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _expert(x: Float[Tensor, "N E"], gate_up: Float[Tensor, "F2 E"], down: Float[Tensor, "E F"]) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _at_most(
    capacity: float,
    w: Weights,
    x: Float[Tensor, "B S E"],
    chosen: Int[Tensor, "B S k"],
    picked: Int[Tensor, "B S X"],
    axes: Axes,
) -> Float[Tensor, "B S k E"]:
    """Gives each expert as many slots for each row, [X, B slots, E]: all shapes are known, and the host reads nothing.

    Slots are taken in the order of positions; a token that finds none has zeros of this expert."""
    (B, S, k), X = chosen.shape, picked.shape[-1]
    length = S * (ya.axis_size("context") if axes.context else 1)
    most = min(length, math.ceil(capacity * length * k / X))
    slots = min(S, most)  # of this rank's part of the row: its earlier tokens find slots before its later ones
    here = (counted_before(picked, axes).gather(2, chosen) < most).flatten()
    first = (chosen * B + torch.arange(B, device=x.device)[:, None, None]) * slots
    at = first + (picked.cumsum(1) - picked).gather(2, chosen)
    at = at.flatten().where(here, X * B * slots)  # behind all of them
    rows = x[:, :, None].expand(-1, -1, k, -1).flatten(0, 2)
    taken = x.new_zeros(X * B * slots + 1, x.shape[-1]).index_copy(0, at, rows)[:-1]
    taken = axes.exchanged(torch.unflatten(taken, 0, (X, B * slots)), 0, 1)  # [X / P, P B slots, E]
    gate, up = torch.bmm(taken, w[GATE_UP].mT).chunk(2, -1)
    done = axes.exchanged(torch.bmm(F.silu(gate) * up, w[DOWN].mT), 1, 0)
    out = done.flatten(0, 1)[at.where(here, 0)].where(here[:, None], 0)
    return torch.unflatten(out, 0, chosen.shape)


def _layer(
    config: Config,
    w: Weights,
    x: Float[Tensor, "B s E"],
    at: Positions,
    cache: Cache | None,
    axes: Axes = NONE,
    capacity: float | None = None,
) -> tuple[Float[Tensor, "B s E"], Routing]:
    y = axes.every(layers.norm(config, w["input_layernorm.weight"], x))
    x = x + axes.added(layers.attention(config, w, y, at, cache, axes))
    y = axes.every(layers.norm(config, w["post_attention_layernorm.weight"], x))
    y, routing = experts(config, w, y, axes, capacity)
    return x + axes.added(y), routing


def router_losses(config: Config, routing: Routing) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns the router's losses of each row, of its positions on all ranks. routing: stacked, [L, B, ...]

    - balance: X times the inner product of how often experts were chosen and how they were scored, means over positions
      and layers (Fedus et al., arXiv 2101.03961, equations 4 to 6, as transformers has them). At least `chosen`, if
      both are even
    - z: the mean of logsumexp^2 of the logits (Zoph et al., arXiv 2202.08906, equation 5)
    """
    sums: Tensor = ya.psum(
        torch.cat([routing.counts, routing.scores, routing.squares[..., None]], -1).sum(0), "context"
    )
    counts, scores, squares = torch.split(sums, [config.experts, config.experts, 1], -1)
    positions = scores.detach().sum(-1).round()  # S L
    balance = config.experts * (counts.detach() * scores).sum(-1) / positions**2
    return balance, squares[:, 0] / positions


def _extra(config: Config, routing: Routing, targets: Int[Tensor, "B S"]) -> Extra:
    weights = (targets != -100).sum(1)
    balance, z = ((each * weights).sum() for each in router_losses(config, routing))
    counts = routing.counts.sum(1)  # [L, X]
    aux = {
        "router_loss": ya.Mean(balance, weights.sum()),
        "expert_load": ya.Mean(counts, counts.sum(1, keepdim=True).expand_as(counts) / config.experts),
    }
    added = config.router_coef * balance if config.router_loss else torch.zeros_like(balance)
    if config.router_z_coef:
        aux["router_z_loss"] = ya.Mean(z, weights.sum())
        added = added + config.router_z_coef * z
    return Extra(added, aux)


DECODER = layers.decoder(_layer, window=lambda config: config.window, extra=_extra, splits=("tensor", "expert"))
embed = DECODER.embed
block = DECODER.block
head_loss = DECODER.head_loss
over = DECODER.over
logits = DECODER.logits
score = DECODER.score


def loss(config: Config, *, capacity: float | None = None, **options: Any) -> Callable[[Parts, Batch], Any]:
    """Returns `Decoder.loss`, and has its options.

    capacity: of S tokens of a row, an expert takes at most capacity * S k / X, the first ones; the others go on without
        it. The same at any number of ranks, microbatches and chunks, since a row is a row. Shapes are fixed then: no
        counts are read by the host, and ranks exchange equal parts. None: experts take all that come
    """
    if capacity is None:
        return DECODER.loss(config, **options)
    if not (finite(capacity) and capacity > 0.0) or options.get("layer") is not None:
        raise ValueError(f"capacity={capacity!r}: expected a positive number, and no `layer` of your own beside it")
    return dataclasses.replace(DECODER, layer=partial(_layer, capacity=capacity)).loss(config, **options)


init_cache = partial(decoding.init_cache, DECODER)
decode = partial(decoding.decode, DECODER)

JSON = Json(
    model_type=MODEL_TYPE,
    architecture="MixtralForCausalLM",
    expected={"hidden_act": "silu", "router_jitter_noise": 0.0},
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    further={
        "experts": ("num_local_experts", 8),
        "chosen": ("num_experts_per_tok", 2),
        "router_loss": ("output_router_logits", False),
        "router_coef": ("router_aux_loss_coef", 0.001),
        "router_z_coef": ("router_z_loss_coef", 0.0),
        "window": ("sliding_window", None),
    },
    theta=1_000_000.0,
)


def _forms(config: Config) -> dict[str, Form]:
    """Splits an expert's three matrices, which files hold separately."""
    X = range(config.experts)
    name = "block_sparse_moe.experts.{}.{}.weight"

    def stacked(tensors: list[Tensor]) -> Tensor:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return torch.stack([torch.cat(pair) for pair in pairs])

    first = [name.format(expert, part) for expert in X for part in ("w1", "w3")]
    last = [name.format(expert, "w2") for expert in X]
    return {
        GATE_UP: Form(first, stacked, lambda leaf: [half for expert in leaf.unbind() for half in expert.chunk(2)]),
        DOWN: Form(last, torch.stack, lambda leaf: leaf.unbind()),
    }


FORMAT = Format[Config]("Mixtral", params, partial(JSON.read, Config), JSON.write, forms=_forms, no_linear=(GATE,))
