"""Mixtral: Mistral with k of X experts in place of each feed-forward network. All experts of a layer are in its unit.

    scores = softmax(x router^T)                                   # [B, S, X], in fp32
    y = sum over the best k experts of (score / their sum) * expert(x)

Tokens are sorted by expert, so that each expert multiplies its own only; on a GPU the counts are read once per layer,
which waits for queued work. X is the axis of experts. Functions: see `models/parts/decoder.py`.

**The router's loss** (`router_loss=True`, transformers' `output_router_logits`) is a product of two means, so that of a
batch is no mean over its parts. It is therefore computed for each row, over all its positions and layers, as
transformers computes it for a batch of that row, and averaged over rows by their numbers of targets:

    loss = sum over rows of (cross entropies of the row + router_coef * router_loss(row) * targets of the row) / targets

That is what transformers gives when rows are accumulated one by one, and the same for any number of microbatches and
ranks.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

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
from models.parts.axes import NONE, Axes
from models.parts.config import FieldError, boolean, finite, positive_int
from models.parts.rotary import RotaryShape
from models.parts.tree import Extra, Parts, Weights

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

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("experts", "chosen", *(["window"] if self.window is not None else [])):
            positive_int(self, field)
        if self.chosen > self.experts:
            raise FieldError(self, "chosen", f"{self.chosen} experts for a token, and there are {self.experts}")
        boolean(self, "router_loss")
        if not (finite(self.router_coef) and self.router_coef >= 0.0):
            raise FieldError(self, "router_coef", f"expected a number of at least 0, got {self.router_coef!r}")

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


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE) -> Parts:
    """The parameters, described once, as those of `models.llama`; an expert's two first matrices are one, [2 F, E].
    pin_norms: all norms of the layers (`ya.Pinned`)"""
    axes.must_not_split()
    E, F_, L, X = config.embed, config.ffn, config.layers, config.experts
    experts = {
        GATE: ya.Param((L, X, E)),
        GATE_UP: ya.Param((L, X, 2 * F_, E)),
        DOWN: ya.Param((L, X, E, F_), init=layers.residual(config)),
    }
    return layers.whole(config, {**layers.attention_params(config), **layers.norm_params(config, pin_norms), **experts})


class Routing(NamedTuple):
    """The routing of a layer for each row: sums over its S positions."""

    counts: Float[Tensor, "B X"]
    """Times that each expert was chosen: S k in all."""
    scores: Float[Tensor, "B X"]
    """Sum of each expert's scores, S in all; differentiable."""


def grouped_linear(
    x: Float[Tensor, "N I"], weights: Float[Tensor, "X O I"], counts: Int[Tensor, " X"]
) -> Float[Tensor, "N O"]:
    """Multiplies the first counts[0] rows of x by weights[0]^T, the next counts[1] by weights[1]^T, and so on."""
    X = len(weights)
    if isinstance(counts, FakeTensor):  # without values: spread evenly, as a plan has to suppose
        sizes = [len(x) // X + (expert < len(x) % X) for expert in range(X)]
    else:
        sizes = counts.tolist()
    # unbind: indexing would make a gradient of all experts' size for each
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, sizes), weights.unbind(), strict=True)])


def experts(config: Config, w: Weights, x: Float[Tensor, "B S E"]) -> tuple[Float[Tensor, "B S E"], Routing]:
    """Computes the feed-forward network of a layer."""
    B, S, E = x.shape
    k, rows = config.chosen, x.reshape(-1, E)
    scores = ya.linear(rows, w[GATE]).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)  # [BS, X]
    best, chosen = scores.topk(k, -1)
    best = best / best.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)  # of the BS k pairs (token, expert), by expert
    picked = F.one_hot(chosen, config.experts)  # [BS, k, X]
    counts = picked.sum((0, 1))
    of_expert = rows[order // k]
    gate, up = grouped_linear(of_expert, w[GATE_UP], counts).chunk(2, -1)
    out = grouped_linear(F.silu(gate) * up, w[DOWN], counts)
    out = out * best.flatten()[order, None].to(x.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    y = out[back].view(B, S, k, E).sum(2)
    return y, Routing(picked.view(B, -1, config.experts).sum(1).to(scores.dtype), scores.view(B, S, -1).sum(1))


def _layer(
    config: Config, w: Weights, x: Float[Tensor, "B S E"], at: Positions, cache: Cache | None
) -> tuple[Float[Tensor, "B S E"], Routing]:
    normed = layers.norm(config, w["input_layernorm.weight"], x)
    x = x + layers.attention(config, w, normed, at, cache)
    y, routing = experts(config, w, layers.norm(config, w["post_attention_layernorm.weight"], x))
    return x + y, routing


def router_losses(config: Config, routing: Routing) -> Float[Tensor, " B"]:
    """Returns the router's loss of each row: X times the inner product of how often experts were chosen and how they
    were scored, means over positions and layers (Fedus et al., arXiv 2101.03961, equations 4 to 6, as transformers has
    them). routing: stacked, [L, B, X]. At least `chosen`, if both are even."""
    # of all positions, also if ranks of context have some each
    counts: Tensor
    scores: Tensor
    counts, scores = ya.psum((routing.counts.sum(0), routing.scores.sum(0)), "context")
    positions = scores.detach().sum(-1, keepdim=True).round()  # S L
    return config.experts * ((counts / positions) * (scores / positions)).sum(-1)


def _extra(config: Config, routing: Routing, targets: Int[Tensor, "B S"]) -> Extra:
    weights = (targets != -100).sum(1)
    losses = router_losses(config, routing)
    total = (losses * weights).sum()
    counts = routing.counts.sum(1)  # [L, X]
    aux = {
        "router_loss": ya.Mean(total, weights.sum()),
        "expert_load": ya.Mean(counts, counts.sum(1, keepdim=True).expand_as(counts) / config.experts),
    }
    return Extra(config.router_coef * total if config.router_loss else torch.zeros_like(total), aux)


DECODER = layers.decoder(_layer, window=lambda config: config.window, extra=_extra)
embed, block, head_loss = DECODER.embed, DECODER.block, DECODER.head_loss
over, loss, logits, score = DECODER.over, DECODER.loss, DECODER.logits, DECODER.score
init_cache, decode = partial(decoding.init_cache, DECODER), partial(decoding.decode, DECODER)

JSON = Json(
    model_type=MODEL_TYPE,
    architecture="MixtralForCausalLM",
    expected={"hidden_act": "silu", "router_jitter_noise": 0.0},
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
    },
    further={
        "experts": ("num_local_experts", 8),
        "chosen": ("num_experts_per_tok", 2),
        "router_loss": ("output_router_logits", False),
        "router_coef": ("router_aux_loss_coef", 0.001),
        "window": ("sliding_window", None),
    },
    theta=1_000_000.0,
)


def _forms(config: Config) -> dict[str, Form]:
    """Splits an expert's three matrices, which files hold separately."""
    X, name = range(config.experts), "block_sparse_moe.experts.{}.{}.weight"

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
