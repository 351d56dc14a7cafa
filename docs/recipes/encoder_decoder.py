"""An encoder and a decoder on two pipeline stages: one reads the source, the other writes the target.

The idea (Vaswani et al. 2017, arXiv 1706.03762): the decoder's layers look at one tensor of the encoder. So there is
one place to cut the step in two, and one tensor to send. `consts` of a scan gives it to every layer; `Assignment` says
which units are on which stage; what is sent, when, and how its gradient comes back follows from the loss.

Here the target is the source, backwards.

    torchrun --nproc-per-node 2 docs/recipes/encoder_decoder.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import V, train, weight
from torch import Tensor

import yafsdp_fn as ya

L, E, H, S, FF, AXES = 2, 32, 4, 8, 64, {"stage": 2}


ATTENTION = {"q": weight(L, E, E), "kv": weight(L, 2 * E, E), "out": weight(L, E, E)}
MLP = {"up": weight(L, FF, E), "down": weight(L, E, FF)}
PARAMS = {
    "source": ya.Unit({"table": weight(V, E), "places": weight(S, E)}),
    "encoder": ya.Stacked({"self": ATTENTION, **MLP}),
    "target": ya.Unit({"table": weight(V, E), "places": weight(S, E)}),
    "decoder": ya.Stacked({"self": ATTENTION, "cross": ATTENTION, **MLP}),
    "head": ya.Unit({"out": weight(V, E)}),
}


def embed(w: Any, tokens: Tensor) -> Tensor:
    return ya.embedding(tokens, w["table"]) + w["places"]


def attention(w: Any, x: Tensor, seen: Tensor, causal: bool = False) -> Tensor:
    parts = ya.linear(F.rms_norm(x, (E,)), w["q"]), *ya.linear(F.rms_norm(seen, (E,)), w["kv"]).chunk(2, -1)
    q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return ya.linear(heads.transpose(1, 2).flatten(2), w["out"])


def mlp(w: Any, x: Tensor) -> Tensor:
    return ya.linear(F.silu(ya.linear(F.rms_norm(x, (E,)), w["up"])), w["down"])


def encode(x: Tensor, w: Any) -> tuple[Tensor, None]:
    x = x + attention(w["self"], x, x)
    return x + mlp(w, x), None


def decode(x: Tensor, w: Any, source: Tensor) -> tuple[Tensor, None]:
    x = x + attention(w["self"], x, x, causal=True)
    x = x + attention(w["cross"], x, source)
    return x + mlp(w, x), None


def loss_fn(params: Any, batch: Any) -> ya.Mean:
    source, _ = ya.scan(encode, ya.apply(embed, params["source"], batch["source"]), params["encoder"])
    x = ya.apply(embed, params["target"], batch["before"])
    x, _ = ya.scan(decode, x, params["decoder"], consts=source)
    total = ya.apply(lambda w, x, to: ya.linear_cross_entropy(x, w["out"], to), params["head"], x, batch["targets"])
    return ya.Mean(total, batch["targets"].numel())


def batch(seed: int, rows: int = 16) -> dict[str, Tensor]:
    source = torch.randint(1, V, (rows, S), generator=torch.Generator().manual_seed(seed))
    return {"source": source, "before": F.pad(source.flip(1), (1, -1)), "targets": source.flip(1)}


def stages() -> ya.schedules.Assignment:
    """Units of source and encoder on the first stage, the others on the second."""
    units = ya.planner.trace(loss_fn, PARAMS, batch(0)).units
    of = tuple((0,) if (unit.stack or unit.name) in ("source", "encoder") else (1,) for unit in units)
    return ya.schedules.Assignment(of, homes=(0, 1))


def main(steps: int = 150) -> list[float]:
    how = {"schedule": ya.schedules.one_f_one_b(), "microbatches": 4}
    return train(loss_fn, PARAMS, batch, steps, mesh=ya.mesh(**AXES), stages=stages(), **how)[1]


if __name__ == "__main__":
    main()
