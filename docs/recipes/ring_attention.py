"""Ring attention: a sequence longer than one device holds, with exact attention over all of it.

The idea (Liu et al. 2023, arXiv 2310.01889): queries stay, keys and values go around. Each rank of `context` has a
piece of the sequence. In n hops it meets the keys and values of every piece, and adds up numerator and denominator of
the softmax as they come, relative to the largest score so far. Nobody ever has the whole sequence.

Here texts are repeated: the second half, on the last ranks, can be foretold from the first, on others. (Contiguous
pieces leave the first ranks idle under a causal mask; `ya.shard_batch(zigzag=True)` is for that: models/parts has it.)

    torchrun --nproc-per-node 2 docs/recipes/ring_attention.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import V, train, weight
from torch import Tensor

import yafsdp_fn as ya

L, E, H, D, S = 2, 32, 2, 16, 16
AXES, SPLIT = {"context": 2}, {"context": 1}
PARAMS = {
    "embed": ya.Unit({"table": weight(V, E), "places": weight(S, E)}),
    "layers": ya.Stacked({"qkv": weight(L, 3 * H * D, E), "out": weight(L, E, H * D)}),
    "head": ya.Unit({"out": weight(V, E)}),
}


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, s, D] of this rank's s positions -> the same: causal attention over those of all ranks."""
    n, me, s = ya.axis_size("context"), ya.axis_index("context"), q.shape[2]
    ring, at = [(i, (i + 1) % n) for i in range(n)], torch.arange(s, device=q.device)
    for hop in range(n):
        of = (me - hop) % n  # whose keys are here
        later = (of * s + at)[None, :] > (me * s + at)[:, None]
        scores = (q @ k.mT * D**-0.5).masked_fill(later, -torch.inf)
        highest = scores.detach().amax(-1, keepdim=True)
        if hop == 0:  # its own piece: no row is empty
            top, over, under = highest, torch.zeros_like(q), torch.zeros_like(q[..., :1])
        new = torch.maximum(top, highest)
        mine, shrink = (scores - new).exp(), (top - new).exp()
        top, over, under = new, over * shrink + mine @ v, under * shrink + mine.sum(-1, keepdim=True)
        if hop + 1 < n:
            k, v = ya.ppermute((k, v), "context", ring)
    return over / under


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    parts = ya.linear(F.rms_norm(x, (E,)), w["qkv"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in parts)
    return x + ya.linear(ring_attention(q, k, v).transpose(1, 2).flatten(2), w["out"]), None


def embed(w: Any, tokens: Tensor) -> Tensor:
    here = w["places"].chunk(ya.axis_size("context"))[ya.axis_index("context")]
    return ya.embedding(tokens, w["table"]) + here


def loss_fn(params: Any, batch: Any) -> ya.Mean:
    x = ya.apply(embed, params["embed"], batch["tokens"])
    x, _ = ya.scan(block, x, params["layers"])
    total = ya.apply(lambda w, x, to: ya.linear_cross_entropy(x, w["out"], to), params["head"], x, batch["targets"])
    return ya.Mean(total, (batch["targets"] != -100).sum())  # a rank may have none of them


def batch(seed: int, rows: int = 16) -> dict[str, Tensor]:
    half = torch.randint(V, (rows, S // 2), generator=torch.Generator().manual_seed(seed))
    targets = torch.cat([half.new_full((rows, S // 2), -100), half.roll(-1, 1)], 1)
    return {"tokens": torch.cat([half, half], 1), "targets": targets}


def main(steps: int = 60) -> list[float]:
    return train(loss_fn, PARAMS, batch, steps, mesh=ya.mesh(**AXES), split=SPLIT)[1]


if __name__ == "__main__":
    main()
