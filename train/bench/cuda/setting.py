"""What is timed: Llamas of real widths, cut in depth where a whole one does not fit, and batches of random tokens.

On the CPU every width is tiny, so that the same code runs there in seconds; its times mean nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama

LEARNING_RATE = 1e-4
ADAMW: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
TINY: dict[str, Any] = {
    "vocab": 64,
    "embed": 32,
    "ffn": 48,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "max_length": 64,
}
TINY_SEQ = 16

Batch = dict[str, Tensor]
"""tokens and targets, [B, S] each."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a section runs.

    pictures: folder; matmul_flops: FLOP/s that this device was measured to reach, None where nobody has measured
    small: tiny models on any device, for tests; budget: bytes that a section may fill (`fits`), None for no limit
    """

    device: str
    pictures: str = "."
    matmul_flops: float | None = None
    small: bool = False
    budget: int | None = None

    @property
    def tiny(self) -> bool:
        return self.small or self.device == "cpu"

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled: not those of tiny models, where that takes longer than all the rest."""
        return not self.tiny

    @property
    def compute(self) -> torch.dtype:
        """What blocks compute in."""
        return torch.bfloat16

    def config(self, model: str, layers: int | None = None) -> llama.Config:
        """`model` of `llama.CONFIGS` with so many of its layers."""
        config = llama.CONFIGS[model]
        config = dataclasses.replace(config, layers=layers or config.layers)
        return dataclasses.replace(config, **TINY, layers=min(config.layers, 8)) if self.tiny else config

    def seq(self, tokens: int) -> int:
        return TINY_SEQ if self.tiny else tokens

    def precision(self, reduce: torch.dtype = torch.float32) -> ya.Precision:
        """Master and moments in fp32, blocks in bf16."""
        return ya.Precision(compute=self.compute, reduce=reduce)

    def batch(self, config: llama.Config, tokens: int, rows: int = 1) -> Batch:
        """`rows` sequences of `tokens` random tokens."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(config.vocab, (rows, self.seq(tokens) + 1), generator=generator).to(self.device)
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()
