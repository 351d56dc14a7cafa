"""Distillation: a small model learns from all the probabilities of a large one, not from the one right answer.

The idea (Hinton et al. 2015, arXiv 1503.02531): soften both distributions by a temperature T, so that what the teacher
finds second and third likely counts, and multiply by T^2, so that gradients keep their size.

The teacher is a state of its own, of any depth and width, without an optimizer: nothing of it is kept but its shards.
The student never sees the right answers here.

    torchrun --nproc-per-node 2 docs/recipes/distillation.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tiny import LLAMA, counting, say, train
from torch import Tensor
from torch.nn.functional import kl_div

import yafsdp_fn as ya
from models import llama

T = 2.0
STUDENT = dataclasses.replace(LLAMA, layers=1, embed=16)
PARAMS, TEACHER, batch = llama.params(STUDENT), llama.params(LLAMA), counting


def distil(teacher: Any) -> Callable[[Any, Any], ya.Mean]:
    """Returns the loss of a student of `teacher`, parameters of LLAMA."""

    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        with torch.no_grad():
            soft = (llama.logits(LLAMA, teacher, batch["tokens"]) / T).log_softmax(-1)
        own = (llama.logits(STUDENT, params, batch["tokens"]) / T).log_softmax(-1)
        return ya.Mean(T**2 * kl_div(own, soft, reduction="sum", log_target=True), batch["tokens"].numel())

    return loss_fn


def main(steps: int = 60) -> list[float]:
    mesh = ya.mesh()
    trained, _ = train(llama.loss(LLAMA), TEACHER, batch, steps, mesh=mesh)
    teacher = ya.shard(trained)  # its weights alone
    student, losses = train(distil(teacher.params), PARAMS, lambda seed: batch(steps + seed), steps, mesh=mesh)
    own: Tensor = ya.eval_step(llama.loss(STUDENT))(student, ya.shard_batch(batch(0), mesh))["loss"]
    say(f"of the right answers the student has learnt: loss {own.item():.3f}")
    return losses


if __name__ == "__main__":
    main()
