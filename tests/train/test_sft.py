"""`python -m train sft`: what is learnt, by the definition; runs that go on; from and to Hugging Face directories."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.harness.marks import nightly
from tests.harness.pool import Pools
from tests.train.data.test_sources import Numbered
from tests.train.inside import TINY, WINDOW, fine, flags, inside, killed, losses, spoken, text, tiny, tuned, without
from train import export
from train.config import Chats, ConfigError
from train.config_json import from_json
from train.data.conversations import ByteChat, Conversations
from train.data.rows import Place, Rows, batches
from train.data.store import Packed, tokenised
from train.data.tokenizer import Bytes
from train.running import loop, run
from train.settings import Config, Tuning
from train.trained.loaded import opened

CPU = torch.device("cpu")
ALONE = Place(0, 1, CPU)


class Talks:
    label = "these"

    def key(self) -> str:
        return "talks"

    def conversations(self) -> Any:
        for i in range(30):
            question = f"q{i}" * (1 + i % 3)
            answer = chr(97 + i % 26) * (60 if i % 9 == 4 else 1 + i % 5)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def texts(self) -> Any:
        return (f"text {i}" * (1 + i % 3) for i in range(30))


def rows_of(kind: str, folder: Path) -> Rows:
    if kind == "sft":
        return Conversations.of("text", [Talks()], Bytes(), ByteChat(), 24, folder)
    return Packed("text", tokenised(Talks(), Bytes(), folder), 24, "documents")


def loss_and_gradient(mesh: Any, kind: str, folder: Path, microbatches: int) -> tuple[float, list[Tensor]]:
    """Of four rows over all ranks, which have very different numbers of targets."""
    place = Place.of(mesh)
    batch, _ = next(batches(rows_of(kind, folder), 3, 4 // place.ranks, place, seed=0))
    batch["targets"][0, : 5 + 9 * place.rank] = -100
    state = ya.init(llama.params(TINY), ya.optim.identity(), mesh=mesh, seed=0, precision=ya.Precision(torch.float64))
    found = ya.value_and_grad(llama.loss(TINY), microbatches=microbatches)
    loss, grads = found(state.params, batch)
    return float(loss), optree.tree_leaves(ya.unshard(grads))


def by_hand(kind: str, folder: Path) -> tuple[float, list[Tensor]]:
    """The mean over the targets that count, one row after the other, each document a sequence of its own."""
    params = optree.tree_map(lambda leaf: leaf.double().requires_grad_(), ya.materialize(llama.params(TINY)))
    whole = [next(batches(rows_of(kind, folder), 3, 2, Place(rank, 2, CPU), seed=0))[0] for rank in (0, 1)]
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for rank, batch in enumerate(whole):
        batch["targets"][0, : 5 + 9 * rank] = -100
        for tokens, targets, documents in zip(*(batch[key] for key in ("tokens", "targets", "documents")), strict=True):
            for number in documents.unique():
                own = documents == number
                scores = llama.logits(TINY, params, tokens[own][None])[0]
                learnt = targets[own] != -100
                total = total + F.cross_entropy(scores[learnt], targets[own][learnt], reduction="sum")
                count += int(learnt.sum())
    return float(total.detach() / count), list(torch.autograd.grad(total / count, optree.tree_leaves(params)))


@pytest.mark.parametrize("kind", ["sft", "packed"])
def test_the_loss_is_the_mean_over_what_counts_however_it_is_cut(pools: Pools, tmp_path: Path, kind: str) -> None:
    """In float64, on two ranks, against documents one by one: no prompt's target and no padding counts, and nobody sees
    another document."""
    expected, gradient = by_hand(kind, tmp_path)
    for microbatches in (1, 2):
        for loss, grads in pools[2].run(loss_and_gradient, kind, tmp_path, microbatches):
            assert loss == pytest.approx(expected, rel=1e-12)
            for found, own in zip(grads, gradient, strict=True):
                torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-12)


# ---- runs


def talks(folder: Path, count: int = 120) -> str:
    lines = []
    for i in range(count):
        messages = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": chr(97 + i % 26)}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "talks.jsonl").write_text("".join(lines))
    return str(folder / "talks.jsonl")


def chat_flags(folder: Path, *more: str) -> tuple[str, ...]:
    """As of a run on text, with conversations in its place."""
    argv = without(flags(folder), "--data.files", "--model", "--name")
    return (*argv, "--name", "b", "--data.datasets", talks(folder), *more)


@pytest.fixture(scope="module")
def base(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/a, of clm."""
    folder = tmp_path_factory.mktemp("base")
    text(folder, 100)
    fine(pools[2].run(inside, flags(folder, "--steps", "4")))
    return folder


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_other_ranks_and_reads_each_conversation_once(pools: Pools, base: Path) -> None:
    argv = chat_flags(base, "--optim.learning-rate", "0.01", "--data.seq-len", "12", "--data.batch", "1")
    two = pools[2].run(tuned, (*argv, "--steps", "40"), killed, 12)
    assert {one.error for one in two} == {"Killed: "}
    one = fine(pools[1].run(tuned, (*argv, "--resume", "--steps", "24")))
    rows = [row for step in range(8) for each in two for row in each.read[step]] + [row for (row,) in one[0].read[:16]]
    assert len(rows) == 32
    assert len(set(rows)) == 32
    config = from_json(base / "runs" / "b" / "config.json", Tuning)
    assert config.start == str(base / "runs" / "a")
    found = losses(base, "b")
    assert len(found) == 24
    assert sum(found[-4:]) < sum(found[:4]) - 4
    with pytest.raises(ConfigError, match=r"it is of `python -m train sft`, not of `clm`"):
        from_json(base / "runs" / "b" / "config.json", Config)
    assert run.newest(base / "runs", Config).name == "a"
    assert run.newest(base / "runs", Config, Tuning).name == "b"


@pytest.mark.parametrize(("world", "batch"), [nightly(1, 2), (2, 1)])
def test_a_small_file_trains_as_it_is_and_says_so(
    pools: Pools, base: Path, tmp_path: Path, world: int, batch: int
) -> None:
    """Two rows, and nothing held out: a step reads what there is, and nothing is evaluated."""
    given = chat_flags(base, "--data.seq-len", "12", "--steps", "20", "--name", f"small{world}")
    argv = without(given, "--data.batch", "--eval-every", "--data.datasets")
    fine(pools[world].run(tuned, (*argv, "--data.datasets", talks(tmp_path, 3))))
    config = from_json(base / "runs" / f"small{world}" / "config.json", Tuning)
    assert config.data.batch == batch
    assert config.eval_every == 0
    rows = [Conversations.of("text", [source], Bytes(), ByteChat(), 24, tmp_path) for source in (Talks(), Quiet())]
    said = run.headline(config, "a model", TINY, ALONE, *rows)
    assert said.endswith("held out: nothing, so no evaluations; --data.heldout-files names some")
    few = dataclasses.replace(config, steps=1000)
    assert f"1,000 steps of {batch} row" in run.headline(few, "a model", TINY, ALONE, *rows)


class Quiet(Talks):
    def key(self) -> str:
        return "nobody talks"

    def conversations(self) -> Any:
        return iter(())


def test_few_rows_are_held_out_as_one_batch() -> None:
    config = Tuning(eval_every=1, data=Chats(batch=4))
    seen = loop.Evaluation(config, lambda *_: None, Numbered("r", 3), ALONE)
    (batch,) = [batch for batch, _ in itertools.islice(seen._read(), seen._batches)]
    assert sorted(batch["tokens"][:, 1].tolist()) == [0, 1, 2]


def exported(mesh: Any, folder: Path, out: Path) -> str:
    with tiny():
        return export.write(export.Config(out=out, run=folder, device="cpu"))


def whole(mesh: Any, folder: Path) -> Any:
    with tiny():
        base = opened(folder)
    state = base.trained(mesh)
    tree = ya.merge_lora(state) if base.lora.rank else ya.unshard(state.params)
    return [leaf.clone() for leaf in optree.tree_leaves(tree)]


def test_adapters_and_hugging_face_directories(pools: Pools, base: Path, tmp_path: Path) -> None:
    """clm -> adapters -> a directory -> all weights -> a sample: each begins with the weights of the one before."""
    more = ("--optim.learning-rate", "0.01", "--data.seq-len", str(3 * WINDOW), "--steps", "3", "--eval-every", "0")
    adapters = ("--lora.rank", "2", "--lora.where", "q_proj.weight", "down_proj.weight", "--lora.stored", "int8")
    adapters = (*adapters, "--sharding.compute", "bfloat16", "--seed", "3")
    fine(pools[2].run(tuned, (*chat_flags(base), *more, "--name", "c", *adapters)))
    fine(pools[2].run(tuned, (*chat_flags(base), *more, "--name", "c", "--resume", "--steps", "5")))
    manifest = base / "runs" / "c" / "checkpoints" / "step-00000005" / "manifest.json"
    assert json.loads(manifest.read_text())["seed"] == 3  # adapters are drawn by it
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("of a model that was there")
    pools[2].run(exported, base / "runs" / "c", tmp_path / "hf")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    with pytest.raises(ConfigError, match=r"is the folder of a run: the model's config\.json would replace that of"):
        exported(None, base / "runs" / "c", base / "runs" / "c")
    config, leaves = llama.hf.load(tmp_path / "hf")
    assert config.vocab == 256
    assert config.generation["generation_config"] == {"eos_token_id": [0]}, "what ends a text, for transformers"
    merged = pools[1].run(whole, base / "runs" / "c")[0]
    for stored, kept in zip(optree.tree_leaves(ya.materialize(leaves)), merged, strict=True):
        assert torch.equal(stored, kept.float())
    start = ("--start", str(tmp_path / "hf"), "--tokenizer", "bytes", "--optim.learning-rate", "1e-12", "--name", "d")
    fine(pools[2].run(tuned, (*chat_flags(base), *more, *start)))
    for stored, kept in zip(pools[1].run(whole, base / "runs" / "d")[0], merged, strict=True):
        torch.testing.assert_close(stored.float(), kept.float(), rtol=0, atol=1e-9)
    (shown,) = pools[1].run(spoken, base / "runs" / "d", "--prompt", "7?", "--length", "4")
    assert "step 3" in shown
    assert "7?" in shown
    for name in ("empty", "young"):
        (tmp_path / name).mkdir()
    (tmp_path / "young" / "config.json").write_text((base / "runs" / "a" / "config.json").read_text())
    for name, message in (
        ("nowhere", "is not a folder: expected that of a run"),
        ("empty", "neither a run nor a model"),
        ("young", "holds no complete checkpoint yet"),
    ):
        for one in pools[2].run(tuned, (*chat_flags(base), "--name", "e", "--start", str(tmp_path / name))):
            assert one.error.startswith("ConfigError: ")
            assert message in one.error
    refused = pools[1].run(tuned, (*chat_flags(base), "--name", "e", "--lora.rank", "2", "--lora.where", "nosuch"))
    assert "ConfigError: lora.where nosuch: " in refused[0].error
