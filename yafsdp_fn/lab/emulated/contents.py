"""The results of emulated collectives: other ranks hold this rank's data, each in its own place.

    all-gather        every slice is this rank's shard
    reduce-scatter    the reduction of all slices of this rank's input: rank r + k has it rotated by k slices
    all-to-all        the input: slice k is rank k's version of this rank's slice
    all-reduce        the value times the ranks (SUM), or as it is (AVG, MIN, MAX)
    broadcast         the value as it is
    gather, reduce    as those for all, at the root; scatter: of the root's own list, at the root only

So a reduce-scatter is the adjoint of the all-gather: the trained model has equal shards, on equal batches, with its
true gradient (shared by all its slices: 1 / R of their sum). Its loss falls as that of any model. An exchange with a
local sum gives the result of a reduce-scatter, ranks that compare texts agree, and data parallelism is that of equal
batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Op = dist.ReduceOp
KEPT = (Op.AVG, Op.MIN, Op.MAX, Op.BAND, Op.BOR)
"""Reductions of equal values that give that value."""


def gathered(rows: Tensor, mine: Tensor, rank: int) -> None:
    """Fills `rows` [R, n] from `mine` [n], which may already be its own row."""
    own = rows[rank]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    for others in (rows[:rank], rows[rank + 1 :]):
        others.copy_(own.expand_as(others))


def scattered(out: Tensor, rows: Tensor, op: Any) -> Callable[[], object]:
    """Returns work that reduces `rows` [R, n] into `out` [n], which may be one of them."""
    by: dict[dist.ReduceOp.RedOpType, Callable[[], Tensor]] = {
        Op.SUM: lambda: rows.sum(0),
        Op.AVG: lambda: rows.sum(0) / len(rows),
        Op.PREMUL_SUM: lambda: rows.sum(0) * _factor(op),
        Op.PRODUCT: lambda: rows.prod(0),
        Op.MIN: lambda: rows.amin(0),
        Op.MAX: lambda: rows.amax(0),
    }
    found = [reduction for name, reduction in by.items() if op == name]
    if not found:
        raise _unknown("reduce-scatter", by)
    return lambda: out.copy_(found[0]())


def reduced(value: Tensor, op: Any, ranks: int) -> Callable[[], object]:
    """Returns work that reduces `value`, equal on all `ranks`, in place."""
    by: dict[dist.ReduceOp.RedOpType, Callable[[], object]] = {
        Op.SUM: lambda: value.mul_(ranks),
        Op.PREMUL_SUM: lambda: value.mul_(ranks * _factor(op)),
        Op.PRODUCT: lambda: value.pow_(ranks),
    } | dict.fromkeys(KEPT, lambda: None)
    found = [reduction for name, reduction in by.items() if op == name]
    if not found:
        raise _unknown("all-reduce", by)
    return found[0]


def _unknown(name: str, known: Iterable[object]) -> NotImplementedError:
    names = ", ".join(str(each).rpartition(".")[2] for each in known)
    return NotImplementedError(f"the emulated {name} knows the reductions {names}: take one of these")


def _factor(op: Any) -> Tensor | float:
    """Returns the factor of a PREMUL_SUM, which torch exposes only to pickle."""
    factor: Tensor | float = op.__getstate__()[1]
    return factor
