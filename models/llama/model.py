"""Llama as plain functions of a tree of weights: the same code runs on full tensors and on a sharded state.

- grouped-query attention (K = H: multi-head), `head_dim` free of E / H
- rotary positions by halves, with Llama 3.1's scaling
- RMSNorm before each sublayer, SwiGLU, no biases, tied or untied head
- cross entropy in fp32; targets of -100 do not count
- decoding with a key/value cache that is written in place

Its sublayers are `models/parts/layers.py`, and what every decoder does with them is `models/parts/decoder.py`.
"""

from __future__ import annotations

from functools import partial

from models.llama.config import Config
from models.parts import decoding, layers
from models.parts.attention import Cache, Positions
from models.parts.axes import NONE, Axes
from models.parts.rotary import rotary
from models.parts.tree import Parts, Weights

__all__ = ["Axes", "Cache", "Positions", "Weights", "rotary"]

Llama = Parts


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE) -> Llama:
    """Describes the parameters once: `ya.init`, `ya.materialize` and `hf` derive everything from this tree.

    Matrices start normal(0.02), the two that write to the residual stream at 0.02 / sqrt(2 L), so that the stream's
    variance does not grow with depth; norms start at one. With a tied head there is no `lm_head.weight`.

    pin_norms: the norm gains of all layers are one unit that is gathered once per step (`ya.Pinned`)
    axes: with `tensor`, matrices, embedding and head are split over it
    """
    return layers.dense(config, pin_norms, axes)


DECODER = layers.decoder()

embed = layers.embed
block = DECODER.block
cached_block = partial(decoding.cached_block, DECODER)
head = DECODER.head
head_unit = DECODER.head_unit
head_loss = DECODER.head_loss
over, loss, logits, score = DECODER.over, DECODER.loss, DECODER.logits, DECODER.score
init_cache = partial(decoding.init_cache, DECODER)
decode = partial(decoding.decode, DECODER)
