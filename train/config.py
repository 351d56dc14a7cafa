"""What a run is made of: frozen dataclasses, from the command line (tyro) and from `config.json` (resume, sample)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, and what to do. Shown without a traceback."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class Data:
    files: tuple[str, ...] = ()
    """Text files or globs (`**` descends). None given: the source text of the running Python's standard library."""
    heldout_files: tuple[str, ...] = ()
    """Held-out text. None given: a part of `files`, whole files chosen by the hash of their relative paths."""
    heldout_fraction: float = 0.05
    """Which part of `files` is held out, unless `heldout_files` names them."""
    seq_len: int = 256
    """Targets in a sequence, in bytes."""
    batch: int = 4
    """Sequences that each rank reads for one step, over all its microbatches."""

    def __post_init__(self) -> None:
        require(0 <= self.heldout_fraction < 1, f"data.heldout_fraction is {self.heldout_fraction}, not in [0, 1)")
        require(self.seq_len > 0, f"data.seq_len is {self.seq_len}: a sequence needs at least one byte")
        require(self.batch > 0, f"data.batch is {self.batch}: a step needs at least one sequence a rank")


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW after clipping by the global norm; linear warmup, then a cosine down to `final_fraction` of the peak."""

    learning_rate: float = 2e-3
    """The peak."""
    warmup: int = 30
    """Steps from zero to the peak."""
    final_fraction: float = 0.05
    """Learning rate after the last step, over the peak."""
    b1: float = 0.9
    """Decay of the mean gradient."""
    b2: float = 0.95
    """Decay of the mean squared gradient."""
    weight_decay: float = 0.1
    """On matrices only: leaves with one axis (the norms' weights) are left out."""
    clip_norm: float = 1.0
    """Gradients with a larger norm, over all parameters and ranks, are scaled down to it."""

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"optim.learning_rate is {self.learning_rate}, not positive")
        require(self.warmup >= 0, f"optim.warmup is {self.warmup}, a number of steps cannot be negative")
        require(self.clip_norm > 0, f"optim.clip_norm is {self.clip_norm}, not positive")


@dataclasses.dataclass(frozen=True)
class Sharding:
    schedule: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hpz"] = "zero3"
    """zero3: layers take turns in two slots; zero2: each keeps its own from the forward to the backward; zero1: reduces
    once a step, too; ddp: every rank holds everything; hsdp: zero3 in each of --sharding.replicate groups; hpz: zero3
    with second gathers inside the nodes of --sharding.local ranks."""
    replicate: int = 1
    """Groups of ranks that each hold the whole state (hsdp); all ranks for ddp, which needs no value here."""
    local: int = 0
    """Ranks per node, for hpz; 0: nodes are not told apart."""
    update: bool = False
    """The optimizer's step is part of the program, so that the next step's first gathers overlap with it."""
    pin_norms: bool = False
    """The norms' weights of all layers form one unit, gathered once a step."""
    remat: str = "none"
    """What the backward recomputes: none, all, first:N or every:N layers. offload: all, and the host keeps what they
    are computed from."""
    microbatches: int = 1
    """Parts that a rank's batch is cut into; their gradients add up."""
    chunks: int = 1
    """Microbatches in layer-major order: each layer is gathered once for all of them. The backward computes each layer
    again, so remat stays none. With microbatches > 1, the chunks of each of those."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gathered weights and of compute; the master weights stay float32."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients on the wire."""
    accumulate: bool = False
    """Sum bfloat16 gradients in float32, in the order of ranks."""

    def __post_init__(self) -> None:
        require(self.replicate > 0, f"sharding.replicate is {self.replicate}: at least 1")
        require(self.local >= 0, f"sharding.local is {self.local}, a number of ranks cannot be negative")
        require(
            (self.schedule == "hsdp") == (self.replicate > 1),
            f"sharding.replicate is {self.replicate}, sharding.schedule {self.schedule}: hsdp, and only hsdp, takes "
            "two or more groups",
        )
        require(
            (self.schedule == "hpz") == (self.local > 0),
            f"sharding.local is {self.local}, sharding.schedule {self.schedule}: hpz, and only hpz, takes the number "
            "of ranks per node",
        )
        require(
            not self.accumulate or self.reduce == "bfloat16",
            "sharding.accumulate is for sharding.reduce bfloat16: float32 gradients are summed in float32 anyway",
        )
        require(self.microbatches > 0, f"sharding.microbatches is {self.microbatches}: at least 1")
        kind, _, count = self.remat.partition(":")
        require(self.chunks > 0, f"sharding.chunks is {self.chunks}: at least 1")
        require(
            self.chunks == 1 or kind == "none",
            f"sharding.remat is {self.remat}, sharding.chunks {self.chunks}: chunks are recomputed anyway, and a layer "
            "recomputed for both would run its forward a third time; --sharding.remat none",
        )
        ok = (kind in ("none", "all", "offload") and not count) or (kind in ("first", "every") and count.isdigit())
        require(ok, f"sharding.remat is {self.remat!r}: none, all, offload, first:N or every:N")


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a causal language model on text, a byte a token."""

    name: str = ""
    """The run writes into runs/NAME. None given: clm-DATE-TIME, or with --resume the newest run."""
    resume: bool = False
    """Continue from the last checkpoint of this run. Its config.json gives the defaults of all other flags."""
    runs: Path = Path("runs")
    """Where runs are written."""
    model: str = "debug"
    """A name in models.llama.CONFIGS."""
    steps: int = 200
    """Of the whole run, also of a resumed one."""
    seed: int = 0
    """Of the initial values and of the order of the text."""
    data: Data = Data()
    optim: Optim = Optim()
    sharding: Sharding = Sharding()
    eval_every: int = 100
    """Steps between held-out losses, which are also taken before the first step and after the last; 0: none at all."""
    eval_batches: int = 16
    """At most so many batches (of all ranks) give a held-out loss."""
    checkpoint_every: int = 100
    """Steps between checkpoints, besides one after the last step; 0: only that one."""
    keep: int = 2
    """Checkpoints kept, the newest."""
    log_every: int = 10
    """Steps between printed lines where standard output is not a terminal. metrics.jsonl has every step."""
    timeout: float = 600.0
    """Seconds a collective may take before its op is reported and the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    def __post_init__(self) -> None:
        require(self.steps > 0, f"steps is {self.steps}: at least 1")
        require(self.keep > 0, f"keep is {self.keep}: at least the newest checkpoint stays")
        require(self.eval_every == 0 or self.eval_batches > 0, "eval_batches is 0: for no evaluation, --eval-every 0")
        require(self.log_every > 0, f"log_every is {self.log_every}: at least 1")
        require(self.timeout > 0, f"timeout is {self.timeout} seconds, not positive")
        m, n, b = self.sharding.microbatches, self.sharding.chunks, self.data.batch
        parts = f"sharding.microbatches {m}" + f" of sharding.chunks {n}" * (n > 1)
        require(b % (m * n) == 0, f"data.batch {b} does not divide into {parts}")
        require(
            self.optim.warmup < self.steps,
            f"optim.warmup {self.optim.warmup} is not shorter than the run, steps {self.steps}",
        )
        require("/" not in self.name, f"name is {self.name!r}: a folder's name inside --runs, without /")


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(path: Path) -> Config:
    """The config of an earlier run."""
    try:
        return _build(Config, json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: not a folder that `python -m train clm` made?") from None
    except (json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as the config of a run: {error}") from None


def _build(cls: type[T], values: dict[str, Any]) -> T:
    """A (nested) dataclass from what JSON kept of it."""
    kinds = {field.name: type(getattr(cls(), field.name)) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := values.keys() - kinds.keys():
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    made = {
        name: _build(kinds[name], value) if dataclasses.is_dataclass(kinds[name]) else kinds[name](value)
        for name, value in values.items()
    }
    return cls(**made)


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """`{dotted field: (old value, new value)}` of two configs of one type."""
    out: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(new):
        a, b = getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(b):
            out |= differences(a, b, f"{prefix}{field.name}.")
        elif a != b:
            out[prefix + field.name] = (a, b)
    return out
