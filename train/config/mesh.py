"""Pipeline stages of a run; what the ranks of a stage do is `--sharding`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from train.config.error import counts, require
from train.config.sharding import SAVED, Sharding, is_own

Order = Literal["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "v_shaped"]


@dataclasses.dataclass(frozen=True)
class Mesh:
    stage: int = 1
    """Stages of a pipeline, each with some of the layers and as many ranks; 1: none. Best with several times as many
    --sharding.microbatches. No timeline of a step is recorded."""
    order: Order = "one_f_one_b"
    """When a stage computes what. interleaved and v_shaped: of two runs of layers; zero_bubble: gradients of weights
    fill the gaps."""

    def __post_init__(self) -> None:
        counts(self, "mesh.", stage=1)
        require(self.stage > 1 or self.order == Mesh.order, f"mesh.order is {self.order}, and mesh.stage 1: no stages")

    @property
    def named(self) -> str:
        """Before the schedule of a stage, in a line for people."""
        return "" if self.stage == 1 else f"{self.stage} stages {self.order} of "

    @property
    def per_stage(self) -> int:
        """Runs of layers that a stage has."""
        return 2 if self.order in ("interleaved", "v_shaped") else 1

    def check(self, sharding: Sharding) -> None:
        """Refuses what does not go with several stages."""
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
