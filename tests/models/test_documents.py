"""Packed documents, and prompts that are padded to end together: each as alone, in every family."""

from __future__ import annotations

import dataclasses

import optree
import pytest
import torch
from torch import Tensor

import models
import yafsdp_fn as ya
from models import llama
from tests.models.theirs import WINDOW, draw, with_targets

EVERY_FAMILY = pytest.mark.parametrize(
    "name", ["debug", *(f"debug-{kind}" for kind in ("qwen3", "mistral", "gpt2", "mixtral"))]
)


def packed(lengths: list[int]) -> Tensor:
    """[1, sum] numbers of documents of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)) + 3, torch.tensor(lengths))[None]


@EVERY_FAMILY
def test_packed_documents_and_padded_prompts_are_as_alone(name: str) -> None:
    config = dataclasses.replace(models.CONFIGS[name], layers=2)
    if hasattr(config, "window"):
        config = dataclasses.replace(config, window=WINDOW)
    family = models.of(config)
    lengths = [50, 7, 1, 38]
    params = ya.materialize(family.params(config), seed=1)
    params = optree.tree_map(lambda leaf: leaf.double() * 3, params)  # attention that is not uniform
    tokens = draw(1, sum(lengths), most=256)
    alone = [family.logits(config, params, part) for part in tokens.split(lengths, 1)]
    together = family.logits(config, params, tokens, packed(lengths))
    torch.testing.assert_close(together, torch.cat(alone, 1), atol=1e-9, rtol=0.0)
    assert not torch.allclose(together[:, 60:], family.logits(config, params, tokens)[:, 60:], atol=1e-2)

    batch = with_targets(tokens.expand(2, -1)) | {"documents": torch.cat([packed(lengths), packed([40, 56])])}
    losses = [family.loss(config, chunks=chunks)(params, batch).total for chunks in (1, 2)]
    torch.testing.assert_close(*losses, atol=0.0, rtol=1e-12)

    # prompts that end together, each as alone: the whole of it, then a token, then two
    prompts = [part[:, :30] for part in tokens.split([32, 40, 24], 1)]
    lengths = [prompt.shape[1] for prompt in prompts]
    padding = torch.tensor([30 - length for length in lengths])
    rows = torch.cat([torch.nn.functional.pad(p, (30 - p.shape[1], 0)) for p in prompts])
    more = draw(3, 3, seed=5, most=256)
    cache = family.init_cache(config, 3, 40, torch.float64)
    steps = [(rows, 0), (more[:, :1], 30), (more[:, 1:], 31)]
    scores = torch.cat([family.decode(config, params, part, cache, at, padding=padding) for part, at in steps], 1)
    for row, prompt in enumerate(prompts):
        expected = family.logits(config, params, torch.cat([prompt, more[row : row + 1]], 1))
        torch.testing.assert_close(scores[row, int(padding[row]) :], expected[0], atol=1e-9, rtol=0.0)
    assert scores.isfinite().all()


@EVERY_FAMILY
def test_bf16_weights_give_bf16_activations_and_an_fp32_loss(name: str) -> None:
    config = dataclasses.replace(models.CONFIGS[name], layers=2)
    family = models.of(config)
    full = ya.materialize(family.params(config), seed=1)
    half = optree.tree_map(Tensor.bfloat16, full)
    tokens = draw(2, 40, most=256)
    batch = with_targets(tokens) | {"documents": packed([13, 27]).expand(2, -1)}
    exact = family.loss(config, unroll=2)(full, batch)
    rounded = family.loss(config)(half, batch)
    assert rounded.total.dtype == torch.float32
    assert family.logits(config, half, tokens).dtype == torch.bfloat16
    torch.testing.assert_close(rounded.total, exact.total, atol=0.0, rtol=2e-3)


def test_documents_of_another_shape_are_refused() -> None:
    config = dataclasses.replace(models.CONFIGS["debug"], layers=1)
    params = ya.materialize(llama.params(config), seed=1)
    with pytest.raises(ValueError, match=r"documents have the shape \(1, 3\), tokens \(1, 4\)"):
        llama.logits(config, params, draw(1, 4), packed([3]))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("tokens", "targets", "document"), "document: a loss of models reads tokens, targets and documents"),
        (
            ("tokens", "targets", "position_ids", "attention_mask"),
            "attention_mask, position_ids: a loss of models reads",
        ),
        (("tokens", "targets", "places"), "places: a loss of models reads tokens, targets and documents"),
        (("input_ids", "targets"), "the batch has input_ids: a loss of models reads"),
        (("tokens", "documents"), "the batch has no targets: a loss of models reads tokens, targets and documents"),
    ],
)
@pytest.mark.parametrize("name", ["debug", "debug-gpt2", "debug-mixtral"])
def test_keys_of_a_batch_that_a_loss_does_not_read_are_refused(name: str, keys: tuple[str, ...], text: str) -> None:
    config = dataclasses.replace(models.CONFIGS[name], layers=1)
    family = models.of(config)
    with pytest.raises(ValueError, match=text):
        family.loss(config)(ya.materialize(family.params(config)), dict.fromkeys(keys, draw(2, 4, most=256)))


def test_targets_of_another_shape_and_those_that_are_no_tokens_are_refused() -> None:
    config = dataclasses.replace(models.CONFIGS["debug"], layers=1)
    params, tokens = ya.materialize(llama.params(config)), draw(2, 4)
    for work in (llama.loss(config), lambda params, batch: llama.score(config, params, **batch)):
        with pytest.raises(ValueError, match=r"tokens have the shape \(2, 4\), targets \(4, 2\): expected tensors"):
            work(params, {"tokens": tokens, "targets": tokens.T})  # as many, and of other tokens
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        llama.score(config, params, tokens, -tokens.sign())
