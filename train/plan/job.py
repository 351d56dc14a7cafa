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
from typing import Annotated, Any, Literal, NamedTuple

import torch

import models
import yafsdp_fn as ya
from models.parts.axes import Axes
from models.parts.config import Shape
from train.plan.step import Inside, trace_of
from yafsdp_fn.interop import from_actions
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.schedules import Assignment, Schedule, Trace
from yafsdp_fn.util.mesh_axes import MOST_RANKS
from yafsdp_fn.util.schema import Limits, shown, typed_at
from yafsdp_fn.util.torch_private import pipeline_rows

# ---- What a file may say.

MODELS = {
    "llama3": {"8B": "llama3.1-8b", "70B": "llama3.1-70b", "405B": "llama3.1-405b"},
    "qwen3": {"0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b", "4B": "qwen3-4b", "8B": "qwen3-8b"},
}
"""Flavors by model, and what they are in `models.CONFIGS`."""

Count = Annotated[int, Limits(1, 2**16)]
Degree = Annotated[int, Limits(1, MOST_RANKS)]
Few = Annotated[int, Limits(0, 2**10)]


class Model(NamedTuple):
    name: str = "llama3"
    flavor: str = "debugmodel"


class Training(NamedTuple):
    local_batch_size: Count = 8
    global_batch_size: Annotated[int, Limits(-1, 2**24)] = -1
    seq_len: Annotated[int, Limits(1, 2**22)] = 2048
    max_norm: Annotated[float, Limits(1e-9, 1e9)] = 1.0
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"


class Parallelism(NamedTuple):
    data_parallel_replicate_degree: Degree = 1
    data_parallel_shard_degree: Annotated[int, Limits(-1, MOST_RANKS)] = -1
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    tensor_parallel_degree: Degree = 1
    context_parallel_degree: Degree = 1
    pipeline_parallel_degree: Degree = 1
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    pipeline_parallel_schedule_csv: str = ""
    pipeline_parallel_microbatch_size: Count = 1
    pipeline_parallel_layers_per_stage: Count | None = None
    pipeline_parallel_first_stage_less_layers: Few = 1
    pipeline_parallel_last_stage_less_layers: Few = 1
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None


class Checkpointing(NamedTuple):
    mode: str = "selective"
    selective_ac_option: str = "2"


READ = {"model": Model, "training": Training, "parallelism": Parallelism, "activation_checkpoint": Checkpointing}
"""Settings that decide what a step does, with torchtitan's defaults and what they may be."""

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
        inside = Inside(tensor=tensor, context=context).inside
        over = Axes(tensor=tensor > 1, sequence=tensor > 1, context=context > 1)
        over.check(self.config, self.seq_len // context, inside)
        tokens = rows * microbatches, self.seq_len // context
        mesh = axes(ranks, **inside)
        return trace_of(self.config, tokens, over, 1, mesh, microbatches, self.precision, max_norm=self.max_norm)

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
        if self.shard * self.context * self.tensor == 1:
            return self._ordered(ya.schedules.ddp(remat=self.remat))
        held = self.reshard == "never" or (self.reshard == "default" and self.stages > 1)
        more = {"reshard_after_forward": not held, "wrap": "all", "remat": self.remat, "defer": self.stages > 1}
        return self._ordered(fsdp2(**more))

    def _ordered(self, inside: Schedule) -> Schedule:
        if self.stages == 1:
            return inside
        if self.csv:
            return from_actions(self.csv, inside)
        if self.order in ("1F1B", "GPipe"):  # torch's classes write no rows of these
            return {"1F1B": ya.schedules.one_f_one_b, "GPipe": ya.schedules.gpipe}[self.order](inside)
        rows = pipeline_rows(self.order, self.stages, self.runs, len(self.parts) // self.stages)
        return from_actions(rows, inside)


MOST_RUNS = 2**9
"""Microbatches of a rank in a step: each is simulated."""


def read(path: Path, gpus: int = 0) -> Job:
    """The step of a torchtitan file. gpus: all ranks; 0 where the file has the number of shards

    Raises ValueError, naming file and key, for what cannot be a step: another model, or degrees that do not multiply.
    """
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--torchtitan {path}: expected a torchtitan file in TOML: {error}") from error
    try:
        return _job(path, given, gpus)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _job(path: Path, given: dict[str, Any], gpus: int) -> Job:
    of: Model
    of, training, at, again = (_section(name, kind, given.get(name, {})) for name, kind in READ.items())
    model = MODELS.get(of.name, {}).get(of.flavor.split("_")[0])
    if model is None:
        known = "; ".join(f"{name}: {', '.join(flavors)}" for name, flavors in MODELS.items())
        asked = f"model {shown(of.name)}, flavor {shown(of.flavor)}"
        raise ValueError(f"{asked}: there is no config of it here; there are {known}")
    axes = {axis: getattr(at, f"{axis}_parallel_degree") for axis in ("tensor", "context", "pipeline")}
    axes["data_parallel_replicate"] = at.data_parallel_replicate_degree
    others = math.prod(axes.values())
    shard = at.data_parallel_shard_degree
    if shard == -1 and not gpus:
        raise ValueError("data_parallel_shard_degree is -1, all ranks that are left: say --gpus of how many")
    shard = gpus // others if shard == -1 else shard
    degrees = {**axes, "data_parallel_shard": at.data_parallel_shard_degree}
    said = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    if shard < 1 or (gpus and shard * others != gpus):
        raise ValueError(f"the degrees do not multiply to {gpus} GPUs: {said}")
    if shard * others > MOST_RANKS:
        raise ValueError(f"the degrees multiply to {shard * others:,} GPUs, expected at most {MOST_RANKS:,}: {said}")
    readers = axes["data_parallel_replicate"] * shard
    stages = axes["pipeline"]
    batch = training.local_batch_size
    whole = training.global_batch_size
    accumulate, left = divmod(whole, batch * readers) if whole > 0 else (1, 0)
    if left or not accumulate:
        raise ValueError(f"global_batch_size {whole} is no multiple of local_batch_size {batch} x {readers} ranks")
    size = at.pipeline_parallel_microbatch_size
    if batch % size:
        raise ValueError(f"local_batch_size {batch} is no multiple of pipeline_parallel_microbatch_size {size}")
    microbatches = batch // size if stages > 1 else 1
    runs = accumulate * microbatches
    if runs > MOST_RUNS:
        raise ValueError(
            f"local_batch_size {batch}, global_batch_size {whole}: {runs:,} microbatches of a rank; "
            f"expected at most {MOST_RUNS:,}"
        )
    csv = at.pipeline_parallel_schedule_csv
    remat, checkpointed, told = _checkpointed(again.mode, again.selective_ac_option)
    once = f"training.global_batch_size = {whole}: {accumulate} runs of the pipeline in a step: taken as one"
    told += [once] * (accumulate > 1 and stages > 1)
    return Job(
        path=path,
        model=model,
        gpus=shard * others,
        seq_len=training.seq_len,
        batch=batch,
        accumulate=accumulate,
        replicate=axes["data_parallel_replicate"],
        shard=shard,
        context=axes["context"],
        tensor=axes["tensor"],
        stages=stages,
        order=at.pipeline_parallel_schedule,
        csv=str(path.parent / csv) if csv and not Path(csv).is_file() else csv,
        microbatches=microbatches,
        parts=_parts(at, models.CONFIGS[model].layers, stages),
        reshard=at.fsdp_reshard_after_forward,
        remat=remat,
        checkpointed=checkpointed,
        max_norm=training.max_norm,
        precision=ya.Precision(
            compute=getattr(torch, training.mixed_precision_param),
            reduce=getattr(torch, training.mixed_precision_reduce),
        ),
        not_modelled=(*told, *_not_modelled(given, of.flavor)),
    )


def _section(name: str, kind: Any, found: Any) -> Any:
    """A section of `READ`, with torchtitan's defaults for what is not given."""
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a section of settings, got {shown(found)}")
    return typed_at(name, kind, {key: value for key, value in found.items() if key in kind._fields})


def _parts(at: Parallelism, layers: int, stages: int) -> tuple[tuple[str, ...], ...]:
    """The names of the modules of each segment of a pipeline: as given, or even in layers, as which embedding and head
    count, too."""
    if (given := at.module_fqns_per_model_part) is not None:
        if len(given) % stages or not given:
            raise ValueError(
                f"module_fqns_per_model_part: {len(given)} parts, expected as many for each of {stages} stages"
            )
        return given
    first = at.pipeline_parallel_first_stage_less_layers
    last = at.pipeline_parallel_last_stage_less_layers
    count = stages * (1 if at.pipeline_parallel_schedule in ("1F1B", "GPipe") or stages == 1 else 2)
    if (each := at.pipeline_parallel_layers_per_stage) is not None:
        count = -(-(layers + first + last) // each)
    few, more = divmod(layers + first + last, count)
    numbers = [few + (k < more) - first * (k == 0) - last * (k == count - 1) for k in range(count)]
    if min(numbers) < 0 or count % stages:
        raise ValueError(
            f"{layers} layers, and {first} and {last} for the ends, do not make {count} segments for {stages} stages"
        )
    names = iter(f"layers.{number}" for number in range(layers))
    parts = [list(itertools.islice(names, number)) for number in numbers]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return tuple(map(tuple, parts))


def _checkpointed(mode: str, option: str) -> tuple[Any, str, list[str]]:
    """The policy of layers that recompute, in words, and what of it is not modelled."""
    remat = ya.schedules.remat
    if mode == "none":
        return remat.none, "no activation checkpointing", []
    if mode == "full":
        return remat.all, "every layer recomputes", []
    if mode == "selective" and re.fullmatch("[1-9][0-9]{0,3}", option):
        return remat.every(int(option)), f"every {option}th layer recomputes", []
    if (mode, option) == ("selective", "op") or mode == "memory_budget":
        what = f'activation_checkpoint.mode = "{mode}"' + f', selective_ac_option = "{option}"' * (mode == "selective")
        return (
            remat.every(2),
            "every second layer recomputes",
            [f"{what}: parts of layers; taken as every second layer"],
        )
    raise ValueError(f"activation_checkpoint.mode is {shown(mode)}, selective_ac_option {shown(option)}")


def _not_modelled(given: dict[str, Any], flavor: str) -> Iterator[str]:
    """Names what a file says that changes a step, and is not in the prediction; and what is not known here."""
    for section, keys in given.items():
        if section in INDIFFERENT:
            continue
        if not isinstance(keys, dict) or section not in (*READ, *APART):
            yield f"[{section:.60}]: not known here"
            continue
        for key, value in keys.items():
            known = key in getattr(READ.get(section), "_fields", ()) or key in INDIFFERENT_KEYS.get(section, ())
            default, instead = APART.get(section, {}).get(key, (None, "not known here"))
            if not known and (key not in APART.get(section, {}) or value != default):
                yield f"{section}.{key:.60} = {_written(value)}: {instead}"
    if "_" in flavor:
        yield f'model.flavor = "{flavor}": attention to parts of a sequence: taken causal'


def _written(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else f'"{value:.60}"' if isinstance(value, str) else shown(value)
    )


def modules_of(visit: str) -> list[str]:
    """Torchtitan's names of the modules of a visit."""
    first, *_ = visit.split("+")  # a head that is tied visits the embedding, too
    return {"embed": ["tok_embeddings"], "head": ["norm", "output"]}.get(first) or [re.sub(r"\[(\d+)\]", r".\1", first)]
