"""Perplexity, multiple choice and lm-eval's interface against whole-sequence logits, on one rank and on two."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch

import models
import yafsdp_fn as ya
from models import qwen3
from tests.harness.pool import Pools
from tests.models.theirs import draw
from train import evaluate
from train.config import ConfigError
from train.data.tokenizer import Bytes
from train.trained import loaded
from train.trained.likelihood import Part, likelihoods, windows

MODEL = qwen3.Config(vocab=300, embed=32, ffn=40, layers=2, heads=2, kv_heads=1, head_dim=16, max_length=24)


def speaker(mesh: Any) -> loaded.Loaded:
    """A model of bytes for texts of 24 tokens; weights far from the initial ones."""
    whole = optree.tree_map(lambda leaf: leaf * 6, ya.materialize(qwen3.params(MODEL), seed=5))
    state = ya.shard(whole._replace(layers=ya.Stacked(whole.layers)), mesh=mesh)
    return loaded.Loaded("it", MODEL, state.params, Bytes(), frozenset([0]), 24, torch.float32, "cpu")


def nats(it: loaded.Loaded, context: list[int], targets: list[int]) -> float:
    """By the logits of the whole, one row at a time."""
    tokens = torch.tensor([[*context, *targets][-(it.most + 1) :]])
    scores = qwen3.logits(MODEL, it.params, tokens[:, :-1])[0].double().log_softmax(-1)
    picked = scores.gather(1, tokens[0, 1:, None])[:, 0]
    return float(picked[-len(targets) :].sum())


def test_windows_predict_each_token_once() -> None:
    """Each with as much before it as there is room for."""
    for count in (1, 5, 6, 7, 12, 13):
        parts = list(windows(list(range(count)), 99, 6))
        assert [token for part in parts for token in part.targets] == list(range(count))
        for part in parts:
            assert len(part.context) >= 1
            assert len(part.context) + len(part.targets) <= 7
            before = [99, *range(count)][: part.targets[0] + 1]
            assert part.context == before[-len(part.context) :]
    assert parts[-1] == Part([6, 7, 8, 9, 10, 11], [12])


TEXTS = {"a": "for each of the words", "b": "a much longer text, of which windows are made: é" * 2}
QUESTIONS = [
    evaluate.Question("The dog", ("barks", "is", "asks for a long walk"), 1),
    evaluate.Question("Two and two:", ("four", "five"), 0),
    evaluate.Question("One", ("b", "a"), 1),
]


def asked(*of: str) -> Any:
    """A request of lm-eval."""
    return SimpleNamespace(args=of)


def measured(mesh: Any) -> SimpleNamespace:
    """What this rank finds, and beside it what it should find by the logits of the whole."""
    it = speaker(mesh)
    parts = [Part([0, *range(5, 5 + n)], [40 + n, 3, 7][: 1 + n % 3]) for n in range(7)] + [Part([0] * 30, [5, 6])]
    found = likelihoods(it, parts, 3)
    expected = [nats(it, list(part.context), list(part.targets)) for part in parts]
    of_texts = evaluate.perplexities(it, TEXTS, 4)
    whole = sum(nats(it, list(p.context), list(p.targets)) for p in windows(list(TEXTS["b"].encode()), 0, 24))
    scores = evaluate.accuracy(it, QUESTIONS, 4)
    told: list[Any] = []
    with contextlib.suppress(ConfigError):  # the interface alone, where lm-eval is installed
        lm = evaluate.model(it, 4)
        told = [
            lm.loglikelihood([asked("The dog", " barks")]),
            lm.loglikelihood_rolling([asked(TEXTS["b"])]),
        ]
    dog = nats(it, list(b"The dog"), list(b" barks"))
    of_it = {"parts": found, "expected": expected, "perplexity": of_texts, "nats": whole, "accuracy": scores}
    return SimpleNamespace(**of_it, dog=dog, harness=told)


def test_scores_are_those_of_whole_sequences_on_one_rank_and_on_two(pools: Pools) -> None:
    (alone,), (first, second) = pools[1].run(measured), pools[2].run(measured)
    for found in (alone, first, second):
        assert [each.nats for each in found.parts] == pytest.approx(found.expected, abs=1e-4)
        a, b, both = found.perplexity
        assert (a.tokens, b.nbytes, both.nbytes) == (21, len(TEXTS["b"].encode()), 21 + len(TEXTS["b"].encode()))
        assert b.nats == pytest.approx(-found.nats, abs=1e-3)
        assert both.nats == pytest.approx(a.nats + b.nats)
        assert both.bits_per_byte == pytest.approx(both.nats / both.nbytes / math.log(2))
        assert both.per_token == both.per_byte == pytest.approx(math.exp(both.nats / both.tokens))
        assert found.accuracy == alone.accuracy
    assert min(alone.expected) < -20.0, "far from even"
    for told in (alone.harness, first.harness, second.harness) if alone.harness else ():  # where lm-eval is installed
        ((one,), (rolling,)) = told
        assert one == (pytest.approx(alone.dog, abs=1e-4), False)
        assert rolling == pytest.approx(alone.nats, abs=1e-3)


def test_a_choice_is_right_by_its_likelihood_or_by_that_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    by_text = {" barks": -10.0, " is": -8.0, " asks for a long walk": -20.0, " four": -1.0, " five": -2.0}
    by_text |= {" a": -3.0, " b": -2.5}

    def scored(it: Any, parts: list[Part], batch: int) -> list[Any]:
        texts = [bytes(part.targets).decode() for part in parts]
        return [SimpleNamespace(nats=by_text[text]) for text in texts]

    monkeypatch.setattr(evaluate, "likelihoods", scored)
    it = SimpleNamespace(tokenizer=Bytes())
    found = evaluate.accuracy(it, QUESTIONS, 2)
    assert found == evaluate.Accuracy(3, pytest.approx(2 / 3), pytest.approx(1 / 3))  # the longest wins by bytes
    assert found.error(found.plain) == pytest.approx(math.sqrt(2 / 9 / 3))
    assert evaluate.pair(it, "Is ", "it") == Part([*b"Is"], [*b" it"])
    assert evaluate.pair(it, "", "it") == Part([0], [*b"it"])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 2: no JSON"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "line 2: expected an object with a"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "line 2: the answer is 2: expected one of the 2"),
        ('{"question": "a", "choices": ["b", "c"], "answer": "d"}', "line 2: the answer is 'd'"),
        ('{"question": "", "choices": ["b", "c"], "answer": 0}', "line 2: expected an object"),
        ("[]", "line 2: expected an object"),
    ],
)
def test_questions_that_are_none_are_named(tmp_path: Path, line: str, text: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "a", "choices": ["b", "c"], "answer": "c"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=text):
        evaluate.read_questions(file)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, text in (("none*", "no such file"), ("empty", "it is empty"), ("binary", "cannot be read as UTF-8")):
        with pytest.raises(ConfigError, match=text):
            evaluate.read_texts([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="it is empty"):
        evaluate.read_questions(tmp_path / "empty")
    with pytest.raises(ConfigError, match="nothing to measure"):
        evaluate.Config()
    with pytest.raises(ConfigError, match="limit is of --choices and --tasks"):
        evaluate.Config(text=("a",), limit=3)


def test_what_is_measured_is_what_the_files_hold(tmp_path: Path) -> None:
    """Ends of lines as they are, as in training; and those inside of JSON's texts end no line."""
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\n")
    assert list(evaluate.read_texts([f"{tmp_path}/a"]).values()) == ["one\r\ntwo\r\n"]
    (tmp_path / "q").write_bytes('{"question": "a\u2028b", "choices": ["c", "d"], "answer": 1}\r\n'.encode())
    assert evaluate.read_questions(tmp_path / "q") == [evaluate.Question("a\u2028b", ("c", "d"), 1)]


def shown(mesh: Any, *flags: str) -> str:
    """What this rank prints."""
    config = evaluate.Config(text=("t",), json="--json" in flags)
    found = evaluate.measured(config, speaker(mesh), TEXTS, {Path("q.jsonl"): QUESTIONS})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluate.show(config, found)
    return out.getvalue()


def test_generation_ends_before_what_it_is_to_end_with() -> None:
    """Each text as by itself, alone and in a batch; contexts that do not fit lose their beginning."""
    it = speaker(ya.mesh(device="cpu"))
    contexts = ["One", "Two and", "a context that is longer than the model's 24 positions"]
    whole = evaluate.generated(it, contexts, {"until": [], "max_gen_toks": 12})
    assert whole == [evaluate.generated(it, [each], {"max_gen_toks": 12})[0] for each in contexts]
    assert evaluate.generated(it, [contexts[2][-12:]], {"max_gen_toks": 12}) == whole[2:]
    stops = [text[4:6] for text in whole[:2]]
    cut = evaluate.generated(it, contexts, {"until": stops, "max_gen_toks": 12})
    assert cut == [min(text.split(stop)[0] for stop in stops) for text in whole]
    assert cut != whole


def test_what_is_shown(pools: Pools) -> None:
    """By the first rank alone."""
    found = json.loads(pools[1].run(shown, "--json")[0])
    assert found["model"] == "it"
    assert set(found["text"]) == {"a", "b", "all"}
    assert found["choices"]["q.jsonl"]["questions"] == 3
    table, nothing = pools[2].run(shown)
    assert nothing == ""
    assert "bits a byte" in table
    assert "q.jsonl" in table
    assert f"{found['text']['all']['perplexity_per_token']:.3f}" in table


@pytest.mark.parametrize("name", [f"debug-{kind}" for kind in ("mistral", "gpt2", "mixtral")])
def test_scores_of_every_family_are_of_their_logits(name: str) -> None:
    model = models.CONFIGS[name]
    family = models.of(model)
    params = ya.materialize(family.params(model), seed=1)
    tokens = draw(2, 400, seed=0, most=256)
    targets = tokens.roll(-1, 1)
    targets[0, :390] = -100
    found = family.score(model, params, tokens, targets)
    scores = family.logits(model, params, tokens).double().log_softmax(-1)
    expected = scores.gather(2, tokens.roll(-1, 1)[..., None])[..., 0] * (targets != -100)
    torch.testing.assert_close(found.log_probability.double(), expected, atol=1e-5, rtol=0.0)
    best = (scores.argmax(-1) == targets) | (targets == -100)
    assert torch.equal(found.best, best)
