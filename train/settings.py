"""The settings of a run: frozen dataclasses, from the command line (tyro) and from `config.json` (`config_json`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from train.config import (
    AUTO,
    Chats,
    Data,
    Lora,
    Mesh,
    Optim,
    Rows,
    Sharding,
    TuningOptim,
    counts,
    is_own,
    require,
)

LONGEST = 10.0**7
"""Seconds, some four months: what clocks and libraries take as a timeout."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of every run."""

    COMMAND: ClassVar[str] = ""
    """The subcommand."""

    name: str = ""
    """The run writes into runs/NAME. None given: the subcommand and the time, or with --resume the newest run."""
    resume: bool = False
    """Continue from the last checkpoint of this run. Its config.json gives the defaults of all other flags."""
    runs: Path = Path("runs")
    """The folder that runs are written to."""
    steps: int = 200
    """Steps of the whole run, also of a resumed one."""
    seed: int = 0
    """Seed of the initial values and of the order of the text."""
    data: Rows = dataclasses.field(default_factory=Rows)
    optim: Optim = dataclasses.field(default_factory=Optim)
    sharding: Sharding = dataclasses.field(default_factory=Sharding)
    eval_every: int = AUTO
    """Steps between held-out losses, which are also taken before the first step and after the last; 0: none at all. -1:
    100, or none where too little is held out."""
    eval_batches: int = 16
    """The most batches (of all ranks) that give a held-out loss."""
    checkpoint_every: int = 100
    """Steps between checkpoints, besides one after the last step; 0: only that one."""
    keep: int = 2
    """Checkpoints kept, the newest."""
    keep_every: int = 0
    """Checkpoints of steps divisible by it stay for good; 0: of none."""
    max_skipped: int = 5
    """So many steps in a row that are skipped, since their loss or gradient is not finite, and the run goes back to its
    last checkpoint, and on with the text after theirs."""
    skip_spikes: float = 0.0
    """Steps whose loss or gradient norm is so many standard deviations above the mean of the last 128 are skipped, too
    (6 is usual); 0: they are not."""
    max_rollbacks: int = 3
    """Times that it goes back before it gives up."""
    log_every: int = 10
    """Steps between printed lines where standard output is not a terminal. metrics.jsonl has every step."""
    log: str = ""
    """FILE.py:NAME: your function of a line of metrics.jsonl, a dict, which rank 0 calls: wandb, mlflow
    (docs/running.md)."""
    timeline_every: int = 50
    """Steps between those of which rank 0 records when each op ran, into timeline.json, the newest one; 0: none."""
    gc_every: int = 50
    """Steps between collections of Python's garbage, on all ranks after the same step: a collection at a moment of its
    own lets every other rank wait. 0: as Python likes."""
    calibrate: bool = False
    """Measure after the last step what this machine can do (a second on a CPU), for the step that the report
    predicts."""
    timeout: float = 600.0
    """Seconds a collective may take before its op is reported and the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. auto: cuda where there is one."""

    @property
    def folder(self) -> Path:
        """The run's folder, once it has a name."""
        return self.runs / self.name

    @property
    def stages(self) -> Mesh:
        """The run's stages; not all kinds of runs can have several."""
        return Mesh()

    def __post_init__(self) -> None:
        counts(self, steps=1, eval_every=AUTO, checkpoint_every=0, keep=1, keep_every=0, log_every=1, timeline_every=0)
        counts(self, gc_every=0, max_skipped=1, max_rollbacks=0, eval_batches=0)
        require(not self.log or is_own(self.log), f"log is {self.log!r}: expected FILE.py:NAME")
        require(0 <= self.skip_spikes < float("inf"), f"skip_spikes is {self.skip_spikes}: a number of at least 0")
        require(self.eval_every == 0 or self.eval_batches > 0, "eval_batches is 0: for no evaluation, --eval-every 0")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}: expected 0 to 2^63 - 1")
        require(1 <= self.timeout <= LONGEST, f"timeout is {self.timeout} seconds: expected 1 to {LONGEST:.0f}")
        m = self.sharding.microbatches
        n = self.sharding.chunks
        b = self.data.usual
        parts = f"sharding.microbatches {m}" + f" of sharding.chunks {n}" * (n > 1)
        require(b % (m * n) == 0, f"data.batch {b} does not divide into {parts}")
        if self.optim.warmup < 0:  # settled here: a run that goes on with more steps keeps its warmup
            object.__setattr__(self, "optim", dataclasses.replace(self.optim, warmup=min(30, self.steps // 5)))
        require(
            self.optim.warmup < self.steps,
            f"optim.warmup {self.optim.warmup} is not shorter than the run, steps {self.steps}: --optim.warmup "
            f"{self.steps // 10}, say",
        )
        optim = self.optim
        require(
            optim.decay != "wsd" or optim.warmup + optim.decays(self.steps) <= self.steps,
            f"optim.warmup {optim.warmup} and optim.decay_steps {optim.decays(self.steps)} are longer than the run, "
            f"steps {self.steps}",
        )
        ok = self.name.isprintable() and "/" not in self.name and self.name not in (".", "..")
        require(
            ok and len(self.name.encode()) < 200, f"name is {self.name!r:.80}: a folder's name inside --runs, without /"
        )


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Train a causal language model on text: bytes, or tokens of any tokenizer."""

    COMMAND = "clm"

    model: str = "debug"
    """A name in models.CONFIGS, such as debug, debug-qwen3, llama3.2-1b."""
    vocab: int = 0
    """The model's vocabulary. 0: the named model's own for bytes; for another tokenizer its own, rounded up to a
    multiple of 64."""
    capacity: float = 0.0
    """The most tokens of a row that an expert takes in training, over its even share of them: the first ones, and the
    host reads no counts. 0: all that choose it."""
    data: Data = dataclasses.field(default_factory=Data)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, vocab=0)
        require(0 <= self.capacity < float("inf"), f"capacity is {self.capacity}: expected a finite number, 0 or more")
        self.mesh.check(self.sharding)

    @property
    def stages(self) -> Mesh:
        return self.mesh


@dataclasses.dataclass(frozen=True)
class Tuning(Settings):
    """Fine-tune a model on conversations: it learns what the assistant says."""

    COMMAND = "sft"

    start: str = ""
    """The model to fine-tune: the folder of a run, or a Hugging Face directory. None given: the newest run of clm."""
    tokenizer: str = ""
    """Tokenizer of a Hugging Face directory that has none, as for clm. None given: its own; a run always has its
    own."""
    lora: Lora = dataclasses.field(default_factory=Lora)
    data: Chats = dataclasses.field(default_factory=Chats)
    optim: TuningOptim = dataclasses.field(default_factory=TuningOptim)
    steps: int = 400
    """Steps of the whole run, also of a resumed one."""
