"""How a run is spread over ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from train.config.error import counts, require

SCHEDULES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")
SAVED = "saved"


def is_own(schedule: str) -> bool:
    """Whether a schedule is a function in somebody's file: FILE.py:NAME."""
    return re.fullmatch(r".+\.py:[^\W\d]\w*", schedule) is not None


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
