"""The parts of a run's settings (`settings.py`): text, optimizer, sharding, mesh, adapters; how they are refused."""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

MANY = 2**31 - 1
"""The largest count that a setting takes."""


AUTO = -1
"""A setting that the text decides, before the run begins."""


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, and what to do. Shown without a traceback."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def counts(settings: Any, prefix: str = "", **least: int) -> None:
    """Refuses fields of `settings` that are not counts: `least` (by name) to `MANY`."""
    for name, low in least.items():
        value = getattr(settings, name)
        require(low <= value <= MANY, f"{prefix}{name} is {value}: expected {low} to {MANY}")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of any text."""

    seq_len: int = 256
    """Targets in a sequence, in tokens."""
    batch: int = AUTO
    """Sequences that each rank reads for one step, over all its microbatches. -1: 4, or as many as a small text has."""

    def __post_init__(self) -> None:
        counts(self, "data.", seq_len=1)
        if self.batch != AUTO:
            counts(self, "data.", batch=1)

    @property
    def usual(self) -> int:
        """The sequences of a rank and step of a text that has enough of them."""
        return 4 if self.batch == AUTO else self.batch


@dataclasses.dataclass(frozen=True)
class Tables:
    datasets: tuple[str, ...] = ()
    """Hugging Face datasets, each local files (a folder or a glob of jsonl, parquet, csv, arrow or txt, a line of which
    is a document) or a name of the hub, NAME or NAME:CONFIG."""
    column: str = "text"
    """Column of `datasets` that holds the text."""
    split: str = "train"
    """Split of `datasets` with a name."""
    heldout_files: tuple[str, ...] = ()
    """Held out: text files, or where none are read, files of a kind as for `datasets`. None given: a part of what is
    read."""
    heldout_split: str = ""
    """Held out, of `datasets` with a name: another split of them. None given: a part of what is read."""
    heldout_fraction: float = 0.05
    """The part that is held out, unless it is named: whole files by the hash of their relative paths, and documents of
    `datasets` by the hash of their text."""

    def __post_init__(self) -> None:
        require(0 <= self.heldout_fraction < 1, f"data.heldout_fraction is {self.heldout_fraction}, not in [0, 1)")
        for name in ("column", "split", "heldout_split"):
            value = getattr(self, name)
            said = f"data.{name} is {value!r}, and there are no data.datasets"
            require(bool(self.datasets) or value == getattr(type(self), name), said)
        pairs = (self.split, self.heldout_split), (self.heldout_split, self.split)
        require(
            not any(f"{part}[".startswith(f"{whole}[") for part, whole in pairs),
            f"data.heldout_split is {self.heldout_split!r}, data.split {self.split!r}: what is held out is trained on; "
            "name another split, or parts of one, as train[:95%] and train[95%:]",
        )
        held_twice = bool(self.heldout_split and self.heldout_files)
        require(not held_twice, "data.heldout_split and data.heldout_files both name the held-out text: one of them")


@dataclasses.dataclass(frozen=True)
class Sources(Tables):
    files: tuple[str, ...] = ()
    """Text files or globs (`**` descends). None given, and no `datasets`: the source text of the running Python's
    standard library."""
    streaming: bool = False
    """Read `datasets` as they come: no download, no tokens on the disk. Every rank reads all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.datasets) or not self.streaming, "data.streaming is True, and there are no data.datasets")

    @property
    def reads_files(self) -> bool:
        """Tells whether text files are among the sources."""
        return bool(self.files or not self.datasets)


@dataclasses.dataclass(frozen=True)
class Data(Rows, Sources):
    stores: tuple[str, ...] = ()
    """Documents that are tokens already, made with this tokenizer, each with its end token: PREFIX of Megatron's
    PREFIX.bin and PREFIX.idx. Held out are the last documents of each."""
    pipelines: tuple[str, ...] = ()
    """Rows that grain or torchdata make: FILE.py:NAME, your function `NAME(*, split, epoch, seed, seq_len)` to a
    MapDataset, IterDataset or DataLoader of grain, or a StatefulDataLoader of torchdata."""
    shuffle: int = 1024
    """Documents of a stream (`streaming`) that are read together and shuffled."""
    weights: tuple[float, ...] = ()
    """Shares of rows from each source, `files` (as one source), `datasets`, `stores`, `pipelines`. None given: equal
    ones."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, a folder with one (`python -m train tokenizer` makes one), or a name of the hub."""
    packing: Literal["stream", "documents"] = "stream"
    """The way from text to rows. stream: all text as one, cut into rows. documents: attention and positions begin anew
    with each document."""

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Sources.__post_init__(self)
        counts(self, "data.", shuffle=1)
        positive = all(0 < weight < float("inf") for weight in self.weights)
        require(positive, f"data.weights are {self.weights}: expected positive finite numbers")
        for pipeline in self.pipelines:
            require(is_own(pipeline), f"data.pipelines is {pipeline!r}: expected FILE.py:NAME")
        sources = len(self.datasets) + len(self.stores) + len(self.pipelines) + self.reads_files
        require(
            len(self.weights) in (0, sources),
            f"data.weights are {len(self.weights)} numbers, for {sources} sources: data.files counts as one, each of "
            "data.datasets, data.stores and data.pipelines as one",
        )
        held = bool(self.heldout_files) and not (self.datasets or self.reads_files)
        require(
            not held,
            f"data.heldout_files are {self.heldout_files}, and there is no text, only data.stores or data.pipelines",
        )
        require(self.streaming or self.shuffle == 1024, f"data.shuffle is {self.shuffle}: of data.streaming alone")

    @property
    def reads_files(self) -> bool:
        return bool(self.files or not (self.datasets or self.stores or self.pipelines))


@dataclasses.dataclass(frozen=True)
class Chats(Rows, Tables):
    column: str = "messages"
    """Column of `datasets` that holds the messages, [{"role": "user", "content": "..."}, {"role": "assistant", ...},
    ...]. No `datasets`: signatures and docstrings of the running Python's standard library."""

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Tables.__post_init__(self)
        held = bool(self.heldout_files) and not self.datasets
        require(not held, f"data.heldout_files are {self.heldout_files}, and there are no data.datasets")


Rate = Annotated[float, tyro.conf.arg(aliases=("--optim.lr",))]


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW after clipping by the global norm; linear warmup, then a decay down to `final_fraction` of the peak."""

    positive: ClassVar[tuple[str, ...]] = ("learning_rate", "clip_norm")
    not_negative: ClassVar[tuple[str, ...]] = ("final_fraction", "weight_decay")

    learning_rate: Rate = 2e-3
    """The peak."""
    warmup: int = -1
    """Steps from zero to the peak. -1: 30, or a fifth of the run where that is less."""
    decay: Literal["cosine", "wsd"] = "cosine"
    """The decay's shape. cosine: from the end of the warmup on. wsd (warmup, stable, decay): at the peak, then in a
    line over the last `decay_steps`; a run can be resumed from the stable part with more steps."""
    decay_steps: int = 0
    """Steps of wsd's decay; 0: a fifth of the run, a step at least."""
    final_fraction: float = 0.05
    """Learning rate after the last step, over the peak."""
    b1: float = 0.9
    """Decay of the mean gradient."""
    b2: float = 0.95
    """Decay of the mean squared gradient."""
    weight_decay: float = 0.1
    """Decay of matrices only: leaves with one axis (the norms' weights) are left out."""
    clip_norm: float = 1.0
    """Gradients with a larger norm, over all parameters and ranks, are scaled down to it."""
    moments: Literal["whole", "int8", "host"] = "whole"
    """Moments in float32, in 8 bits by blocks (docs/formats.md), or in float32 on the host (docs/optimizers.md)."""

    def __post_init__(self) -> None:
        for name in self.positive:
            value = getattr(self, name)
            require(0 < value < float("inf"), f"optim.{name} is {value}, not a positive finite number")
        for name in self.not_negative:
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"optim.{name} is {value}, not a finite number of at least 0")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} is {value}: a decay, in [0, 1)")
        counts(self, "optim.", warmup=-1, decay_steps=0)
        require(
            self.decay == "wsd" or self.decay_steps == 0,
            f"optim.decay_steps is {self.decay_steps}, optim.decay {self.decay}: only wsd takes it",
        )

    def decays(self, steps: int) -> int:
        """Steps of wsd's decay in a run of `steps`."""
        return self.decay_steps or max(1, steps // 5)


@dataclasses.dataclass(frozen=True)
class TuningOptim(Optim):
    positive = ("clip_norm",)
    not_negative = (*Optim.not_negative, "learning_rate")

    learning_rate: Rate = 0.0
    """The peak. 0: that of the run it starts from; of a Hugging Face directory 2e-5, and 2e-4 for adapters."""
    weight_decay: float = 0.0
    """Decay of matrices only: leaves with one axis (the norms' weights) are left out."""


SCHEDULES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")


SAVED = "saved"


def is_own(named: str) -> bool:
    """Tells whether a function in somebody's file is named: FILE.py:NAME."""
    return re.fullmatch(r".+\.py:[^\W\d]\w*", named) is not None


def own_function(where: str, setting: str, expected: str) -> Callable[..., Any]:
    """The function FILE.py:NAME. The file is run."""
    path, _, name = where.rpartition(":")
    require(Path(path).is_file(), f"{setting}: there is no file {path}")
    # a module while it runs, which dataclasses ask for; of no name that it may import, as datasets.py may datasets
    found: Callable[..., Any] | None = runpy.run_path(path, run_name=Path(path).name).get(name)
    if not callable(found):
        raise ConfigError(f"{setting}: {path} has no function {name}; expected {expected}")
    return found


@dataclasses.dataclass(frozen=True)
class Sharding:
    schedule: str = "zero3"
    """zero3: layers take turns in two slots; zero2: each keeps its own from the forward to the backward; zero1: reduces
    once a step, too; ddp: every rank holds everything; hsdp: zero3 in each of --sharding.replicate groups; hpz: zero3
    with second gathers inside the nodes of --sharding.local ranks. FILE.py:NAME: your function from a trace to a
    program. saved: the program in the checkpoint, with --resume."""
    replicate: int = 1
    """Groups of ranks that each hold the whole state (hsdp); all ranks for ddp, which needs no value here."""
    local: int = 0
    """Ranks per node, for hpz; 0: nodes are not told apart."""
    update: bool = False
    """The optimizer's step is part of the program, so that the next step's first gathers overlap with it."""
    pin_norms: bool = False
    """The norms' weights of all layers form one unit, gathered once a step."""
    remat: str = "none"
    """Layers that the backward recomputes: none, all, first:N or every:N layers. offload: all, and the host keeps what
    they are computed from."""
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
    wire: Literal["none", "int8", "int8-both", "int8-stochastic", "float8"] = "none"
    """Format in which the layers' matrices travel (docs/formats.md). int8: weights, or weights and gradients, rounded
    to the nearest number or stochastically. float8: weights, which multiply so, too."""

    def __post_init__(self) -> None:
        counts(self, "sharding.", replicate=1, local=0, microbatches=1, chunks=1)
        own = is_own(self.schedule) or self.schedule == SAVED
        what = f"sharding.schedule is {self.schedule!r:.80}"
        require(own or self.schedule in SCHEDULES, f"{what}: {', '.join(SCHEDULES)}, FILE.py:NAME or {SAVED}")
        plain = self.remat == "none" and not self.update
        require(plain or not own, f"{what}, which decides itself about --sharding.remat and --sharding.update")
        require(
            own or (self.schedule == "hsdp") == (self.replicate > 1),
            f"sharding.replicate is {self.replicate}, sharding.schedule {self.schedule}: hsdp, and only hsdp, takes "
            "two or more groups",
        )
        require(
            own or (self.schedule == "hpz") == (self.local > 0),
            f"sharding.local is {self.local}, sharding.schedule {self.schedule}: hpz, and only hpz, takes the number "
            "of ranks per node",
        )
        require(
            not self.accumulate or self.reduce == "bfloat16",
            "sharding.accumulate is for sharding.reduce bfloat16: float32 gradients are summed in float32 anyway",
        )
        kind, colon, count = self.remat.partition(":")
        require(
            self.chunks == 1 or kind == "none",
            f"sharding.remat is {self.remat}, sharding.chunks {self.chunks}: chunks are recomputed anyway, and a layer "
            "recomputed for both would run its forward a third time; --sharding.remat none",
        )
        number = int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0
        ok = number > 0 if kind in ("first", "every") else kind in ("none", "all", "offload") and not colon
        require(ok, f"sharding.remat is {self.remat!r}: none, all, offload, first:N or every:N, N at least 1")


Order = Literal["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "v_shaped", "v_half", "v_min"]


@dataclasses.dataclass(frozen=True)
class Inside:
    """The axes inside of layers."""

    tensor: int = 1
    """Ranks that a layer is split over: heads, features and the vocabulary. Neighbours, so inside of a machine."""
    sequence: bool = False
    """Ranks of --mesh.tensor have a part of the positions each between sublayers."""
    context: int = 1
    """Ranks that each sequence is split over."""

    def __post_init__(self) -> None:
        counts(self, "mesh.", tensor=1, context=1)
        require(not self.sequence or self.tensor > 1, "mesh.sequence is of the ranks of mesh.tensor: give two or more")

    @property
    def inside(self) -> dict[str, int]:
        """The axes as `ya.mesh` takes them; those of one rank are left out."""
        return {name: ranks for name in ("expert", "context", "tensor") if (ranks := getattr(self, name, 1)) > 1}

    @property
    def words(self) -> list[str]:
        """These axes, each with its ranks."""
        return [f"{name} {ranks}" for name, ranks in self.inside.items()]


@dataclasses.dataclass(frozen=True)
class Mesh(Inside):
    stage: int = 1
    """Stages of a pipeline, each with some of the layers and as many ranks; 1: none. Best with several times as many
    --sharding.microbatches. No timeline of a step is recorded."""
    order: Order = "one_f_one_b"
    """The order of computes. interleaved and v_: of two runs of layers; zero_bubble and v_: gradients of weights
    fill the gaps; v_half and v_min: in less memory."""
    expert: int = 1
    """Ranks that the experts of a layer are split over, each with rows of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, "mesh.", stage=1, expert=1)
        require(self.stage > 1 or self.order == Mesh.order, f"mesh.order is {self.order}, and mesh.stage 1: no stages")

    @property
    def alike(self) -> int:
        """Ranks that work on the same rows."""
        return self.stage * self.tensor * self.context

    @property
    def named(self) -> str:
        """The words before the schedule, in a line for people."""
        stages = "" if self.stage == 1 else f"{self.stage} stages {self.order} of "
        return stages + "".join(f"{axis}, " for axis in self.words)

    @property
    def said(self) -> str:
        """These axes, in a message."""
        return ", ".join(f"mesh.{name} is {ranks}" for name, ranks in self.inside.items())

    def check(self, sharding: Sharding) -> None:
        """Refuses what does not go with several stages, or with axes inside of layers."""
        inside = self.tensor * self.context
        require(
            sharding.local % inside == 0,
            f"sharding.local is {sharding.local}, mesh.context {self.context}, mesh.tensor {self.tensor}: a node has a "
            f"multiple of {inside} ranks, since these axes are inside of nodes",
        )
        if self.stage == 1:
            return
        what = f"mesh.stage is {self.stage}"
        own = is_own(sharding.schedule)
        require(not own, f"{what}, sharding.schedule {sharding.schedule}: one of the library's, or {SAVED}")
        require(
            sharding.chunks == 1,
            f"{what}, sharding.chunks {sharding.chunks}: layer-major microbatches would go through all stages layer by "
            "layer; --sharding.microbatches are what stages work on at once",
        )
        require(
            sharding.remat != "offload", f"{what}, sharding.remat offload: a stage keeps none on the host; take all"
        )


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank pairs beside frozen weights, in place of training all of them."""

    rank: int = 0
    """Rank of the pairs beside each matrix of the layers; 0: none, all weights are trained."""
    alpha: float = 0.0
    """A pair counts alpha / rank times; 0: once."""
    where: tuple[str, ...] = ()
    """Ends of the names of matrices that get a pair, such as q_proj.weight. None given: all matrices of the layers."""
    stored: Literal["compute", "bfloat16", "int8"] = "compute"
    """Dtype that the chosen matrices are stored and gathered in; compute: that of --sharding.compute."""

    def __post_init__(self) -> None:
        counts(self, "lora.", rank=0)
        require(0 <= self.alpha < float("inf"), f"lora.alpha is {self.alpha}: a number of at least 0")
        given = [name for name in ("alpha", "where", "stored") if getattr(self, name) != getattr(Lora, name)]
        require(self.rank > 0 or not given, f"lora.{', lora.'.join(given)}: without lora.rank there are no pairs")
