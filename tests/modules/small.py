"""A small model of transformers, rows with a mask for it, and its loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya


def qwen3() -> Any:
    """In float64, without dropout."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.Qwen3Config(**sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.Qwen3ForCausalLM(config).eval().double()


def rows(world: int) -> dict[str, Tensor]:
    """Of all ranks; padded in one row of each, so that there is a mask."""
    tokens = torch.randint(3, 61, (2 * world, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[::2, -2:] = 0
    return {"tokens": tokens, "mask": mask, "targets": tokens.roll(-1, 1).masked_fill(mask == 0, -100)}


def cross_entropy(logits: Tensor, targets: Tensor) -> ya.Mean:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return ya.Mean(total, (targets != -100).sum())
