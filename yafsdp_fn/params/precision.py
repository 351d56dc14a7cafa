"""The dtypes of a state's buffers."""

import dataclasses
from typing import Any

import torch

from yafsdp_fn.params.tree import checked_dtype


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a sharded state, fixed when it is built. A leaf may have a `compute` and a `reduce` of its own: see
    `Param`.

    param: master shards, gradient shards and optimizer state
    compute: gathered weights, as blocks see them; if it differs from `param`, a working copy of the shards is kept
    reduce: gradients on the wire and in gradient slots; gradient shards accumulate in `param`
    accumulate: sums over ranks. None: `reduce`, by the backend, in its own order. Wider than `reduce`: ranks exchange
        their parts in `reduce` and sum them in rank order, so that only the rounding to `reduce` is lost, and the bits
        are the same in every run; the receive buffer grows from a shard to a unit
    copy: False keeps no working copy, and each gather casts this rank's part instead, to the same bits. What travels in
        a wire format is kept encoded all the same

    >>> half = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)
    >>> head = ya.init(params, tx, mesh=mesh, precision=half).params["head"]
    >>> head.leaves[0].dtype, ya.apply(lambda w: w["out"], head).dtype         # as stored, and as blocks see it
    (torch.float32, torch.bfloat16)
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    copy: bool = True

    def __post_init__(self) -> None:
        # what is left out is as the parameters
        object.__setattr__(self, "compute", self.compute or self.param)
        object.__setattr__(self, "reduce", self.reduce or self.param)
        if not isinstance(self.copy, bool):
            raise TypeError(f"Precision.copy={self.copy!r}: expected True or False")
        for name, dtype in self._dtypes().items():
            may_be = dtype is None if name == "accumulate" else name == "param" and dtype == torch.float16
            if not may_be:
                checked_dtype(f"Precision.{name}", dtype)
        if self.accumulate is not None and self.accumulate.itemsize < self.reduce_dtype.itemsize:
            raise TypeError(
                f"Precision.accumulate: {self.accumulate} is narrower than reduce={self.reduce}: sums over ranks would "
                "lose what the wire has carried; give a dtype at least as wide, or None"
            )

    def _dtypes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "copy"}

    @property
    def gather_dtype(self) -> torch.dtype:
        assert self.compute is not None
        return self.compute

    @property
    def reduce_dtype(self) -> torch.dtype:
        assert self.reduce is not None
        return self.reduce

    def sum_dtype_of(self, wire: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which ranks sum gradients themselves, in rank order, whose dtype on the wire is `wire`;
        None if the backend sums, in `wire`."""
        wide = self.accumulate is not None and self.accumulate.itemsize > wire.itemsize
        return self.accumulate if wide else None

    @property
    def decoded_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed that travel in a wire format."""
        wide = torch.promote_types(self.param, torch.float32)
        return wide if self.accumulate is None else torch.promote_types(wide, self.accumulate)

    @property
    def lost(self) -> str | None:
        """A warning about training parameters in `param`; None if it is wide enough."""
        if self.param.itemsize > 2:
            return None
        return (
            f"Precision(param={self.param}) keeps no other copy of the weights: an update of less than "
            f"1/{round(2 / torch.finfo(self.param).eps)} of its parameter is lost to rounding, step after step. "
            "Precision(compute=torch.bfloat16) computes in bfloat16 and keeps weights in float32"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The dtypes as words, "float32", in the order of the fields; "" for None. Then "no copy", if so."""
        dtypes = ["" if dtype is None else str(dtype).removeprefix("torch.") for dtype in self._dtypes().values()]
        return (*dtypes,) if self.copy else (*dtypes, "no copy")


DEFAULT_PRECISION = Precision()


def must_be_precision(precision: Any) -> None:
    """Raises TypeError for a dtype alone, or its name."""
    if not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: expected dtypes, such as ya.Precision(compute=torch.bfloat16)")
