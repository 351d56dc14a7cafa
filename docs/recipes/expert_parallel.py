"""Expert parallelism: a mixture of experts whose experts live on different ranks.

The idea (Lepikhin et al. 2020, arXiv 2006.16668): weights stay, tokens travel. Each rank sorts its tokens by expert and
sends them to the ranks of their experts; each expert multiplies what came from everywhere; all go back. Two exchanges a
layer, and before them one of how many will come. No token is dropped, so the result is that of one rank.

    torchrun --nproc-per-node 2 docs/recipes/expert_parallel.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import V, counting, language_model, train, weight
from torch import Tensor

import yafsdp_fn as ya

L, E, FF, X = 2, 32, 32, 4  # X: experts
AXES, batch = {"expert": 2}, counting
PARAMS = {
    "embed": ya.Unit({"table": weight(V, E)}),
    "layers": ya.Stacked(
        {
            "mix": weight(L, E, 2 * E),  # of a token and the one before
            "router": weight(L, X, E),
            "up": weight(L, X, FF, E, split={"expert": -3}),
            "down": weight(L, X, E, FF, split={"expert": -3}),
        }
    ),
    "head": ya.Unit({"out": weight(V, E)}),
}


def experts(w: Any, x: Tensor) -> Tensor:
    """[N, E] -> [N, E]: the rows of each token's expert, weighted by its probability (Switch, arXiv 2101.03961)."""
    chance, expert = F.linear(x, w["router"]).softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    counts = expert.bincount(minlength=X)
    came = ya.all_to_all(counts, "expert", 0, 0, tiled=True).view(-1, len(w["up"]))  # [P, X / P], by rank and expert
    to, of = counts.view_as(came).sum(1).tolist(), came.sum(1).tolist()
    rows = ya.all_to_all(x[order], "expert", 0, 0, tiled=True, split_sizes=to, concat_sizes=of)
    numbers = torch.arange(came.shape[1], device=x.device).repeat(len(came))
    again = numbers.repeat_interleave(came.flatten()).argsort(stable=True)  # from by rank to by expert
    parts = zip(rows[again].split(came.sum(0).tolist()), w["up"].unbind(), w["down"].unbind(), strict=True)
    done = torch.cat([F.linear(F.silu(F.linear(part, up)), down) for part, up, down in parts])[again.argsort()]
    back = ya.all_to_all(done, "expert", 0, 0, tiled=True, split_sizes=of, concat_sizes=to)
    return chance[:, None] * back[order.argsort()]


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    x = x + F.linear(torch.cat([x, F.pad(x, (0, 0, 1, -1))], -1), w["mix"])
    return x + experts(w, F.rms_norm(x, (E,)).flatten(0, 1)).view_as(x), None


loss_fn = language_model(block)


def main(steps: int = 60) -> list[float]:
    return train(loss_fn, PARAMS, batch, steps, mesh=ya.mesh(**AXES))[1]


if __name__ == "__main__":
    main()
