"""`python -m train plan --torchtitan`: what a file says of a step, the program that is proved, and the CSV back."""

from __future__ import annotations

import copy
import json
import random
import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness import damage
from train.plan import main
from train.plan.job import MODELS, READ, Job, read
from train.plan.torchtitan import _over_axes
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Plan
from yafsdp_fn.planner.cluster import cluster
from yafsdp_fn.schedules import AllReduce, Forward, Gather, Reduce

Sections = dict[str, dict[str, Any]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS["llama3"], "debugmodel", "debug")


# What torchtitan's own files of Llama 3 say of a step, as of its last version with TOML files; rates of learning,
# folders and datasets left out.
LLAMA3: dict[str, tuple[int, Sections]] = {
    "8B": (
        64,
        {
            "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "dataset": "c4"},
            "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 1},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
            "compile": {"enable": False, "components": ["model", "loss"]},
        },
    ),
    "70B": (
        256,
        {
            "training": {"local_batch_size": 8, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "dataset": "c4"},
            "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 8},
            "activation_checkpoint": {"mode": "full"},
            "compile": {"enable": False, "components": ["model", "loss"]},
        },
    ),
    "405B": (
        512,
        {
            "model": {"converters": ["float8"]},
            "training": {"local_batch_size": 2, "seq_len": 8192, "max_norm": 1.0, "steps": 3000, "dataset": "c4"},
            "parallelism": {
                "data_parallel_shard_degree": -1,
                "tensor_parallel_degree": 8,
                "enable_async_tensor_parallel": True,
            },
            "activation_checkpoint": {"mode": "full"},
            "compile": {"enable": True, "components": ["model", "loss"]},
            "quantize": {"linear.float8.enable_fsdp_float8_all_gather": True},
        },
    ),
}
EVERYWHERE: Sections = {
    "job": {"description": "Llama 3"},
    "metrics": {"log_freq": 10},
    "optimizer": {"name": "AdamW", "lr": 1e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 200},
    "checkpoint": {"enable": False, "interval": 500},
    "validation": {"enable": False},
}


def write(path: Path, sections: Sections, flavor: str = "8B") -> Path:
    named = {**sections, "model": {"name": "llama3", "flavor": flavor, **sections.get("model", {})}}
    lines = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for name, keys in named.items()
    ]
    path.write_text("\n".join(lines))
    return path


def job_of(tmp_path: Path, gpus: int, flavor: str = "debugmodel", **parallelism: Any) -> Job:
    training = {"local_batch_size": 8, "seq_len": 256}
    file = {"training": training, "parallelism": parallelism, "activation_checkpoint": {"mode": "none"}}
    return read(write(tmp_path / "job.toml", file, flavor), gpus)


def planned(job: Job) -> tuple[ya.schedules.Program, Plan]:
    """The program that it runs, proved; and its plan, with FSDP2's copies."""
    trace = job.own()
    return ya.verify(job.schedule()(trace)), Plan.of(job.schedule(peers.fsdp2)(trace), "h100-80g")


# ---- torchtitan's own


NOT_MODELLED = {
    "8B": [
        'activation_checkpoint.mode = "selective", selective_ac_option = "op": parts of layers; taken as every second'
    ],
    "70B": [],
    "405B": [
        "model.converters = ['float8']: products, and gathers, in other dtypes: all are taken in bf16",
        "parallelism.enable_async_tensor_parallel = true: collectives behind the products of a layer: a layer waits",
        "compile.enable = true: kernels that are compiled",
    ],
}


@pytest.mark.parametrize("flavor", LLAMA3)
def test_torchtitans_own_files_of_llama3(flavor: str, tmp_path: Path) -> None:
    """Their programs are proved, and predicted; what is not modelled is named."""
    gpus, sections = LLAMA3[flavor]
    job = read(write(tmp_path / "job.toml", sections | EVERYWHERE, flavor), gpus)
    tensor, layers = sections["parallelism"]["tensor_parallel_degree"], job.config.layers
    assert job.tokens == sections["training"]["local_batch_size"] * 8192 * gpus // tensor
    program, plan = planned(job)
    assert dict(program.trace.mesh) == {"shard": gpus // tensor} | ({"tensor": tensor} if tensor > 1 else {})
    gathers = [op for op in program.ops if isinstance(op, Gather)]  # of a module each, also where units are split
    assert len(gathers) == 2 * (layers + 1) + 1  # the head is held
    assert len([op for op in program.ops if isinstance(op, Reduce)]) == layers + 2
    again = [op for op in program.ops if isinstance(op, Forward) and not op.keep]
    assert len(again) == (layers // 2 if flavor == "8B" else layers)
    assert plan.fits and 0 < plan.work.seconds <= plan.step_s
    assert len(job.not_modelled) == len(NOT_MODELLED[flavor])
    for told, expected in zip(job.not_modelled, NOT_MODELLED[flavor], strict=True):
        assert told.startswith(expected)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flavor", LLAMA3)
def test_the_command_on_torchtitans_own_files(flavor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus, sections = LLAMA3[flavor]
    path = write(tmp_path / "job.toml", sections, flavor)
    arguments = ["--torchtitan", str(path), "--gpus", str(gpus), "--cluster", "h100-80g", "--timeline", "None"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["no stages"]["step_s"] < found["step_s"] and found["fits"]


def test_published_rates_of_8b(tmp_path: Path) -> None:
    """8B, two sequences a GPU on 8 and on 128 GPUs: torchtitan's paper has 6667 and 6514 tokens/s a GPU."""
    training = {"local_batch_size": 2, "seq_len": 8192}
    again = {"mode": "selective", "selective_ac_option": "op"}
    path = write(tmp_path / "job.toml", {"training": training, "activation_checkpoint": again})
    for gpus, measured in ((8, 6667), (128, 6514)):
        job = read(path, gpus)
        rate = job.tokens / planned(job)[1].step_s / gpus
        assert rate == pytest.approx(measured, rel=0.1)


# ---- meshes and pipelines


@pytest.mark.usefixtures("small")
def test_copies_of_the_state(tmp_path: Path) -> None:
    hybrid, _ = planned(job_of(tmp_path, 16, data_parallel_replicate_degree=2))
    assert dict(hybrid.trace.mesh) == {"replicate": 2, "shard": 8} and hybrid.count(AllReduce) == 10
    alone, _ = planned(job_of(tmp_path, 16, data_parallel_replicate_degree=16))
    assert dict(alone.trace.mesh) == {"replicate": 16, "shard": 1} and alone.wire_bytes()["gather"] == 0
    held, _ = planned(job_of(tmp_path, 16, fsdp_reshard_after_forward="never"))
    assert held.count(Gather) == 10
    staged, _ = planned(job_of(tmp_path, 4, pipeline_parallel_degree=2, tensor_parallel_degree=2))
    assert dict(staged.trace.mesh) == {"stage": 2, "shard": 1, "tensor": 2}
    both, _ = planned(job_of(tmp_path, 16, context_parallel_degree=2, tensor_parallel_degree=2))
    assert dict(both.trace.mesh) == {"shard": 4, "context": 2, "tensor": 2}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("order", "per_stage", "homes"),
    [
        ("1F1B", 1, (0, 1, 2, 3)),
        ("GPipe", 1, (0, 1, 2, 3)),
        ("Interleaved1F1B", 2, (0, 1, 2, 3, 0, 1, 2, 3)),
        ("ZBVZeroBubble", 2, (0, 1, 2, 3, 3, 2, 1, 0)),
        ("DualPipeV", 2, (0, 1, 2, 3, 3, 2, 1, 0)),
        ("InterleavedZeroBubble", 2, (0, 1, 2, 3, 0, 1, 2, 3)),
    ],
)
def test_pipelines(order: str, per_stage: int, homes: tuple[int, ...], tmp_path: Path) -> None:
    job = job_of(tmp_path, 16, pipeline_parallel_degree=4, pipeline_parallel_schedule=order)
    program, plan = planned(job)
    split = program.trace.split
    assert split is not None and split.homes == homes and program.trace.microbatches == 8
    assert [part.count(Gather) for part in program.by_stage] == [
        part.count(Reduce) for part in program.by_stage
    ]  # once
    layers = [end - first for first, end in split.segments]
    assert sum(layers) == 10 and max(layers) - min(layers) <= 1 and 0 < plan.timeline.bubble < 1
    assert len(job.parts) == 4 * per_stage


def test_layers_as_they_are_cut(tmp_path: Path) -> None:
    few = job_of(tmp_path, 16, "8B", pipeline_parallel_degree=4, pipeline_parallel_layers_per_stage=3,
                 pipeline_parallel_schedule="LoopedBFS")  # fmt: skip
    assert len(few.parts) == 12 and few.parts[0] == ("tok_embeddings", "layers.0", "layers.1")
    uneven = job_of(tmp_path, 8, "8B", pipeline_parallel_degree=2, pipeline_parallel_first_stage_less_layers=4,
                    pipeline_parallel_last_stage_less_layers=0)  # fmt: skip
    assert [len(part) for part in uneven.parts] == [15, 20]
    names = [["tok_embeddings"], [*(f"layers.{n}" for n in range(32)), "norm", "output"]]
    by_hand = job_of(tmp_path, 8, "8B", pipeline_parallel_degree=2, module_fqns_per_model_part=names)
    split = by_hand.own().split
    assert split is not None and split.segments == ((0, 1), (1, 34))
    names[1].remove("norm")
    with pytest.raises(ValueError, match="module_fqns_per_model_part: expected norm and output in one part"):
        job_of(tmp_path, 8, "8B", pipeline_parallel_degree=2, module_fqns_per_model_part=names).own()


def test_several_runs_of_a_step(tmp_path: Path) -> None:
    training = {"local_batch_size": 2, "global_batch_size": 32, "seq_len": 4096}
    job = read(write(tmp_path / "job.toml", {"training": training}), 4)
    assert (job.accumulate, job.sequences) == (4, 32)
    program, _ = planned(job)
    assert program.trace.microbatches == 4 and program.count(Reduce) == 4 * 34
    staged = {"training": training, "parallelism": {"pipeline_parallel_degree": 2}}
    job = read(write(tmp_path / "job.toml", staged), 4)
    assert job.own().microbatches == 16
    assert job.not_modelled == ("training.global_batch_size = 32: 8 runs of the pipeline in a step: taken as one",)


# ---- the command


SMALL: Sections = {
    "training": {"local_batch_size": 4, "seq_len": 256},
    "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "activation_checkpoint": {"mode": "none"},
}


@pytest.mark.usefixtures("small")
def test_a_better_schedule_and_its_csv_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = write(tmp_path / "job.toml", SMALL, "debugmodel"), tmp_path / "rows.csv"
    arguments = ["--gpus", "4", "--cluster", "h100-80g", "--timeline", "None"]
    assert main(["--torchtitan", str(path), *arguments, "--csv", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "proved: its program of" in out and "all that the file says of a step is modelled" in out
    settings = [line.strip() for line in out.splitlines() if line.startswith("  ") and " = " in line]
    as_told = path.read_text().replace('pipeline_parallel_schedule = "1F1B"', "\n".join(settings))
    again = tmp_path / "again.toml"
    again.write_text(as_told.replace("[parallelism]", '[parallelism]\npipeline_parallel_schedule_csv = "rows.csv"'))
    told, _ = planned(read(again, 4))
    assert [list(row) for row in ya.schedules.to_actions(told).rows] == [
        line.split(",") for line in rows.read_text().splitlines()
    ]


@pytest.mark.usefixtures("small")
def test_without_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "job.toml", {"training": SMALL["training"], "compile": {"enable": True}}, "debugmodel")
    arguments = ["--torchtitan", str(path), "--gpus", "8", "--cluster", "h100-80g", "--timeline"]
    picture = tmp_path / "step.svg"
    assert main([*arguments, str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["no stages"]["step_s"] <= found["step_s"] and found["mesh"] == {"shard": 8}
    assert found["not_modelled"][0].startswith("compile.enable = true: ") and picture.is_file()
    assert main([*arguments, "None", "--csv", "rows.csv"]) == 2
    assert "has no stages: pipeline_parallel_degree is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "gpus", "message"),
    [
        (
            {"model": {"flavor": "17Bx16E"}},
            8,
            r"model 'llama3', flavor '17Bx16E': there is no config .*llama3: 8B, 70B",
        ),
        ({"model": {"name": "deepseek_v3"}}, 8, r"model 'deepseek_v3', flavor '8B'"),
        ({"parallelism": {"tensor_parallel_degree": 3}}, 8, r"do not multiply to 8 GPUs: tensor 3, context 1"),
        ({"parallelism": {"data_parallel_shard_degree": 4}}, 8, r"do not multiply to 8 GPUs: .*data_parallel_shard 4"),
        ({}, 0, r"data_parallel_shard_degree is -1, all ranks that are left: say --gpus of how many"),
        (
            {"parallelism": {"tensor_parallel_degree": "8"}},
            8,
            r"parallelism.tensor_parallel_degree: expected an int of 64 bits, got '8'",
        ),
        (
            {"parallelism": {"fsdp_reshard_after_forward": "no"}},
            8,
            r"after_forward: expected 'default' or 'always' or 'never', got 'no'",
        ),
        (
            {"parallelism": {"pipeline_parallel_schedule": "2F2B"}},
            8,
            r"_schedule: expected '1F1B' or 'GPipe' or .*, got '2F2B'",
        ),
        ({"training": {"seq_len": 0}}, 8, r"training.seq_len: expected 1 to 4,194,304, got 0"),
        ({"training": {"max_norm": "1"}}, 8, r"training.max_norm: expected a finite number, got '1'"),
        ({"training": {"seq_len": 2**80}}, 8, r"training.seq_len: expected an int of 64 bits, got 12089"),
        ({"training": {"local_batch_size": 4_000_000}}, 8, r"training.local_batch_size: expected 1 to 65,536, got 400"),
        ({"training": {"global_batch_size": 2**20}}, 8, r"16,384 microbatches of a rank; expected at most 512"),
        ({"parallelism": {"tensor_parallel_degree": 2**70}}, 8, r"tensor_parallel_degree: expected an int of 64 bits"),
        (
            {"parallelism": {"data_parallel_shard_degree": 2**16, "tensor_parallel_degree": 2**10}},
            0,
            r"the degrees multiply to 67,108,864 GPUs, expected at most 131,072: tensor 1024",
        ),
        (
            {"parallelism": {"pipeline_parallel_layers_per_stage": 0}},
            8,
            r"pipeline_parallel_layers_per_stage: expected 1 to 65,536, got 0",
        ),
        (
            {"parallelism": {"pipeline_parallel_layers_per_stage": "two"}},
            8,
            r"pipeline_parallel_layers_per_stage: expected an int of 64 bits, got 'two'",
        ),
        (
            {"parallelism": {"module_fqns_per_model_part": [[["norm"]]]}},
            8,
            r"module_fqns_per_model_part\[0\]\[0\]: expected a string, got \['norm'\]",
        ),
        ({"training": {"global_batch_size": 12}}, 8, r"global_batch_size 12 is no multiple of local_batch_size 8 x 8"),
        (
            {"parallelism": {"pipeline_parallel_microbatch_size": 3}},
            8,
            r"local_batch_size 8 is no multiple of .*size 3",
        ),
        ({"activation_checkpoint": {"mode": "some"}}, 8, r"activation_checkpoint.mode is 'some'"),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 12}},
            8,
            r"32 layers, and 1 and 1 for the ends, do not make 3 segments for 2 stages",
        ),
    ],
)
def test_what_cannot_be(sections: Sections, gpus: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "job.toml", sections), gpus)


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    more = {"training": {"batch_size": 4}, "model": {"flavor": "8B_flex"}, "experimental": {"custom_import": "x"}}
    job = read(write(tmp_path / "job.toml", more), 8)
    assert job.not_modelled == (
        "training.batch_size = 4: not known here",
        "[experimental]: not known here",
        'model.flavor = "8B_flex": attention to parts of a sequence: taken causal',
    )
    (tmp_path / "bad.toml").write_text("[model")
    for bad in (tmp_path / "bad.toml", tmp_path / "none.toml"):
        with pytest.raises(ValueError, match=r"--torchtitan .*: expected a torchtitan file in TOML"):
            read(bad, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--torchtitan", "job.toml", "--seq-len", "4096", "--search"], "leave out --seq-len, --search"),
        (["--model", "llama3-8b", "--gpus", "8", "--csv", "a.csv"], "it is for the stages of a job: give --torchtitan"),
        (["--model", "llama3-8b"], "--gpus 0: expected at least 1"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("context", [1, 2])
def test_a_job_compares_over_whatever_it_is_split(tmp_path: Path, context: int) -> None:
    """In one microbatch the head makes its gradients in its forward; over tensor it makes its logits twice."""
    file = {"model": {"name": "qwen3"}, "training": {"local_batch_size": 1, "seq_len": 4096}}
    file["parallelism"] = {"context_parallel_degree": context}
    job = read(write(tmp_path / "job.toml", file, "0.6B"), 8)
    over = {f"{trace.mesh}": ya.schedules.zero3()(trace) for trace in _over_axes(job, cluster("h100-80g"), 1)}
    assert len(over) > 3
    own = {"the file": ya.schedules.zero3()(job.own())}
    assert ya.planner.compare({**own, **over}, "h100-80g").rows.keys() == {*own, *over}


# ---- files of other people


BASES: list[Sections] = [
    SMALL,
    {"training": {"local_batch_size": 2, "seq_len": 256}, "parallelism": {"tensor_parallel_degree": 2}},
    {
        "training": {"local_batch_size": 4, "global_batch_size": 32, "seq_len": 128, "max_norm": 0.5},
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "activation_checkpoint": {"mode": "full"},
        "compile": {"enable": True},
    },
    {
        "model": {"name": "llama3", "flavor": "debugmodel"},
        "training": {"local_batch_size": 2, "seq_len": 64, "mixed_precision_reduce": "bfloat16"},
        "parallelism": {
            "data_parallel_shard_degree": 2,
            "data_parallel_replicate_degree": 2,
            "fsdp_reshard_after_forward": "never",
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_layers_per_stage": 5,
            "module_fqns_per_model_part": [
                ["tok_embeddings", *(f"layers.{n}" for n in range(4))],
                [*(f"layers.{n}" for n in range(4, 8)), "norm", "output"],
            ],
        },
    },
]
TEMPTING = (0, 1, 2, 3, 4, 8, -1, 2**17, 2**31, 2**70, 4_000_000, 0.5, "1F1B", "8", "", [], [[]], [["norm"]], {}, True)


def toml(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case float():
            return repr(value)
    return json.dumps(value)


def spoilt_toml(rng: random.Random) -> bytes:
    """A job's file with some of its settings replaced by what is tempting or odd, or its text damaged."""
    sections: Any = copy.deepcopy(rng.choice(BASES))
    sections.setdefault("model", {"name": "llama3", "flavor": "debugmodel"})
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(READ))
        key = rng.choice(READ[name]._fields) if rng.random() < 0.9 else str(rng.choice(damage.ODD))
        section = sections if rng.random() < 0.05 else sections.setdefault(name, {})
        if isinstance(section, dict):
            section[name if section is sections else key] = rng.choice(TEMPTING if rng.random() < 0.7 else damage.ODD)
    text = "".join(
        f"[{name}]\n" + "".join(f"{json.dumps(k)} = {toml(v)}\n" for k, v in keys.items())
        for name, keys in sections.items()
        if isinstance(keys, dict)
    )
    text = "".join(f"{k} = {toml(v)}\n" for k, v in sections.items() if not isinstance(v, dict)) + text
    data = text.replace(f'"{damage.DEEP}"', "[" * 3000 + "]" * 3000).encode(errors="surrogatepass")
    return damage.byte_damage(data, rng) if rng.random() < 0.15 else data


@pytest.mark.usefixtures("small")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.nightly)])
def test_damaged_files_of_jobs(tmp_path: Path, count: int) -> None:
    """Each is refused by an error that names the file, or is a step that is proved and predicted."""
    path, found = tmp_path / "job.toml", Counter[str]()
    for number in range(count):
        rng = random.Random(f"toml {number}")
        path.write_bytes(spoilt_toml(rng))
        tracemalloc.start()
        began = time.process_time()
        try:
            planned(read(path, rng.choice((8, 8, 8, 4, 0))))
            found["planned"] += 1
        except ValueError as error:
            assert len(str(error)) < 2000, number
            named = re.search(
                rf"{path.name}: (the degrees|expected a torchtitan|model |[a-z_]+(\.|\[| is|:| \d)|\d+ layers)",
                str(error),
            )
            found["refused by its field" if named else f"refused: {str(error)[:60]}"] += 1
        took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert took < 10 and peak < 500e6, number
    print(f"toml: {count} files: {dict(found)}")
    assert 0 < found["planned"] < count
