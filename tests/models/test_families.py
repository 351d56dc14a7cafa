"""Every family beside Llama against transformers: logits, generation, files; packed documents; ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import models
import yafsdp_fn as ya
from models import gpt2, llama, mistral, mixtral, qwen3
from tests.harness.pool import Pool
from tests.models.theirs import OTHERS, WINDOW, Pair, their_model
from yafsdp_fn.params.tree import named_leaves

pytest.importorskip("transformers", reason="compares with transformers")
load_file = pytest.importorskip("safetensors.torch", reason="reads and writes safetensors").load_file


@pytest.fixture(scope="module", params=list(OTHERS))
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = their_model(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return Pair(request.param, model, directory)


def ours(pair: Pair) -> tuple[Any, Any]:
    config, lazy = models.hf.load(pair.directory)
    return config, ya.materialize(lazy)


def doubled(params: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.double(), params)


def draw(*shape: int, seed: int = 1, most: int = 97) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def greedy(config: Any, params: Any, prompt: Tensor, count: int) -> Tensor:
    """The `count` tokens after `prompt` [1, S]."""
    family, found, tokens = models.of(config), [], prompt
    cache = family.init_cache(config, 1, prompt.shape[1] + count)
    for _ in range(count):
        position = prompt.shape[1] + len(found) - 1 if found else 0
        tokens = family.decode(config, params, tokens, cache, position)[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1)


# ---- against transformers


def test_numbers_and_generation_are_those_of_transformers(other: Pair) -> None:
    config, params = ours(other)
    tokens = draw(2, 80)
    with torch.no_grad():
        expected = other.theirs(tokens).logits
        got = models.of(config).logits(config, params, tokens)
        theirs = other.theirs.generate(tokens[:1, :9], max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0.0)
    assert torch.equal(greedy(config, params, tokens[:1, :9], 64), theirs[:, 9:])


def test_loss_and_gradients_are_those_of_transformers(other: Pair, tmp_path: Path) -> None:
    """Of rows accumulated one by one, which is what a router's loss means here."""
    config, params = ours(other)
    params = optree.tree_map(lambda leaf: leaf.double().requires_grad_(), params)
    tokens = draw(2, 40)
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    targets[0, 3:20] = -100
    mean = models.of(config).loss(config)(params, {"tokens": tokens, "targets": targets})
    (mean.total / mean.weight).backward()
    theirs = their_model(other.name).double()
    theirs.config._experts_implementation = "eager"  # the grouped one takes no float64
    labels = torch.cat([tokens[:, :1], targets[:, :-1]], 1)  # theirs are shifted inside
    counts, total = (targets != -100).sum(1), 0.0
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


def test_files_go_through_with_their_bits(other: Pair, tmp_path: Path) -> None:
    import transformers

    config, params = ours(other)
    models.hf.save(tmp_path, config, params, max_shard_bytes=100_000)
    loaded, lazy = models.hf.load(tmp_path)
    assert loaded == config and type(loaded) is models.of(config).Config
    for (name, a), b in zip(named_leaves(ya.materialize(lazy)), optree.tree_leaves(params), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(again.eval()(draw(1, 60)).logits, other.theirs(draw(1, 60)).logits)


# ---- documents, padding


def packed(lengths: list[int]) -> Tensor:
    """[1, sum] numbers of documents of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)) + 3, torch.tensor(lengths))[None]


@pytest.mark.parametrize("name", ["debug", *(f"debug-{kind}" for kind in ("qwen3", "mistral", "gpt2", "mixtral"))])
def test_packed_documents_and_padded_prompts_are_as_alone(name: str) -> None:
    config = dataclasses.replace(models.CONFIGS[name], layers=2)
    if hasattr(config, "window"):
        config = dataclasses.replace(config, window=WINDOW)
    family, lengths = models.of(config), [50, 7, 1, 38]
    params = ya.materialize(family.params(config), seed=1)
    params = optree.tree_map(lambda leaf: leaf.double() * 3, params)  # attention that is not uniform
    tokens = draw(1, sum(lengths), most=256)
    alone = [family.logits(config, params, part) for part in tokens.split(lengths, 1)]
    together = family.logits(config, params, tokens, packed(lengths))
    torch.testing.assert_close(together, torch.cat(alone, 1), atol=1e-9, rtol=0.0)
    assert not torch.allclose(together[:, 60:], family.logits(config, params, tokens)[:, 60:], atol=1e-2)

    batch = {"tokens": tokens.expand(2, -1), "targets": tokens.roll(-1, 1).expand(2, -1)}
    batch["documents"] = torch.cat([packed(lengths), packed([40, 56])])
    losses = [family.loss(config, chunks=chunks)(params, batch).total for chunks in (1, 2)]
    torch.testing.assert_close(*losses, atol=0.0, rtol=1e-12)

    # prompts that end together, each as alone: the whole of it, then a token, then two
    prompts = [part[:, :30] for part in tokens.split([32, 40, 24], 1)]
    lengths = [prompt.shape[1] for prompt in prompts]
    padding = torch.tensor([30 - length for length in lengths])
    rows = torch.cat([torch.nn.functional.pad(p, (30 - p.shape[1], 0)) for p in prompts])
    more, cache = draw(3, 3, seed=5, most=256), family.init_cache(config, 3, 40, torch.float64)
    steps = [(rows, 0), (more[:, :1], 30), (more[:, 1:], 31)]
    scores = torch.cat([family.decode(config, params, part, cache, at, padding=padding) for part, at in steps], 1)
    for row, prompt in enumerate(prompts):
        expected = family.logits(config, params, torch.cat([prompt, more[row : row + 1]], 1))
        torch.testing.assert_close(scores[row, int(padding[row]) :], expected[0], atol=1e-9, rtol=0.0)
    assert scores.isfinite().all()


def test_documents_of_another_shape_are_refused() -> None:
    config = dataclasses.replace(models.CONFIGS["debug"], layers=1)
    params = ya.materialize(llama.params(config), seed=1)
    with pytest.raises(ValueError, match=r"documents have the shape \(1, 3\), tokens \(1, 4\)"):
        llama.logits(config, params, draw(1, 4), packed([3]))


# ---- ranks

ODD: dict[str, Any] = {"vocab": 61, "embed": 33, "ffn": 41, "layers": 3, "max_length": 64}  # divisible by no rank
HEADS: dict[str, Any] = {**ODD, "heads": 3, "kv_heads": 1, "head_dim": 10}
SMALL: dict[str, Any] = {
    "qwen3": qwen3.Config(**HEADS, tied=True),
    "mistral": mistral.Config(**HEADS, window=9),
    "gpt2": gpt2.Config(**ODD, heads=3),
    "mixtral": mixtral.Config(**HEADS, experts=5, chosen=2, router_loss=True, router_coef=0.3),
}


def compare(mesh: Any, name: str) -> None:
    """One rank's part: gradients, in float64, of its rows and of microbatches of them, against the plain loop's."""
    config = SMALL[name]
    family, rank = models.of(config), mesh.get_rank()
    tokens = draw(4, 24, most=61)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "documents": (draw(4, 24, seed=2) > 90).cumsum(1)}
    batch["targets"][0, 2:20] = -100
    mine = {key: value.chunk(mesh.size())[rank] for key, value in batch.items()}
    double = ya.Precision(param=torch.float64, compute=torch.float64, reduce=torch.float64)
    plain = optree.tree_map(lambda leaf: leaf.double(), ya.materialize(family.params(config), seed=0))
    expected, wanted = ya.value_and_grad(family.loss(config))(plain, batch)
    for pin_norms, microbatches, chunks in ((False, 1, 1), (True, 2, 1), (False, 1, 2)):
        state = ya.init(family.params(config, pin_norms=pin_norms), mesh=mesh, seed=0, precision=double)
        loss, schedule = family.loss(config, chunks=chunks), ya.schedules.zero3()
        step = ya.value_and_grad(loss, schedule=schedule, microbatches=microbatches)
        for _ in range(2):  # on demand, then as a program
            value, grads = step(state.params, mine)
        torch.testing.assert_close(value, expected, atol=0.0, rtol=1e-12)
        whole = optree.tree_leaves(ya.strip(ya.unshard(grads)))
        for got, right in zip(whole, optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(got, right, atol=1e-13, rtol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_on_two_ranks_are_those_of_the_plain_loop(pools: dict[int, Pool], name: str) -> None:
    pools[2].run(compare, name)
