"""Small Llamas that are timed."""

from __future__ import annotations

import dataclasses

from models.llama.config import Config


@dataclasses.dataclass(frozen=True)
class Shape:
    """One of the timed models: a Llama of `layers` blocks in fp32, with as many key/value heads as query heads.

    The vocabulary is small (256, bytes), so that the blocks, which are what gets sharded layer by layer, make up the
    step, and not a matmul with the head that every contender does alike.
    """

    dim: int
    ffn: int
    heads: int
    seq: int
    batch: int
    """Sequences per rank, unless --batch says otherwise."""
    layers: int = 8
    vocab: int = 256

    def llama(self) -> Config:
        """The shape as a config of `models.llama`."""
        return Config(
            vocab=self.vocab,
            embed=self.dim,
            ffn=self.ffn,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.dim // self.heads,
            max_length=self.seq,
        )


SHAPES = {
    "A": Shape(dim=512, ffn=1408, heads=8, seq=256, batch=2),
    "B": Shape(dim=1024, ffn=2816, heads=16, seq=64, batch=1),
    "C": Shape(dim=128, ffn=344, heads=4, seq=32, batch=1),
    "tiny": Shape(dim=32, ffn=48, heads=2, seq=8, batch=2, layers=3),
}
"""A: a balance of compute and communication. B: heavy on communication. C: tiny layers, so mostly overhead.
tiny: for the tests of this command; its times mean nothing."""
