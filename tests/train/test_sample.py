"""Drawing; the cached continuation against whole-sequence logits; texts beside others; directories; ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pools
from tests.models.theirs import their_model
from tests.train.inside import said
from train.config import ConfigError, Lora
from train.data.tokenizer import Bytes
from train.sample import Config
from train.trained import loaded
from train.trained.generate import Drawing, draw, generate

MODEL = dataclasses.replace(llama.CONFIGS["debug"], layers=2, embed=32, ffn=48, heads=2, kv_heads=1, head_dim=16)


def test_drawing_stays_among_the_best_and_follows_the_temperature() -> None:
    scores = torch.tensor([0.0, 3.0, 1.0, 2.9, -5.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, temperature: float, top_k: int, top_p: float = 1.0) -> list[int]:
        how = Drawing(temperature=temperature, top_k=top_k, top_p=top_p)
        return [draw(scores, how, generator) for _ in range(count)]

    two = drawn(200, 1.0, 2)
    assert set(two) == {1, 3}
    share = two.count(1) / len(two)
    assert abs(share - torch.softmax(torch.tensor([3.0, 2.9]), 0)[0].item()) < 0.12
    assert set(drawn(300, 3.0, 0)) == {0, 1, 2, 3, 4}
    chances = scores.softmax(0)
    for top_p, kept in ((0.01, {1}), (chances[1].item() + 0.01, {1, 3}), (0.99, {0, 1, 2, 3})):
        assert set(drawn(200, 1.0, 0, top_p)) == kept
    assert set(drawn(5, 0.0, 5)) == set(drawn(20, 1e-3, 5)) == {1}


def speaker(model: Any, params: Any, end: int) -> loaded.Loaded:
    """Of bytes, whose texts end with `end`."""
    dtype = params.embed[next(iter(params.embed))].dtype
    return loaded.Loaded("it", model, params, Bytes(), frozenset({end}), 256, dtype, "cpu")


def added(model: Any, params: Any, prompts: list[str], length: int = 16, **how: Any) -> list[list[int]]:
    """What is drawn after each prompt, of bytes."""
    tokens = Bytes().encode(prompts)
    steps = list(generate(speaker(model, params, 0), tokens, length, Drawing(**how)))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("name", ["debug-mistral", "debug-gpt2", "debug-mixtral"])
def test_a_text_does_not_depend_on_those_beside_it(name: str) -> None:
    """Of prompts of several lengths, some of which end early; and a seed repeats."""
    model = dataclasses.replace(models.CONFIGS[name], layers=2)
    params = ya.materialize(models.of(model).params(model), seed=3)
    prompts = ["def main", "x", "a longer one, with a window's worth of words in front of what it begins with", "x y"]
    how = {"temperature": 2.0, "top_k": 0}
    together = added(model, params, prompts, **how)
    assert together == [added(model, params, [prompt], **how)[0] for prompt in prompts]
    assert together == added(model, params, prompts, **how) != added(model, params, prompts, seed=1, **how)
    ends = next(token for token in together[0] if token not in together[2])
    steps = list(generate(speaker(model, params, ends), Bytes().encode(prompts[::2]), 16, Drawing(**how)))
    first, other = zip(*steps, strict=True)
    assert list(other) == together[2]
    cut = together[0].index(ends)
    assert list(first) == together[0][:cut] + [None] * (16 - cut)


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    gpt2 = dataclasses.replace(models.CONFIGS["debug-gpt2"], layers=1, max_length=20)
    params = ya.materialize(models.of(gpt2).params(gpt2), seed=3)
    cases = [
        (lambda: Config(prompt=("a", "")), "prompt is empty"),
        (lambda: Config(length=0), "length is 0"),
        (lambda: Drawing(temperature=-1.0), "temperature is -1"),
        (lambda: Drawing(top_k=-1), "top_k is -1"),
        (lambda: Drawing(top_p=0.0), "top_p is 0.0"),
        (lambda: loaded.Source(run=tmp_path, model=tmp_path), "a model comes from one of the two"),
        (lambda: loaded.Source(run=tmp_path, compute="bfloat16"), "compute is bfloat16: a run has its own"),
        (lambda: added(gpt2, params, ["x", "12345678"]), "prompt 2: 8 tokens and 16 more pass 20 positions"),
    ]
    for make, text in cases:
        with pytest.raises(ConfigError, match=text):
            make()


# ---- directories of Hugging Face


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a BPE tokenizer of 97 tokens."""
    transformers = pytest.importorskip("transformers", reason="reads tokenizers")
    tokenizers = pytest.importorskip("tokenizers", reason="makes one")
    folder = tmp_path_factory.mktemp("qwen3")
    their_model("qwen3").save_pretrained(folder)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=97, special_tokens=["<end>"])
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog, and so do the others"] * 4, trainer)
    made.add_tokens([f"<{number}>" for number in range(97 - made.get_vocab_size())])  # as many as the model has rows
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return folder


def spoken(mesh: Any, *flags: str) -> list[dict[str, Any]]:
    """What `sample --json` prints on this rank."""
    return [json.loads(line) for line in said(mesh, "--json", *flags).splitlines()]


def warned(mesh: Any, *flags: str) -> str:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        spoken(mesh, *flags)
    return err.getvalue()


def test_a_directory_speaks_as_transformers_has_it_on_one_rank_and_on_two(pools: Pools, directory: Path) -> None:
    import transformers

    prompts = ["the dog", "over the lazy fox and so"]
    flags = ("--model", str(directory), "--prompt", *prompts, "--length", "20")
    found = pools[1].run(spoken, *flags, "--temperature", "0")[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for prompt, line in zip(prompts, found, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        whole = theirs.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id)[0]
        expected = [int(token) for token in whole[tokens.shape[1] :] if token != tokenizer.eos_token_id]
        assert line["tokens"] == expected
        assert prompt + line["text"] == tokenizer.decode([*tokens[0], *expected])
    drawn = [*flags, "--temperature", "1.5", "--top-p", "0.9"]
    (alone,), (first, second) = pools[1].run(spoken, *drawn), pools[2].run(spoken, *drawn)
    assert first == alone and second == [], "rank 0 speaks"
    told = pools[2].run(warned, "--model", str(directory), "--prompt", "a <end>", "--length", "1")
    assert told == ["warning: a prompt spells <end>: it is read as text, as in documents, not as that token\n", ""]


def test_directories_that_cannot_speak_are_named(directory: Path, tmp_path: Path) -> None:
    for folder, text in ((tmp_path, "config.json: no such file"), (directory / "config.json", "no such file")):
        with pytest.raises(ConfigError, match=text):
            loaded.load(loaded.Source(model=folder, device="cpu"))
    config, lazy = models.hf.load(directory)
    models.hf.save(tmp_path, config, ya.materialize(lazy))
    with pytest.raises(ConfigError, match=r"no tokenizer is there; copy the model's tokenizer files"):
        loaded.load(loaded.Source(model=tmp_path, device="cpu"))


@pytest.mark.parametrize(
    ("of_generation", "ends"), [({}, {0, 5}), ({"generation_config": {"eos_token_id": 7}}, {0, 7})]
)
def test_what_ends_a_text_is_what_transformers_reads(of_generation: Any, ends: set[int]) -> None:
    model = dataclasses.replace(MODEL, generation={"eos_token_id": [5], **of_generation})
    assert loaded.Opened(Path(), "it", model, Bytes(), None, Lora()).ends == ends
