"""Five small Llamas of transformers, with random weights, that `models.llama` is held against."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
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


def their_model(name: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        **SHAPES[name],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # far from the initial values: norms that are not one, attention that is not uniform
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model
