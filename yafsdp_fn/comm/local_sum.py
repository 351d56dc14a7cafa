"""The sum of what several ranks have sent, on one of them, in rank order and in a wide dtype.

    total = rows[0] + rows[1] + ...          # in `dtype`, one after the other, rounded once at the end
    out = total  or  out + total

It goes through the rows a chunk at a time, so that it needs little scratch memory, and always the same.
"""

import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements summed at a time: what stays in a core's cache; on a GPU, enough to fill it."""


class Scratch:
    """Two chunks per dtype, made at first use. One stream's: two streams must not share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[torch.dtype, Tensor] = {}

    def chunks(self, dtype: torch.dtype) -> Tensor:
        """[2, chunk]"""
        if dtype not in self._made:
            with torch.inference_mode(False):  # streams run under it, and others could not write to what is made there
                self._made[dtype] = torch.empty(2, CHUNK[self._device.type], dtype=dtype, device=self._device)
        return self._made[dtype]


def local_sum(
    out: Tensor, rows: Tensor, scratch: Scratch, *, add: bool = False, dtype: torch.dtype | None = None
) -> None:
    """`rows` [R, n] summed in `dtype`, else the wider one of both, in the order of R. The sum is rounded once, to the
    dtype of `out` [n], and written to it or added."""
    dtype = dtype or torch.promote_types(out.dtype, rows.dtype)
    if len(rows) == 1 and not add:
        out.copy_(rows[0])
        return
    sums, casts = scratch.chunks(dtype)
    for start in range(0, out.numel(), sums.numel()):
        target = out[start : start + sums.numel()]
        parts = rows[:, start : start + sums.numel()]
        total = target if target.dtype == dtype and not add else sums[: target.numel()]
        cast = casts[: target.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(_as(part, cast))
        if add and target.dtype.itemsize >= dtype.itemsize:
            target.add_(total)
        elif add:
            target.copy_(total.add_(_as(target, cast)))
        elif total is not target:
            target.copy_(total)


def _as(part: Tensor, cast: Tensor) -> Tensor:
    """`part` in the dtype of `cast`, without a fresh tensor: on the CPU a mixed addition would make one."""
    return part if part.dtype == cast.dtype or part.device.type == "cuda" else cast.copy_(part)
