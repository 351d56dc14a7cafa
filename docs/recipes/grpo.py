"""GRPO: reinforcement learning of a language model from a reward of whole answers, without a value model.

The idea (Shao et al. 2024, arXiv 2402.03300): answer each prompt several times. An answer is as good as its reward is
above the mean of its group, in standard deviations: no critic is needed. Tokens of better answers are made likelier, as
far as the probability has not yet left that of the sampling model by more than a factor of 1 +- 0.2.

The module that trains is one of transformers, and so is the generator: a copy whose weights `ya.named_weights` brings
up to date, a layer at a time. Here an answer is rewarded for its even tokens. (No penalty for leaving the first model:
add `ya.vdot`s, or a third log probability, where answers could degenerate.)

    torchrun --nproc-per-node 2 docs/recipes/grpo.py
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny import V, say
from torch import Tensor

import yafsdp_fn as ya

PROMPTS, PROMPT, ANSWER, GROUP, CLIP = 4, 4, 8, 8, 0.2
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-3))
CONFIG = transformers.Qwen3Config(
    vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def made() -> Any:
    torch.manual_seed(0)  # the same weights on every rank
    return transformers.Qwen3ForCausalLM(CONFIG)


def rollout(engine: Any, seed: int) -> Tensor:
    """[PROMPTS * GROUP, PROMPT + ANSWER]: each prompt, answered GROUP times."""
    torch.manual_seed(seed)
    prompts = torch.randint(V, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": ANSWER, "min_new_tokens": ANSWER}
    return engine.generate(prompts, attention_mask=torch.ones_like(prompts), **how)


def advantages(answers: Tensor) -> tuple[Tensor, Tensor]:
    """Of each answer [PROMPTS * GROUP], relative to its group; and the rewards."""
    rewards = (answers % 2 == 0).float().mean(-1).view(-1, GROUP)
    relative = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return relative.flatten(), rewards


def log_probs(model: Any, params: Any, tokens: Tensor) -> Tensor:
    """[N, ANSWER]: of the tokens of each answer."""
    logits = model(params, tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]


def loss_of(model: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        ratio, gain = (log_probs(model, params, batch["tokens"]) - batch["old"]).exp(), batch["advantages"][:, None]
        least = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        return ya.Mean(-least.sum(), least.numel())

    return loss_fn


def main(rounds: int = 12) -> list[float]:
    mesh, engine = ya.mesh(), made()
    params, model = ya.functionalize(made(), layers="model.layers")
    state, step, rewards = ya.shard(params, TX, mesh=mesh), ya.train_step(loss_of(model), TX), []
    for number in range(rounds):
        for name, weight in ya.named_weights(state.params):
            engine.get_parameter(name).data.copy_(weight)
        tokens = rollout(engine, number * mesh.size() + mesh.get_rank())  # of each rank its own
        gain, reward = advantages(tokens[:, PROMPT:])
        with torch.no_grad():
            old = log_probs(model, state.params, tokens)
        for _ in range(2):
            state, _ = step(state, {"tokens": tokens, "old": old, "advantages": gain})
        rewards.append(reward.mean().item())
    say(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {rounds} rounds")
    return rewards


if __name__ == "__main__":
    main()
