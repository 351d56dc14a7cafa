"""Drawing, and the cached continuation against whole-sequence logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from train.config import ConfigError
from train.data.tokenizer import Bytes
from train.sample import Config, continuation, draw

TOKENIZER = Bytes()
MODEL = dataclasses.replace(llama.CONFIGS["debug"], layers=2, embed=32, ffn=48, heads=2, kv_heads=1, head_dim=16)


def encode(text: str) -> torch.Tensor:
    return torch.tensor(TOKENIZER.encode([text])[0].tolist())


def test_drawing_stays_among_the_best_and_follows_the_temperature() -> None:
    scores = torch.tensor([0.0, 3.0, 1.0, 2.9, -5.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(scores, 1.0, 2, generator) for _ in range(200)]
    assert set(drawn) == {1, 3}
    share = drawn.count(1) / len(drawn)
    assert abs(share - torch.softmax(torch.tensor([3.0, 2.9]), 0)[0].item()) < 0.12
    assert {draw(scores, 0.0, 5, generator) for _ in range(5)} == {1}
    assert {draw(scores, 1e-3, 5, generator) for _ in range(20)} == {1}


def test_greedy_continuation_is_the_argmax_of_whole_sequences() -> None:
    params = ya.strip(ya.materialize(llama.params(MODEL), seed=3))
    prompt = encode("def ")
    config = Config(length=12, temperature=0.0)
    added = list(continuation(MODEL, params, prompt, TOKENIZER, config, torch.float32))
    tokens = prompt
    for byte in added:
        best = int(llama.logits(MODEL, params, tokens[None])[0, -1, :256].argmax())
        assert best == byte
        tokens = torch.cat([tokens, torch.tensor([byte])])
    assert len(added) == 12 or int(llama.logits(MODEL, params, tokens[None])[0, -1, :256].argmax()) == TOKENIZER.end


def test_a_seed_repeats_and_another_differs() -> None:
    params = ya.strip(ya.materialize(llama.params(MODEL), seed=3))

    def text(seed: int) -> list[int]:
        config = Config(length=20, temperature=2.0, top_k=256, seed=seed)
        return list(continuation(MODEL, params, encode("x"), TOKENIZER, config, torch.float32))

    assert text(1) == text(1) != text(2)


def test_settings_that_cannot_work_are_named() -> None:
    for make, text in [
        (lambda: Config(prompt=""), "prompt is empty"),
        (lambda: Config(length=0), "length is 0"),
        (lambda: Config(temperature=-1.0), "temperature is -1"),
        (lambda: Config(top_k=0), "top_k is 0"),
    ]:
        with pytest.raises(ConfigError, match=text):
            make()
