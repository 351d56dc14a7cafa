"""Every family against transformers: logits, generation, gradients, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import models
import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.models.theirs import Pair, draw, their_model

pytest.importorskip("transformers", reason="compares with transformers")
load_file = pytest.importorskip("safetensors.torch", reason="reads and writes safetensors").load_file


def greedy(config: Any, params: Any, prompt: Tensor, count: int) -> Tensor:
    """The `count` tokens after `prompt` [1, S]."""
    family = models.of(config)
    found = []
    tokens = prompt
    cache = family.init_cache(config, 1, prompt.shape[1] + count)
    for _ in range(count):
        position = prompt.shape[1] + len(found) - 1 if found else 0
        tokens = family.decode(config, params, tokens, cache, position)[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1)


# ---- against transformers


def test_numbers_and_generation_are_those_of_transformers(pair: Pair, tokens: Tensor) -> None:
    """Logits of short texts, and of one of all positions; and what decoding goes on with."""
    config, params = pair.ours()
    short = draw(2, 80)
    for given, atol in ((short, 2e-5), (tokens, 1e-4)):
        with torch.no_grad():
            expected = pair.theirs(given).logits
            got = models.of(config).logits(config, params, given)
        assert expected.abs().max() > 1.0
        torch.testing.assert_close(got, expected, atol=atol, rtol=0.0)
    theirs = pair.theirs.generate(short[:1, :9], max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert torch.equal(greedy(config, params, short[:1, :9], 64), theirs[:, 9:])


def test_loss_and_gradients_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    """Of rows accumulated one by one, which is what a router's loss means here."""
    config, params = pair.ours()
    params = optree.tree_map(lambda leaf: leaf.double().requires_grad_(), params)
    tokens = draw(2, 40)
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    targets[0, 3:20] = -100
    mean = models.of(config).loss(config)(params, {"tokens": tokens, "targets": targets})
    (mean.total / mean.weight).backward()
    theirs = their_model(pair.name).double()
    theirs.config._experts_implementation = "eager"  # the grouped one takes no float64
    labels = torch.cat([tokens[:, :1], targets[:, :-1]], 1)  # theirs are shifted inside
    counts = (targets != -100).sum(1)
    total = 0.0
    for row in range(2):
        part = theirs(tokens[row : row + 1], labels=labels[row : row + 1]).loss * counts[row] / counts.sum()
        part.backward()
        total += part.item()
    assert (mean.total / mean.weight).item() == pytest.approx(total, rel=1e-6)
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "theirs")
    models.hf.save(tmp_path / "ours", config, optree.tree_map(lambda leaf: leaf.grad, params))
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():  # their loss is in float32
        atol = 1e-5 * grad.abs().max().item()
        torch.testing.assert_close(found[name], grad, atol=atol, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")


def test_files_go_through_with_their_bits(pair: Pair, tmp_path: Path) -> None:
    import transformers

    config, params = pair.ours()
    models.hf.save(tmp_path, config, params, max_shard_bytes=100_000)
    loaded, lazy = models.hf.load(tmp_path)
    assert loaded == config
    assert type(loaded) is models.of(config).Config
    compare(ya.materialize(lazy), params, 0.0, "files")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert again.config.bos_token_id is again.config.eos_token_id is None, "as in the first file, which has null"
    with torch.no_grad():
        assert torch.equal(again.eval()(draw(1, 60)).logits, pair.theirs(draw(1, 60)).logits)
