"""DPO: a language model learns from pairs of answers of which one is preferred, without a reward model.

The idea (Rafailov et al. 2023, arXiv 2305.18290): the best policy under a reward and a penalty for leaving a reference
model gives that reward away: it is beta log(policy / reference). So classify pairs by the difference of these.

The reference is a second state without an optimizer; it scores each batch before the step, which gets a number
a row. Here a sequence that counts on is preferred to one that counts back.

    torchrun --nproc-per-node 2 docs/recipes/dpo.py
"""

from __future__ import annotations

from typing import Any

import torch
from tiny import LLAMA, V, counting, say
from torch import Tensor
from torch.nn.functional import logsigmoid

import yafsdp_fn as ya
from models import llama

BETA, PROMPT = 0.5, 4
TX = ya.optim.adamw(1e-3)
PARAMS = llama.params(LLAMA)


def pairs(seed: int) -> dict[str, Tensor]:
    """chosen, rejected: [B, S], equal in the first PROMPT tokens."""
    chosen = counting(seed)["tokens"]
    rejected = chosen.clone()
    back = torch.arange(1, chosen.shape[1] - PROMPT + 1)
    rejected[:, PROMPT:] = (chosen[:, PROMPT - 1, None] - back) % V
    return {"chosen": chosen, "rejected": rejected}


def margin(params: Any, batch: Any) -> Tensor:
    """[B]: log probability of the chosen answer minus that of the rejected one; a layer is gathered once for both."""
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    logits = llama.logits(LLAMA, params, tokens)[:, PROMPT - 1 : -1]
    of_answer = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).sum((1, 2))
    chosen, rejected = of_answer.chunk(2)
    return chosen - rejected


def loss_fn(params: Any, batch: Any) -> tuple[ya.Mean, ya.Mean]:
    """And, beside the loss, how often the chosen answer has the greater reward."""
    reward = BETA * (margin(params, batch) - batch["reference"])
    return ya.Mean(-logsigmoid(reward).sum(), len(reward)), ya.Mean((reward > 0).float().sum(), len(reward))


def main(steps: int = 20) -> list[float]:
    mesh = ya.mesh()
    state = ya.init(PARAMS, TX, mesh=mesh)  # a model that has learnt to answer: ya.shard(llama.hf.load(folder), ...)
    reference = ya.shard(state)
    step, losses = ya.train_step(loss_fn, TX, has_aux=True), []
    for number in range(steps):
        batch = ya.shard_batch(pairs(number), mesh)
        with torch.no_grad():
            batch["reference"] = margin(reference.params, batch)
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {metrics['aux']:.0%} of pairs in order")
    return losses


if __name__ == "__main__":
    main()
