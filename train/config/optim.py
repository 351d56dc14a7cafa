"""How a run learns."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import tyro

from train.config.error import counts, require

Rate = Annotated[float, tyro.conf.arg(aliases=("--optim.lr",))]


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW after clipping by the global norm; linear warmup, then a decay down to `final_fraction` of the peak."""

    positive: ClassVar[tuple[str, ...]] = ("learning_rate", "clip_norm")

    learning_rate: Rate = 2e-3
    """The peak."""
    warmup: int = 30
    """Steps from zero to the peak."""
    decay: Literal["cosine", "wsd"] = "cosine"
    """cosine: from the end of the warmup on. wsd (warmup, stable, decay): at the peak, then in a line over the last
    `decay_steps`; a run can be resumed from the stable part with more steps."""
    decay_steps: int = 0
    """Of wsd; 0: a fifth of the run, a step at least."""
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
        for name in self.positive:
            value = getattr(self, name)
            require(0 < value < float("inf"), f"optim.{name} is {value}, not a positive finite number")
        for name in ("final_fraction", "weight_decay"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"optim.{name} is {value}, not a finite number of at least 0")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} is {value}: a decay, in [0, 1)")
        counts(self, "optim.", warmup=0, decay_steps=0)
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

    learning_rate: Rate = 0.0
    """The peak. 0: that of the run it starts from; of a Hugging Face directory 2e-5, and 2e-4 for adapters."""
    weight_decay: float = 0.0
    """On matrices only: leaves with one axis (the norms' weights) are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.learning_rate
        require(0 <= rate < float("inf"), f"optim.learning_rate is {rate}, not a finite number of at least 0")
