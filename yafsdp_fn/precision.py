"""Which dtype holds what."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Precision:
    """The three dtypes of a sharded state, fixed when it is built.

    param: master shards, gradient shards and optimizer state
    compute: what is gathered and what blocks see; a working copy of the shards is kept where it differs from `param`
    reduce: what gradients are reduced in, on the wire; gradient shards accumulate in `param`
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", self.compute or self.param)
        object.__setattr__(self, "reduce", self.reduce or self.param)
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"Precision.{field.name}: expected a 16, 32 or 64-bit floating dtype, got {dtype}")
        for name in ("compute", "reduce"):
            if getattr(self, name) == torch.float16:
                raise TypeError(
                    f"Precision.{name}: float16 overflows, since gradients of sums are scaled only after their "
                    "reduction; use bfloat16"
                )

    @property
    def gather_dtype(self) -> torch.dtype:
        assert self.compute is not None
        return self.compute

    @property
    def reduce_dtype(self) -> torch.dtype:
        assert self.reduce is not None
        return self.reduce


DEFAULT_PRECISION = Precision()
