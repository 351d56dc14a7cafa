"""Gated linear attention: a recurrent network that is trained as fast as attention, in chunks.

The idea (Yang et al. 2023, arXiv 2312.06635): the state is a matrix that forgets a little, by a gate of the input, and
remembers a key and its value. In a chunk all this is products of matrices; a recurrence is left between chunks only:

    state_t = decay_t[:, None] * state_t-1 + k_t v_t^T            out_t = state_t^T q_t

A scan over plain tensors inside of a block is this recurrence: the same `ya.scan` that goes over layers outside of it.

    torchrun --nproc-per-node 2 docs/recipes/gated_linear_attention.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import V, counting, language_model, train, weight
from torch import Tensor

import yafsdp_fn as ya

L, E, H, D, CHUNK = 2, 32, 2, 16, 4
AXES, batch = {}, counting
PARAMS = {
    "embed": ya.Unit({"table": weight(V, E)}),
    "layers": ya.Stacked({"qkvg": weight(L, 4 * H * D, E), "out": weight(L, E, H * D)}),
    "head": ya.Unit({"out": weight(V, E)}),
}


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """[B, H, S, D] of each -> [B, H, S, D], a position at a time: what `chunked` computes."""
    state, out = q.new_zeros(*q.shape[:2], D, D), []
    for t in range(q.shape[2]):
        state = log_decay[:, :, t, :, None].exp() * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(out, 2)


def chunk(state: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """One chunk. x: q, k, v and log_decay [B, H, C, D]; state: [B, H, D, D], before it and after it"""
    q, k, v, log_decay = x
    since = log_decay.cumsum(2)  # what is left, at each position, of the state before the chunk
    earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()[..., None]
    left = (since[:, :, :, None] - since[:, :, None]).where(earlier, -torch.inf).exp()  # [B, H, C, C, D], of j at i
    scores = torch.einsum("bhid,bhijd,bhjd->bhij", q, left, k)
    out = scores @ v + (q * since.exp()) @ state
    end = since[:, :, -1:]
    return end.exp().mT * state + (k * (end - since).exp()).mT @ v, out


def chunked(*qkvg: Tensor) -> Tensor:
    """[B, H, S, D] of each of q, k, v and log_decay -> [B, H, S, D]"""
    parts = tuple(torch.stack(each.split(CHUNK, 2)) for each in qkvg)  # [S / C, B, H, C, D]
    first = torch.zeros_like(qkvg[0][:, :, :1].mT @ qkvg[0][:, :, :1])
    _, out = ya.scan(chunk, first, parts)
    return torch.cat(out.unbind(), 2)


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    parts = ya.linear(F.rms_norm(x, (E,)), w["qkvg"]).chunk(4, -1)
    q, k, v, gate = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in parts)
    out = chunked(q * D**-0.5, k, v, F.logsigmoid(gate + 3))
    return x + ya.linear(F.rms_norm(out, (D,)).transpose(1, 2).flatten(2), w["out"]), None


loss_fn = language_model(block)


def main(steps: int = 60) -> list[float]:
    return train(loss_fn, PARAMS, batch, steps)[1]


if __name__ == "__main__":
    main()
