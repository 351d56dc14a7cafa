"""Which dtype holds what."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a sharded state, fixed when it is built.

    param: master shards, gradient shards and optimizer state
    compute: what is gathered and what blocks see; a working copy of the shards is kept where it differs from `param`
    reduce: what gradients are reduced in: on the wire and in gradient slots; gradient shards accumulate in `param`
    accumulate: what a reduction sums over ranks in. None: `reduce`, by the backend, in its own order. Wider than
        `reduce`: ranks exchange their parts in `reduce` and sum them in rank order, so that nothing is lost but the
        rounding to `reduce`, and the bits are the same in every run; the receive buffer grows from a shard to a unit
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", self.compute or self.param)
        object.__setattr__(self, "reduce", self.reduce or self.param)
        for name, dtype in vars(self).items():
            known = dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
            if not known and not (name == "accumulate" and dtype is None):
                raise TypeError(f"Precision.{name}: expected a 16, 32 or 64-bit floating dtype, got {dtype!r}")
            if name != "param" and dtype == torch.float16:
                why = "float16 overflows, since gradients of sums are scaled only after their reduction"
                raise TypeError(f"Precision.{name}: {why}; use bfloat16")
        if self.accumulate is not None and self.accumulate.itemsize < self.reduce_dtype.itemsize:
            raise TypeError(
                f"Precision.accumulate: {self.accumulate} is narrower than reduce={self.reduce}: sums over ranks would "
                "lose what the wire has carried; give a dtype at least as wide, or None"
            )

    @property
    def gather_dtype(self) -> torch.dtype:
        assert self.compute is not None
        return self.compute

    @property
    def reduce_dtype(self) -> torch.dtype:
        assert self.reduce is not None
        return self.reduce

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """What ranks sum in themselves, in rank order; None where the backend sums, in `reduce`."""
        wide = self.accumulate is not None and self.accumulate.itemsize > self.reduce_dtype.itemsize
        return self.accumulate if wide else None

    @property
    def names(self) -> tuple[str, ...]:
        """The dtypes as words, "float32", in the order of the fields; "" for None."""
        return tuple("" if dtype is None else str(dtype).removeprefix("torch.") for dtype in vars(self).values())

    @staticmethod
    def named(names: tuple[str, ...]) -> "Precision":
        """The inverse of `names`."""
        dtypes: list[Any] = [getattr(torch, name) if name else None for name in names]
        return Precision(*dtypes)


DEFAULT_PRECISION = Precision()
