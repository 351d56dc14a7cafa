"""Settings that cannot work are refused by name; a config survives its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.damage import byte_damage, json_damage
from tests.harness.marks import nightly
from tests.program.traces import model
from tests.train.inside import resumed
from train import tokenizer
from train.__main__ import main
from train.config import ConfigError, Data, Mesh, Optim, Sharding
from train.config_json import from_json, to_json
from train.data.tokenizer import Bytes
from train.running import run, setup
from train.settings import Config, Settings, Tuning
from yafsdp_fn.schedules import Forward, Offload


def on_stages(**sharding: Any) -> Config:
    return Config(mesh=Mesh(stage=2), sharding=Sharding(**sharding))


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (Data, {"seq_len": 0}, "data.seq_len is 0"),
        (Data, {"batch": 0}, "data.batch is 0"),
        (Data, {"heldout_fraction": 1.0}, "data.heldout_fraction is 1.0"),
        (Optim, {"learning_rate": 0.0}, "optim.learning_rate is 0.0"),
        (Optim, {"clip_norm": 0.0}, "optim.clip_norm is 0.0"),
        (Sharding, {"remat": "some"}, "sharding.remat is 'some'"),
        (Sharding, {"remat": "none:3"}, "sharding.remat is 'none:3'"),
        (Sharding, {"remat": "offload:2"}, "sharding.remat is 'offload:2': none, all, offload, first:N or every:N"),
        (Sharding, {"remat": "first:x"}, "sharding.remat is 'first:x'"),
        (Sharding, {"microbatches": 0}, "sharding.microbatches is 0"),
        (Sharding, {"chunks": 0}, "sharding.chunks is 0"),
        (Sharding, {"chunks": 2, "remat": "first:1"}, "remat is first:1, sharding.chunks 2: .* a third time"),
        (Sharding, {"schedule": "hsdp"}, "sharding.replicate is 1, sharding.schedule hsdp"),
        (Sharding, {"replicate": 2}, "hsdp, and only hsdp, takes two or more groups"),
        (Sharding, {"schedule": "hpz"}, "sharding.local is 0, sharding.schedule hpz"),
        (Sharding, {"local": 2}, "hpz, and only hpz, takes the number of ranks per node"),
        (Sharding, {"accumulate": True}, "sharding.accumulate is for sharding.reduce bfloat16"),
        (Config, {"steps": 0}, "steps is 0"),
        (Config, {"keep": 0}, "keep is 0"),
        (Config, {"timeout": 0}, "timeout is 0"),
        (Config, {"eval_batches": 0}, "eval_batches is 0"),
        (Config, {"name": "a/b"}, "name is 'a/b'"),
        (Config, {"name": ".."}, "name is '..': a folder's name inside --runs"),
        (Config, {"name": "a\0b"}, "name is "),
        (Config, {"name": "\ud800"}, "name is "),
        (Config, {"name": "x" * 300}, "name is "),
        (Config, {"seed": 2**70}, "seed is 1180591620717411303424: expected 0 to 2"),
        (Config, {"timeout": math.inf}, "timeout is inf seconds: expected 1 to 10000000"),
        (Config, {"timeout": math.nan}, "timeout is nan"),
        (Config, {"max_skipped": 0}, "max_skipped is 0: expected 1 to"),
        (Config, {"keep_every": -1}, "keep_every is -1"),
        (Config, {"steps": 10**30}, "steps is 10"),
        (Config, {"eval_every": -2}, "eval_every is -2"),
        (Optim, {"b1": 2.0}, r"optim.b1 is 2.0: a decay, in \[0, 1\)"),
        (Optim, {"b2": math.nan}, "optim.b2 is nan"),
        (Optim, {"clip_norm": math.inf}, "optim.clip_norm is inf"),
        (Optim, {"weight_decay": -1.0}, "optim.weight_decay is -1.0"),
        (Optim, {"final_fraction": math.inf}, "optim.final_fraction is inf"),
        (Sharding, {"remat": "every:0"}, "sharding.remat is 'every:0': .* N at least 1"),
        (Sharding, {"remat": "first:\N{SUPERSCRIPT TWO}"}, "sharding.remat is"),
        (Sharding, {"remat": "none:"}, "sharding.remat is 'none:'"),
        (Config, {"sharding": Sharding(microbatches=3)}, "data.batch 4 does not divide into sharding.microbatches 3$"),
        (
            Config,
            {"sharding": Sharding(microbatches=2, chunks=4)},
            "data.batch 4 does not divide into sharding.microbatches 2 of sharding.chunks 4",
        ),
        (
            Config,
            {"mesh": Mesh(context=2), "sharding": Sharding(schedule="hpz", local=3)},
            "sharding.local is 3, mesh.context 2, mesh.tensor 1: a node has a",
        ),
        (Mesh, {"sequence": True}, "mesh.sequence is of the ranks of mesh.tensor"),
        (Mesh, {"expert": 0}, "mesh.expert is 0: expected 1 to"),
        (Config, {"capacity": -1.0}, "capacity is -1.0: expected a finite number, 0 or more"),
        (Mesh, {"order": "gpipe"}, "mesh.order is gpipe, and mesh.stage 1: no stages"),
        (
            on_stages,
            {"schedule": "own.py:f"},
            "mesh.stage is 2, sharding.schedule own.py:f: one of the library's, or saved",
        ),
        (
            on_stages,
            {"remat": "offload"},
            "mesh.stage is 2, sharding.remat offload: a stage keeps none on the host; take all",
        ),
        (
            on_stages,
            {"chunks": 2},
            "mesh.stage is 2, sharding.chunks 2: layer-major microbatches would go through all stages layer by layer",
        ),
        (setup.model_config, {"name": "gpt"}, "model is 'gpt'; did you mean gpt2 or "),
        (
            setup.vocabulary,
            {"name": "debug", "vocab": 100, "tokenizer": Bytes()},
            "vocabulary of 100: the tokenizer needs 256",
        ),
        (Optim, {"decay_steps": 3}, "optim.decay_steps is 3, optim.decay cosine: only wsd takes it"),
        (tokenizer.Config, {"out": Path(), "vocab": 100}, "vocab is 100: expected 512"),
        (Config, {"steps": 10, "optim": Optim(warmup=10)}, "optim.warmup 10 is not shorter than the run, steps 10"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make: Callable[..., Any], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**settings)


@pytest.mark.parametrize("kind", [Config, Tuning])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 4), (149, 29), (150, 30), (400, 30)])
def test_a_short_run_has_a_short_warmup_and_keeps_it(kind: type[Settings], steps: int, warmup: int) -> None:
    config = kind(steps=steps)
    assert config.optim.warmup == warmup
    assert dataclasses.replace(config, steps=500).optim.warmup == warmup
    assert kind(steps=steps, optim=dataclasses.replace(config.optim, warmup=-1, decay="wsd")).optim.warmup == warmup


@pytest.mark.parametrize(
    ("remat", "again", "copies"),
    [("none", 0, 0), ("first:2", 2, 0), ("every:2", 2, 0), ("all", 4, 0), ("offload", 4, 2)],
)
def test_what_recomputes(remat: str, again: int, copies: int) -> None:
    ops = setup.schedule(Sharding(remat=remat))(model(4)).ops
    assert sum(isinstance(op, Forward) and not op.keep for op in ops) == again
    assert sum(isinstance(op, Offload) for op in ops) == copies


def test_json_round_trip(tmp_path: Path) -> None:
    files = ("a", "no UTF-8: \udcff")
    config = Config(name="x", runs=tmp_path, data=Data(files=files, seq_len=3), optim=Optim(b2=0.5), device="cpu")
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert from_json(path, Config) == config


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[]",
        '{"nosuch": 1}',
        '{"data": {"nosuch": 1}}',
        '{"data": 3}',
        '{"data": null}',
        '{"steps": 3.5}',
        '{"steps": true}',
        '{"steps": "3"}',
        '{"steps": 1e999}',
        '{"name": null}',
        '{"runs": 3}',
        '{"device": "tpu"}',
        '{"device": []}',
        '{"data": {"files": "a"}}',
        '{"data": {"files": [1]}}',
        '{"timeout": NaN}',
        '{"timeout": ' + "9" * 400 + "}",
        '{"seed": ' + "9" * 5000 + "}",
        '{"optim": {"b1": 2}}',
        '{"steps": 1, "steps": 2}',
        "[" * 100_000,
    ],
)
def test_damaged_json_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as the config of a run"):
        from_json(path, Config)


@pytest.mark.parametrize("many", [500, nightly(10_000)])
def test_damaged_json_is_read_or_refused_by_name(tmp_path: Path, many: int) -> None:
    text = to_json(Config(name="x", data=Data(files=("a", "b")))).encode()
    path = tmp_path / "config.json"
    draw = random.Random(0)
    refused = 0
    for _ in range(many):
        of_json = draw.random() < 0.5
        path.write_bytes(json_damage(json.loads(text), draw) if of_json else byte_damage(text, draw))
        try:
            assert isinstance(from_json(path, Config), Config)
        except ConfigError as error:
            assert str(path) in str(error)
            assert len(str(error)) < 1000
            refused += 1
    print(f"{many} damaged configs: {refused} refused, {many - refused} read")
    assert many / 2 < refused < many


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        from_json(tmp_path / "config.json", Config)


def write_run(folder: Path, config: Config) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))


def test_resume_takes_the_runs_own_settings_as_defaults(tmp_path: Path) -> None:
    config = Config(name="a", steps=77, optim=Optim(learning_rate=0.5))
    write_run(tmp_path / "a", config)
    assert resumed(tmp_path) == dataclasses.replace(config, runs=tmp_path, resume=True)
    longer = resumed(tmp_path, "--steps", "99")
    assert longer.steps == 99
    assert longer.optim == config.optim


def test_resume_without_a_name_takes_the_newest_run(tmp_path: Path) -> None:
    write_run(tmp_path / "old", Config(name="old"))
    write_run(tmp_path / "new", Config(name="new"))
    os.utime(tmp_path / "old" / "config.json", (1, 1))
    assert run.parse(["--runs", str(tmp_path), "--resume"], Config, quiet=False).name == "new"


@pytest.mark.parametrize(
    "flags", [["--seed", "3"], ["--data.seq-len", "8"], ["--model", "llama3-8b"], ["--optim.moments", "int8"]]
)
def test_resume_refuses_what_would_not_fit(tmp_path: Path, flags: list[str]) -> None:
    write_run(tmp_path / "a", Config(name="a"))
    with pytest.raises(ConfigError, match=r"--resume: (seed|data\.seq_len|model|optim\.moments) was .* cannot become"):
        resumed(tmp_path, *flags)
    assert resumed(tmp_path, "--optim.moments", "host").optim.moments == "host"  # as whole ones, elsewhere


def test_resume_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints holds no complete checkpoint; start anew without --resume"):
        run.check_folder(Config(name="a", runs=tmp_path, resume=True))


def test_no_run_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run: start one with"):
        run.parse(["--runs", str(tmp_path), "--resume"], Config, quiet=False)


def test_unknown_subcommands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    shown = capsys.readouterr().err
    assert "unknown subcommand 'fly'" in shown
    assert "clm" in shown
    assert "sample" in shown
    assert main(["bench", "ablate"]) == main(["published"]) == 2
    shown = capsys.readouterr().err
    assert "python -m benchmarks\n" in shown
    assert "python -m benchmarks published\n" in shown
    assert main(["--help"]) == 0
    assert "continue prompts" in capsys.readouterr().out


def test_the_learning_rate_has_its_short_name() -> None:
    assert run.parse(["--optim.lr", "0.5"], Config, quiet=False).optim.learning_rate == 0.5
