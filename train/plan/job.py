"""The step that a torchtitan job runs, from its TOML file: the model, the mesh, and FSDP2 or a pipeline as a schedule.

    job = read(path, gpus)              what the file says of the step, and what of it is not modelled
    trace = job.own()                   on the job's mesh, and on its stages
    program = job.schedule()(trace)     FSDP2, HSDP or DDP inside of each stage; torch's rows of calls over stages

Keys are those of torchtitan's job_config in its last version with TOML files (February 2026).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import models
import yafsdp_fn as ya
from models.parts.axes import Axes
from models.parts.config import Shape
from yafsdp_fn.planner import trace
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.schedules import Assignment, Schedule, Trace
from yafsdp_fn.util.torch_private import pipeline_rows

# ---- What a file may say.

MODELS = {
    "llama3": {"8B": "llama3.1-8b", "70B": "llama3.1-70b", "405B": "llama3.1-405b"},
    "qwen3": {"0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b", "4B": "qwen3-4b", "8B": "qwen3-8b"},
}
"""Flavors by model, and what they are in `models.CONFIGS`."""

READ: dict[str, dict[str, Any]] = {
    "model": {"name": "llama3", "flavor": "debugmodel"},
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "max_norm": 1.0,
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "module_fqns_per_model_part": None,
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
}
"""Settings that decide what a step does, with torchtitan's defaults."""

CHOICES = {
    "mixed_precision_param": ("bfloat16", "float32"),
    "mixed_precision_reduce": ("float32", "bfloat16"),
    "fsdp_reshard_after_forward": ("default", "always", "never"),
    "pipeline_parallel_schedule": (
        *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    ),
}
LEAST = {"data_parallel_shard_degree": -1, "global_batch_size": -1}
LEAST |= {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
"""The values that settings may have; integers are at least 1."""

APART: dict[str, dict[str, tuple[Any, str]]] = {
    "model": {"converters": ([], "products, and gathers, in other dtypes: all are taken in bf16")},
    "training": {
        "dtype": ("float32", "parameters and moments in that dtype: taken in float32"),
        "enable_cpu_offload": (False, "parameters and moments on the host: taken on the GPU"),
    },
    "parallelism": {
        "enable_async_tensor_parallel": (False, "collectives behind the products of a layer: a layer waits for each"),
        "disable_loss_parallel": (False, "a loss on whole rows of logits: taken split over tensor"),
        "context_parallel_load_balancer": ("headtail", "another deal of sequences: taken even"),
        "context_parallel_rotate_method": ("allgather", "keys and values travel another way: taken as in docs/axes.md"),
        "expert_parallel_degree": (1, "experts: the model has none"),
    },
    "compile": {
        "enable": (False, "kernels that are compiled: their time is that of eager ones, fused attention apart")
    },
    "optimizer": {"name": ("AdamW", "another optimizer: taken as AdamW")},
}
"""Settings that change a step and are not modelled: the value without them, and what is taken instead."""

INDIFFERENT = ("job", "profiling", "metrics", "lr_scheduler", "checkpoint", "validation", "comm", "debug", "quantize")
INDIFFERENT_KEYS = {
    "model": ("hf_assets_path", "tokenizer_path", "print_after_conversion"),
    "training": ("steps", "dataset", "dataset_path", "seed", "deterministic", "gc_freq", "gc_debug", "dataloader"),
    "parallelism": ("pipeline_parallel_expert_parallel_overlap", "expert_tensor_parallel_degree"),
    "activation_checkpoint": ("early_stop", "preserve_rng_state", "determinism_check", "debug"),
    "compile": ("components", "backend"),
    "optimizer": ("lr", "eps", "beta1", "beta2", "weight_decay", "implementation"),
}
"""Sections, and keys of others, that say nothing of how a step is scheduled; `quantize` says how a converter works."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step of torchtitan.

    model: in `models.CONFIGS`; replicate, shard, context, tensor, stages: ranks of each axis, `shard` without context
    batch: sequences of a forward and backward of a rank, over all microbatches of a pipeline
    accumulate: forwards and backwards of a step; microbatches: of the pipeline; order, csv: of it; parts: names of the
        modules of each segment
    reshard: `fsdp_reshard_after_forward`; not_modelled: what the file says beyond all that
    """

    path: Path
    model: str
    gpus: int
    seq_len: int
    batch: int
    accumulate: int
    replicate: int
    shard: int
    context: int
    tensor: int
    stages: int
    order: str
    csv: str
    microbatches: int
    parts: tuple[tuple[str, ...], ...]
    reshard: str
    remat: Any
    checkpointed: str
    max_norm: float
    precision: ya.Precision
    not_modelled: tuple[str, ...]

    @property
    def config(self) -> Shape:
        found: Shape = models.CONFIGS[self.model]
        return found

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.batch * self.accumulate * self.replicate * self.shard

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def runs(self) -> int:
        """Microbatches of a rank in a step."""
        return self.accumulate * self.microbatches

    @property
    def rows(self) -> int:
        """Sequences of a microbatch."""
        return self.batch // self.microbatches

    def traced(self, context: int, tensor: int, rows: int, microbatches: int, ranks: int) -> Trace:
        """The step over these axes, on `ranks` ranks of a stage, in microbatches of so many sequences."""
        inside = {name: size for name, size in (("context", context), ("tensor", tensor)) if size > 1}
        over = Axes(tensor=tensor > 1, sequence=tensor > 1, context=context > 1)
        over.check(self.config, self.seq_len // context, inside)
        tokens = torch.empty((rows * microbatches, self.seq_len // context), dtype=torch.int64, device="meta")
        return trace(
            models.of(self.config).loss(self.config, axes=over),
            models.of(self.config).params(self.config, **over.options),
            {"tokens": tokens, "targets": tokens},
            mesh=axes(ranks, **inside),
            precision=self.precision,
            microbatches=microbatches,
            tx=ya.optim.chain(ya.optim.clip_by_global_norm(self.max_norm), ya.optim.adamw(3e-4)),
        )

    def own(self) -> Trace:
        """The trace of the file's step, on the file's mesh."""
        found = self.traced(self.context, self.tensor, self.rows, self.runs, self.gpus // self.stages)
        replicas = (("replicate", self.replicate),) * (self.replicate > 1)
        mesh = (*replicas, ("shard", self.shard), *found.inside)
        if self.stages == 1:
            return found.on(mesh)
        return ya.schedules.cut(found.on((("stage", self.stages), *mesh)), self.assignment(found))

    def assignment(self, trace: Trace) -> Assignment:
        """The segments, as torchtitan cuts them: by the names of modules, or even in layers."""
        of = {name: segment for segment, names in enumerate(self.parts) for name in names}
        at: list[int] = []
        for visit in trace.visits:
            found = {of.get(name) for name in modules_of(visit.name)}
            if None in found or len(found) != 1:
                names = " and ".join(modules_of(visit.name))
                raise ValueError(f"{self.path}: module_fqns_per_model_part: expected {names} in one part")
            at += [segment for segment in found if segment is not None]
        units = [tuple(sorted({at[v.id] for v in trace.visits if unit.id in v.units})) for unit in trace.units]
        stages = range(self.stages)
        v = self.order in ("ZBVZeroBubble", "DualPipeV")
        homes = (*stages, *reversed(stages)) if v else (*stages,) * (len(self.parts) // self.stages)
        return Assignment(tuple(units), homes)

    def schedule(self, fsdp2: Callable[..., Schedule] = ya.schedules.fsdp2) -> Schedule:
        """The schedule of the step. fsdp2: of the weights of a stage, `peers.fsdp2` to be predicted"""
        if self.shard * self.context == 1:
            return self._ordered(ya.schedules.ddp(remat=self.remat))
        held = self.reshard == "never" or (self.reshard == "default" and self.stages > 1)
        more = {"reshard_after_forward": not held, "wrap": "all", "remat": self.remat, "defer": self.stages > 1}
        return self._ordered(fsdp2(**more))

    def _ordered(self, inside: Schedule) -> Schedule:
        if self.stages == 1:
            return inside
        if self.csv:
            return ya.schedules.from_actions(self.csv, inside)
        if self.order in ("1F1B", "GPipe"):  # torch's classes write no rows of these
            return {"1F1B": ya.schedules.one_f_one_b, "GPipe": ya.schedules.gpipe}[self.order](inside)
        rows = pipeline_rows(self.order, self.stages, self.runs, len(self.parts) // self.stages)
        return ya.schedules.from_actions(rows, inside)


def read(path: Path, gpus: int = 0) -> Job:
    """The step of a torchtitan file. gpus: all ranks; 0 where the file has the number of shards

    Raises ValueError, naming file and key, for what cannot be a step: another model, or degrees that do not multiply.
    """
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--torchtitan {path}: expected a torchtitan file in TOML: {error}") from error
    of, training, at, again = _settings(path, given)
    name, flavor = of["name"], of["flavor"]
    model = MODELS.get(name, {}).get(flavor.split("_")[0])
    if model is None:
        known = "; ".join(f"{name}: {', '.join(flavors)}" for name, flavors in MODELS.items())
        raise ValueError(f"{path}: model {name!r}, flavor {flavor!r}: there is no config of it here; there are {known}")
    axes = {axis: at[f"{axis}_parallel_degree"] for axis in ("tensor", "context", "pipeline")}
    axes["data_parallel_replicate"] = at["data_parallel_replicate_degree"]
    others, shard = math.prod(axes.values()), at["data_parallel_shard_degree"]
    if shard == -1 and not gpus:
        raise ValueError(f"{path}: data_parallel_shard_degree is -1, all ranks that are left: say --gpus of how many")
    shard = gpus // others if shard == -1 else shard
    if shard < 1 or (gpus and shard * others != gpus):
        degrees = {**axes, "data_parallel_shard": at["data_parallel_shard_degree"]}
        said = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise ValueError(f"{path}: the degrees do not multiply to {gpus} GPUs: {said}")
    readers, stages = axes["data_parallel_replicate"] * shard, axes["pipeline"]
    batch, whole = training["local_batch_size"], training["global_batch_size"]
    accumulate, left = divmod(whole, batch * readers) if whole > 0 else (1, 0)
    if left or not accumulate:
        raise ValueError(
            f"{path}: global_batch_size {whole} is no multiple of local_batch_size {batch} x {readers} ranks"
        )
    size = at["pipeline_parallel_microbatch_size"]
    if batch % size:
        raise ValueError(f"{path}: local_batch_size {batch} is no multiple of pipeline_parallel_microbatch_size {size}")
    csv = at["pipeline_parallel_schedule_csv"]
    remat, checkpointed, told = _checkpointed(path, again["mode"], str(again["selective_ac_option"]))
    once = f"training.global_batch_size = {whole}: {accumulate} runs of the pipeline in a step: taken as one"
    told += [once] * (accumulate > 1 and stages > 1)
    return Job(
        path=path,
        model=model,
        gpus=shard * others,
        seq_len=training["seq_len"],
        batch=batch,
        accumulate=accumulate,
        replicate=axes["data_parallel_replicate"],
        shard=shard,
        context=axes["context"],
        tensor=axes["tensor"],
        stages=stages,
        order=at["pipeline_parallel_schedule"],
        csv=str(path.parent / csv) if csv and not Path(csv).is_file() else csv,
        microbatches=batch // size if stages > 1 else 1,
        parts=_parts(path, at, models.CONFIGS[model].layers, stages),
        reshard=at["fsdp_reshard_after_forward"],
        remat=remat,
        checkpointed=checkpointed,
        max_norm=float(training["max_norm"]),
        precision=ya.Precision(
            compute=getattr(torch, training["mixed_precision_param"]),
            reduce=getattr(torch, training["mixed_precision_reduce"]),
        ),
        not_modelled=(*told, *_not_modelled(given)),
    )


def _settings(path: Path, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sections of `READ`, with torchtitan's defaults for what is not given."""
    for section, keys in READ.items():
        found = given.get(section, {})
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {section} is {found!r:.60}: expected a section of settings")
        for key, default in keys.items():
            value, choices, least = found.get(key, default), CHOICES.get(key), LEAST.get(key, 1)
            if choices:
                right, expected = value in choices, f"one of {', '.join(choices)}"
            elif isinstance(default, int):
                right, expected = type(value) is int and value >= least, f"an integer of at least {least}"
            elif isinstance(default, float):
                right, expected = type(value) in (int, float) and value > 0, "a number above 0"
            elif isinstance(default, str) and key != "selective_ac_option":
                right, expected = isinstance(value, str), "a string"
            else:  # of several types, or none: looked at where it is used
                right, expected = True, ""
            if not right:
                raise ValueError(f"{path}: {section}.{key} is {value!r:.60}: expected {expected}")
        yield {**keys, **found}


def _parts(path: Path, at: dict[str, Any], layers: int, stages: int) -> tuple[tuple[str, ...], ...]:
    """The names of the modules of each segment of a pipeline: as given, or even in layers, as which embedding and head
    count, too."""
    if (given := at["module_fqns_per_model_part"]) is not None:
        if not isinstance(given, list) or len(given) % stages or not all(isinstance(part, list) for part in given):
            raise ValueError(f"{path}: module_fqns_per_model_part: expected lists of names, as many for each stage")
        return tuple(map(tuple, given))
    first, last = (at[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    count = stages * (1 if at["pipeline_parallel_schedule"] in ("1F1B", "GPipe") or stages == 1 else 2)
    if (each := at["pipeline_parallel_layers_per_stage"]) is not None:
        count = -(-(layers + first + last) // each)
    few, more = divmod(layers + first + last, count)
    numbers = [few + (k < more) - first * (k == 0) - last * (k == count - 1) for k in range(count)]
    if min(numbers) < 0 or count % stages:
        raise ValueError(
            f"{path}: {layers} layers, and {first} and {last} for the ends, do not make {count} segments "
            f"for {stages} stages"
        )
    names = iter(f"layers.{number}" for number in range(layers))
    parts = [list(itertools.islice(names, number)) for number in numbers]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return tuple(map(tuple, parts))


def _checkpointed(path: Path, mode: str, option: str) -> tuple[Any, str, list[str]]:
    """The policy of layers that recompute, in words, and what of it is not modelled."""
    remat = ya.schedules.remat
    if mode == "none":
        return remat.none, "no activation checkpointing", []
    if mode == "full":
        return remat.all, "every layer recomputes", []
    if mode == "selective" and option.isdecimal() and int(option) > 0:
        return remat.every(int(option)), f"every {option}th layer recomputes", []
    if (mode, option) == ("selective", "op") or mode == "memory_budget":
        what = f'activation_checkpoint.mode = "{mode}"' + f', selective_ac_option = "{option}"' * (mode == "selective")
        return (
            remat.every(2),
            "every second layer recomputes",
            [f"{what}: parts of layers; taken as every second layer"],
        )
    raise ValueError(f"{path}: activation_checkpoint.mode is {mode!r}, selective_ac_option {option!r}")


def _not_modelled(given: dict[str, Any]) -> Iterator[str]:
    """Names what a file says that changes a step, and is not in the prediction; and what is not known here."""
    for section, keys in given.items():
        if section in INDIFFERENT:
            continue
        if not isinstance(keys, dict) or section not in (*READ, *APART):
            yield f"[{section}]: not known here"
            continue
        for key, value in keys.items():
            known = key in READ.get(section, {}) or key in INDIFFERENT_KEYS.get(section, ())
            default, instead = APART.get(section, {}).get(key, (None, "not known here"))
            if not known and (key not in APART.get(section, {}) or value != default):
                yield f"{section}.{key} = {_written(value)}: {instead}"
    flavor = given.get("model", {}).get("flavor", "")
    if "_" in flavor:
        yield f'model.flavor = "{flavor}": attention to parts of a sequence: taken causal'


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def modules_of(visit: str) -> list[str]:
    """Torchtitan's names of the modules of a visit."""
    first, *_ = visit.split("+")  # a head that is tied visits the embedding, too
    return {"embed": ["tok_embeddings"], "head": ["norm", "output"]}.get(first) or [re.sub(r"\[(\d+)\]", r".\1", first)]
