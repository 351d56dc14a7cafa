"""GPT-2: learned positions, LayerNorm before each sublayer, biases everywhere, multi-head attention, GELU by its tanh
approximation (`gelu_new`), a head tied to the embedding.

Functions: see `models/parts/decoder.py`; files: `models.hf`. Files hold matrices as [in, out]; here they are [out, in],
as all others. There is no dropout: saved files say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.files.config_json import Json
from models.files.format import Form, Format, transposed
from models.parts import decoding
from models.parts.attention import Cache, Positions, attend
from models.parts.axes import NONE, Axes, rows_of
from models.parts.config import FieldError, Shape
from models.parts.decoder import Decoder
from models.parts.layers import residual
from models.parts.tree import Parts, Weights
from yafsdp_fn.params.initializers import ones, zeros

MODEL_TYPE = "gpt2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shape):
    """The shape of a GPT-2. Positions end at `max_length`: longer sequences are refused."""

    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed % self.heads:
            raise FieldError(self, "heads", f"{self.heads} does not divide embed={self.embed}; heads fill the stream")

    @property
    def longest(self) -> int:
        return self.max_length

    @property
    def attended(self) -> int:
        return self.embed

    @property
    def num_parameters(self) -> int:
        E = self.embed
        F_ = self.ffn
        layer = 4 * E * E + 2 * E * F_ + 9 * E + F_  # biases 5 E + F, norms 4 E
        return self.layers * layer + self.head_parameters + self.max_length * E + 2 * E

    @property
    def multiplied(self) -> int:
        looked_up = self.max_length + (0 if self.tied else self.vocab)
        return self.num_parameters - looked_up * self.embed


_published = partial(Config, vocab=50_257, max_length=1024)
CONFIGS: dict[str, Config] = {
    "debug-gpt2": Config(vocab=256, embed=192, ffn=768, layers=8, heads=4, max_length=512),
    "gpt2": _published(embed=768, ffn=3072, layers=12, heads=12),
    "gpt2-medium": _published(embed=1024, ffn=4096, layers=24, heads=16),
    "gpt2-large": _published(embed=1280, ffn=5120, layers=36, heads=20),
    "gpt2-xl": _published(embed=1600, ffn=6400, layers=48, heads=25),
}


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE) -> Parts:
    """The parameters, described once.

    Matrices and positions start normal(0.02), the two matrices that write to the residual stream at 0.02 / sqrt(2 L),
    norms at one, biases at zero.

    pin_norms: the layers' norms, gains and biases, make one unit (`ya.Pinned`)
    axes: with `tensor`, heads, features and vocabulary are split over it; biases that are added to the stream are not
    """
    axes.must_split("tensor")
    V, E, F_, L = config.vocab, config.embed, config.ffn, config.layers

    def norm(*layers: int) -> dict[str, Any]:
        return {"weight": ya.Param((*layers, E), init=ones), "bias": ya.Param((*layers, E), init=zeros)}

    layer: dict[str, Any] = {
        "attn.c_attn.weight": ya.Param((L, 3 * E, E), split=axes.split(-2, blocks=3)),  # queries, keys, values
        "attn.c_attn.bias": ya.Param((L, 3 * E), init=zeros, split=axes.split(-1, blocks=3)),
        "attn.c_proj.weight": ya.Param((L, E, E), init=residual(config), split=axes.split(-1)),
        "attn.c_proj.bias": ya.Param((L, E), init=zeros),
        "mlp.c_fc.weight": ya.Param((L, F_, E), split=axes.split(-2)),
        "mlp.c_fc.bias": ya.Param((L, F_), init=zeros, split=axes.split(-1)),
        "mlp.c_proj.weight": ya.Param((L, E, F_), init=residual(config), split=axes.split(-1)),
        "mlp.c_proj.bias": ya.Param((L, E), init=zeros),
    }
    for name in ("ln_1", "ln_2"):
        layer |= {f"{name}.{key}": ya.Pinned(leaf) if pin_norms else leaf for key, leaf in norm(L).items()}
    head = {f"transformer.ln_f.{key}": leaf for key, leaf in norm().items()}
    if not config.tied:
        head["lm_head.weight"] = ya.Param((V, E), split=axes.split(-2))
    embed = {"wte.weight": ya.Param((V, E), split=axes.split(-2)), "wpe.weight": ya.Param((config.max_length, E))}
    return Parts(embed=embed, layers=ya.Stacked(layer), head=head)


def embed(
    w: Weights, tokens: Int[Tensor, "B S"], positions: Int[Tensor, "*B S"] | None = None, axes: Axes = NONE
) -> Float[Tensor, "B s E"]:
    """Adds the tokens' rows and their positions' rows. positions: default 0 .. S-1"""
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    return rows_of(w["wte.weight"], tokens, axes) + axes.own(ya.embedding(positions, w["wpe.weight"]))


def _norm(config: Config, w: Weights, name: str, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
    return F.layer_norm(x, (config.embed,), w[f"{name}.weight"], w[f"{name}.bias"], config.norm_eps)


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return ya.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _added(w: Weights, name: str, x: Tensor, axes: Axes) -> Tensor:
    """Multiplies by a matrix that writes to the stream. Its bias counts once: behind the sum over `tensor`."""
    return axes.added(ya.linear(x, w[f"{name}.weight"])) + w[f"{name}.bias"] if axes.tensor else _linear(w, name, x)


def _layer(
    config: Config, w: Weights, x: Float[Tensor, "B s E"], at: Positions, cache: Cache | None, axes: Axes = NONE
) -> tuple[Float[Tensor, "B s E"], None]:
    axes.must_have("attention", w["attn.c_proj.weight"].shape[-1], config.attended)
    qkv = _linear(w, "attn.c_attn", axes.every(_norm(config, w, "ln_1", x)))
    width = config.embed // config.heads
    q, k, v = (torch.unflatten(part, -1, (-1, width)) for part in qkv.chunk(3, -1))
    x = x + _added(w, "attn.c_proj", attend(q, k, v, at, cache), axes)
    inner = F.gelu(_linear(w, "mlp.c_fc", axes.every(_norm(config, w, "ln_2", x))), approximate="tanh")
    return x + _added(w, "mlp.c_proj", inner, axes), None


def _last(
    config: Config, weights: Any, x: Float[Tensor, "B s E"], axes: Axes = NONE
) -> tuple[Float[Tensor, "B S E"], Tensor]:
    own, matrix = (weights[0], weights[1]["wte.weight"]) if config.tied else (weights, weights["lm_head.weight"])
    return axes.every(_norm(config, own, "transformer.ln_f", x)), matrix


DECODER = Decoder[Config](
    embed=embed,
    table=lambda config, positions, dtype: Positions(),
    layer=_layer,
    last=_last,
    kv=lambda config: (config.heads, config.embed // config.heads),
    splits=("tensor",),
    embedding="wte.weight",
)
block = DECODER.block
head_loss = DECODER.head_loss
over, loss, logits, score = DECODER.over, DECODER.loss, DECODER.logits, DECODER.score
init_cache = partial(decoding.init_cache, DECODER)
decode = partial(decoding.decode, DECODER)

JSON = Json(
    model_type=MODEL_TYPE,
    architecture="GPT2LMHeadModel",
    expected={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    defaults={
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    fields={
        "vocab": "vocab_size",
        "embed": "n_embd",
        "ffn": "n_inner",
        "layers": "n_layer",
        "heads": "n_head",
        "max_length": "n_positions",
        "tied": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
    },
    theta=None,
)
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _read(values: Mapping[str, Any], file: str) -> Config:
    width = values.get("n_embd")
    inner = 4 * width if values.get("n_inner") is None and type(width) is int else values.get("n_inner")
    return JSON.read(Config, {**values, "n_inner": inner}, file)


def _write(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    return JSON.write(config, dtype) | dict.fromkeys(DROPOUTS, 0.0)


def _forms(config: Config) -> dict[str, Form]:
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return {key: transposed(key) for key in (f"{name}.weight" for name in names)}


def _known_as(name: str) -> str | None:
    """Maps names of the first files, which lacked "transformer." and kept each layer's causal mask."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


FORMAT = Format[Config](
    "GPT-2",
    params,
    _read,
    _write,
    prefix=Parts(embed="transformer.", layers="transformer.h.{layer}.", head=""),
    forms=_forms,
    known_as=_known_as,
    embedding="wte.weight",
    fan_in_fan_out=True,
)
