"""A whole run: what all have, and what each subcommand adds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from train.config.data import Chats, Data, Rows
from train.config.error import LONGEST, counts, require
from train.config.mesh import Mesh
from train.config.optim import Optim, TuningOptim
from train.config.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every run has."""

    COMMAND: ClassVar[str] = ""
    """The subcommand."""

    name: str = ""
    """The run writes into runs/NAME. None given: the subcommand and the time, or with --resume the newest run."""
    resume: bool = False
    """Continue from the last checkpoint of this run. Its config.json gives the defaults of all other flags."""
    runs: Path = Path("runs")
    """Where runs are written."""
    steps: int = 200
    """Of the whole run, also of a resumed one."""
    seed: int = 0
    """Of the initial values and of the order of the text."""
    data: Rows = dataclasses.field(default_factory=Rows)
    optim: Optim = dataclasses.field(default_factory=Optim)
    sharding: Sharding = dataclasses.field(default_factory=Sharding)
    eval_every: int = 100
    """Steps between held-out losses, which are also taken before the first step and after the last; 0: none at all."""
    eval_batches: int = 16
    """At most so many batches (of all ranks) give a held-out loss."""
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
    """How often it goes back before it gives up."""
    log_every: int = 10
    """Steps between printed lines where standard output is not a terminal. metrics.jsonl has every step."""
    timeline_every: int = 50
    """Steps between those of which rank 0 records when each op ran, into timeline.json, the newest one; 0: none."""
    calibrate: bool = False
    """After the last step measure what this machine can do (a second on a CPU), for the step that the report
    predicts."""
    timeout: float = 600.0
    """Seconds a collective may take before its op is reported and the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    @property
    def stages(self) -> Mesh:
        """Of the run; not all kinds of runs can have several."""
        return Mesh()

    def __post_init__(self) -> None:
        counts(self, steps=1, eval_every=0, checkpoint_every=0, keep=1, keep_every=0, log_every=1, timeline_every=0)
        require(0 <= self.skip_spikes < float("inf"), f"skip_spikes is {self.skip_spikes}: a number of at least 0")
        counts(self, max_skipped=1, max_rollbacks=0, eval_batches=0)
        require(self.eval_every == 0 or self.eval_batches > 0, "eval_batches is 0: for no evaluation, --eval-every 0")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}: expected 0 to 2^63 - 1")
        require(1 <= self.timeout <= LONGEST, f"timeout is {self.timeout} seconds: expected 1 to {LONGEST:.0f}")
        m, n, b = self.sharding.microbatches, self.sharding.chunks, self.data.batch
        parts = f"sharding.microbatches {m}" + f" of sharding.chunks {n}" * (n > 1)
        require(b % (m * n) == 0, f"data.batch {b} does not divide into {parts}")
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
    data: Data = dataclasses.field(default_factory=Data)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, vocab=0)
        self.mesh.check(self.sharding)

    @property
    def stages(self) -> Mesh:
        return self.mesh


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank pairs beside frozen weights, in place of training all of them."""

    rank: int = 0
    """Of the pairs beside each matrix of the layers; 0: none, all weights are trained."""
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


@dataclasses.dataclass(frozen=True)
class Tuning(Settings):
    """Fine-tune a model on conversations: it learns what the assistant says."""

    COMMAND = "sft"

    start: str = ""
    """What is fine-tuned: the folder of a run, or a Hugging Face directory. None given: the newest run of clm."""
    tokenizer: str = ""
    """Of a Hugging Face directory that has none, as for clm. None given: its own; a run always has its own."""
    lora: Lora = dataclasses.field(default_factory=Lora)
    data: Chats = dataclasses.field(default_factory=Chats)
    optim: TuningOptim = dataclasses.field(default_factory=TuningOptim)
    steps: int = 400
    """Of the whole run, also of a resumed one."""
