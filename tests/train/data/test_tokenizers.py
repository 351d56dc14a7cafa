"""Tokenizers of other people: their code does not run, their templates end, missing paths are refused at once."""

from __future__ import annotations

import ast
import gc
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.harness import forked
from tests.harness.pages import ROOT
from train import tokenizer
from train.config import ConfigError
from train.data import conversations
from train.data import tokenizer as tokenizers


@pytest.fixture
def folder(talk_bpe: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(talk_bpe, tmp_path / "bpe"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_beside_a_tokenizer_never_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str):
    planted = {"AutoTokenizer": ["theirs.Theirs", None], "AutoConfig": "theirs.Theirs"}
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {"model_type": "theirs"}
    values.pop("tokenizer_class", None)
    path.write_text(json.dumps(values | {"auto_map": planted}))
    ran = tmp_path / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Theirs: pass\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    try:
        found = tokenizers.load(str(folder))
    except ConfigError as error:
        assert file == "tokenizer_config.json"
        assert "contains custom code" in str(error)
    else:  # the configuration of a model is not needed
        assert file == "config.json"
        assert found.decode(found.encode(["One?"])[0].tolist()) == "One?"
    assert not ran.exists()
    assert not asked


def test_no_call_leaves_it_open_whether_code_is_trusted() -> None:
    """A class of transformers that finds another one by what a folder says takes code from it, unless it is told."""
    calls = []
    for path in (path for part in ("train", "models", "yafsdp_fn") for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                calls.append(
                    (path.name, [ast.unparse(each.value) for each in node.keywords if each.arg == "trust_remote_code"])
                )
    assert calls == [("tokenizer.py", ["False"])]


def test_a_template_that_does_not_end_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # an alarm in pytest's hook for what the collector finds would be an error of its own
    found = tokenizers.load(str(folder))
    assert isinstance(found, tokenizers.Pretrained)
    loop = "{% for i in range(99999) %}"
    end = "{% endfor %}"
    message = r"the chat template refuses \[\{'role'.*: it runs for more than 0.1 s"
    for template in (loop * 4 + end * 4, "{{ (range(99999) | list * 9) | sort | sum }}" * 400):
        found.inner.chat_template = template
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=message):
            patch.setattr(conversations, "LIMIT", 0.1, raising=False)
            conversations.chat_of(found)
    found.inner.chat_template = tokenizer.TEMPLATE
    assert conversations.chat_of(found).encode([{"role": "user", "content": "One?"}]).tokens.size


@pytest.mark.parametrize("named", ["/nowhere/bpe", "./bpe", "~/nowhere", "runs/a/bpe", "runs/tokenizer.json"])
def test_a_path_that_is_not_there_is_refused_at_once(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "library", lambda *_: pytest.fail("a library was asked"))
    with pytest.raises(
        ConfigError, match=f"^data.tokenizer: {named!r} cannot be read: there is no such file or folder"
    ):
        tokenizers.load(named)


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from train.data.tokenizer import load; load('runs/nope')")
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    _, said = forked.script(script, env=env, cwd=ROOT)
    assert "ConfigError: data.tokenizer: 'runs/nope' cannot be read: " in said
    assert "there is no such file or folder, the hub does not answer" in said
    assert "Retrying" not in said  # six times each, for a minute or two
