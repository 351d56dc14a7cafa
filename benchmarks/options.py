"""The options of all commands, and the models that are timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from benchmarks import names
from benchmarks.shapes import SHAPES, Shape
from train import schedule_names

Device = Literal["cpu", "cuda"]
ConfigName = Literal["A", "B", "C", "tiny"]

MALLOC_TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc keeps freed memory instead of giving it back, so a fresh weight-sized buffer costs no page faults. A peer that
allocates every step gains most: quote ratios with and without."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every command that times or counts."""

    json: bool = False
    """Print JSON alone on stdout instead of the table."""
    save: Path | None = None
    """Also write the JSON to this file."""


@dataclasses.dataclass(frozen=True)
class Timed(Options):
    """The options of every command whose rank processes take turns."""

    steps: int = 20
    """Timed rounds; in each round every contender does one step."""
    warmup: int = 3
    """Rounds before that; ours traces in the first and builds its program for the second."""
    timeout: float = 900.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        if self.steps < 2 or self.warmup < 2:
            raise ValueError(
                f"--steps {self.steps} --warmup {self.warmup}: expected at least 2 each (spreads need two steps, and "
                "the first two steps of ours trace and build)"
            )

    @property
    def turns(self) -> dict[str, Any]:
        """The arguments of `harness.run` that are options."""
        return {"steps": self.steps, "warmup": self.warmup, "timeout": self.timeout}


@dataclasses.dataclass(frozen=True)
class OfModel(Timed):
    """The options of a command that times one of the models."""

    config: ConfigName = "A"
    """The model: A is dim 512 with 256 tokens twice, B dim 1024 with 64 tokens, C dim 128 with 32 tokens; 8 layers."""
    layers: int = 0
    """Layers of the model; 0: the config's (8; tiny: 3)."""
    batch: int = 0
    """Sequences per rank; 0: the config's (A, tiny: 2; B, C: one)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 0 or self.layers < 0:
            raise ValueError(f"--batch {self.batch} --layers {self.layers}: expected a number, or 0 for the config's")

    @property
    def shape(self) -> Shape:
        """The config's, with as many layers and rows as the options say."""
        shape = SHAPES[self.config]
        return dataclasses.replace(shape, layers=self.layers or shape.layers, batch=self.batch or shape.batch)


@dataclasses.dataclass(frozen=True)
class Bench(OfModel):
    """Time one training step of our schedules and of their peers, interleaved step by step in the same processes.

    A feature of ours is measured by two contenders, with it and without; overhead of a layer by --config C on one rank
    beside plain, with few and many --layers.
    """

    peers: tuple[str, ...] = ("fsdp2", "ddp")
    """Whom to compare with, may be empty: fsdp2, ddp, plain; called torch-... in the results.
    plain is the unsharded module and needs --ranks 1.
    -compile: a compiled block; -tuned: in rank processes of its own whose glibc keeps freed memory, in turns with the
    others; as in fsdp2-tuned."""
    schedules: tuple[str, ...] = ("zero3",)
    """Ours, each a contender; ratios are over the first.
    Builders: ddp zero1 zero2 zero3 hsdp hpz.
    Options, after dashes: -update -defer -remat -residentK -prefetchK,
    and -chunkN for N microbatches in layer-major order,
    as in zero3-resident2-update, zero3-chunk4.
    Beside the schedule: -unrollK -compile -nolinear -noexchange -nofused -tuned (benchmarks/names.py).
    ddp has a copy of the state per rank, hsdp two copies, hpz two nodes."""
    microbatches: int = 1
    """Parts of each rank's batch; a -chunkN contender does as many chunks instead.
    Of the peers, FSDP2 reduces every part and DDP once."""
    ranks: int = 2
    """Processes to start, one per rank; on CUDA one GPU each."""
    device: Device = "cpu"
    """The device of the ranks. cpu: gloo, one thread per rank. cuda: NCCL."""
    threads: int = 1
    """Threads of torch's CPU kernels, per rank."""
    counts: bool = True
    """Also measure memory, allocations and collectives, each contender alone in processes of its own."""
    seed: int = 0
    """Seed of the weights and the batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedules:
            raise ValueError(f"--schedules: expected at least one of {', '.join(schedule_names.BUILDERS)}")
        for option, given in (("peers", self.peers), ("schedules", self.schedules)):
            if len(set(given)) != len(given):
                raise ValueError(f"--{option} {' '.join(given)}: each one once")
        if len(self.contenders) < 2:
            raise ValueError(f"--schedules {self.schedules[0]} without --peers: expected two contenders, for a ratio")
        if self.ranks < 1 or self.threads < 1:
            raise ValueError(f"--ranks {self.ranks} --threads {self.threads}: expected at least 1 each")
        for name in self.contenders:
            names.check(name, ranks=self.ranks, layers=self.shape.layers)
        rows = self.shape.batch
        if self.microbatches < 1 or rows % self.microbatches:
            raise ValueError(
                f"--microbatches {self.microbatches} with --config {self.config}: a rank's batch of {rows} sequence(s) "
                "does not divide into so many parts; --batch sets it"
            )
        for name in self.schedules:
            schedule_names.check_chunks(names.read(name).base, self.microbatches, rows)

    @property
    def contenders(self) -> tuple[str, ...]:
        """Our schedules, then the peers; ratios are over the first."""
        return (*self.schedules, *(f"{names.PEER}{peer}" for peer in self.peers))

    @property
    def turns(self) -> dict[str, Any]:
        same = ("ranks", "shape", "microbatches", "device", "threads", "seed")
        tuned = {name for name in self.contenders if names.read(name).tuned}
        return super().turns | {name: getattr(self, name) for name in same} | {"tuned": tuned}
