"""Small models of transformers, with random weights, that ours are held against: five Llamas, and other families."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import torch

import models
import yafsdp_fn as ya
from models import llama

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "gqa": {"num_key_value_heads": 2},
    "mha": {"num_key_value_heads": 4},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "scaled": {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 500_000.0, **SCALING}},
    "head_dim": {"num_key_value_heads": 2, "head_dim": 24},
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model of transformers and the directory it was saved to."""

    name: str
    theirs: Any
    directory: Path

    def ours(self) -> tuple[Any, Any]:
        """The config and the parameters that the directory holds."""
        config, lazy = models.hf.load(self.directory)
        return config, ya.materialize(lazy)


WINDOW = 24
GROUPED = {"num_key_value_heads": 2}
OTHERS = {
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 24}),
    "qwen3-tied": ("Qwen3", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": WINDOW}),
    "gpt2": ("GPT2", {}),
    "mixtral": (
        "Mixtral",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.2},
    ),
}
"""name: (beginning of transformers' class, what is not as in all)"""


def their_model(name: str) -> Any:
    """A Llama of `SHAPES`, or one of `OTHERS`: three layers, 97 tokens, 512 positions."""
    import transformers

    kind, given = OTHERS[name] if name in OTHERS else ("Llama", SHAPES[name])
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=512, eos_token_id=None, bos_token_id=None
        )
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            eos_token_id=None,
            bos_token_id=None,
            **given,
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # far from the initial values: norms that are not one, attention that is not uniform
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


TINY = llama.Config(vocab=61, embed=32, ffn=40, layers=3, heads=4, kv_heads=2, head_dim=8, max_length=64)


def draw(*shape: int, seed: int = 1, most: int = 97) -> torch.Tensor:
    """Tokens below `most`."""
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def with_targets(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch in which the target of each token is the next one."""
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def gains_in_float32(tree: Any) -> Any:
    """The tree of a model of ours whose gains are gathered in float32, whatever the rest is in."""

    def of(path: str, leaf: ya.Param) -> ya.Param:
        if path.endswith("norm.weight"):
            return dataclasses.replace(leaf, compute=torch.float32)
        return leaf

    return optree.tree_map(of, ya.params.leaf_names(tree), tree)
