"""A process group of the emulated cluster: collectives that take the modelled time, with defined results.

On the CPU one thread runs a group's collectives in order; on CUDA they are kernels on a stream, in order by events.
Collectives of a group never overlap, whatever their streams. Other ranks hold this rank's data, each in its own place:

    all-gather        every slice is this rank's shard
    reduce-scatter    the reduction of all slices of this rank's input: rank r + k has it rotated by k slices
    all-to-all        the input: slice k is rank k's version of this rank's slice
    all-reduce        the value times the ranks (SUM), or as it is (AVG, MIN, MAX)
    broadcast         the value as it is

So a reduce-scatter is the adjoint of the all-gather: the trained model has equal shards, on equal batches, with its
true gradient (shared by all its slices: 1 / R of their sum). Its loss falls as that of any model. An exchange with a
local sum gives the result of a reduce-scatter, ranks that compare texts agree, and data parallelism is that of equal
batches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from benchmarks.emulated.lanes import Collective, Lane
from yafsdp_fn.communication.groups import EMULATED
from yafsdp_fn.planner.cluster import Cluster, CollectiveRanks, Phase

CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_ProcessGroup: Any = dist.ProcessGroup  # its declared types differ from version to version


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Rank `rank` of the group of `members`, global ranks.

    lane: makes the lane of a kind of device, "cpu" or "cuda", at its first collective
    issued: collectives begun, by name
    """

    def __init__(self, cluster: Cluster, members: Sequence[int], rank: int, lane: Callable[[str], Lane]) -> None:
        super().__init__(rank, len(members))
        self._cluster = cluster
        self._ranks = len(members)
        self._rank = rank
        self.place = place(members, cluster.gpus_per_node)
        self._make = lane
        self._lanes = dict[str, Lane]()
        self.issued: Counter[str] = Counter()
        # torch asks the backend of a device for names and options, never for a collective that is defined here
        beneath = c10d.FakeProcessGroup._create_internal(rank, len(members))
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), CUSTOM, beneath)
        self._set_default_backend(CUSTOM)  # torch 2.15 asks it for the group's name

    def getBackendName(self) -> str:
        return EMULATED

    def close(self) -> None:
        """Ends the group's threads, when its collectives have ended."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    abort = shutdown = close

    # ---- collectives

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """Sets `out` [R n], every slice `mine` [n]."""
        return self.all_gather_single_coalesced([out], [mine], opts)

    def all_gather_single_coalesced(self, outs: list[Tensor], mine: list[Tensor], opts: Any = None) -> dist.Work:
        work = [
            partial(gathered, self._rows("all_gather", out, part.numel()), flat(part), self._rank)
            for out, part in zip(outs, mine, strict=True)
        ]
        return self._run("all_gather", self._ring(outs), work, outs, mine, opts)

    def allgather(self, outs: list[list[Tensor]], mine: list[Tensor], opts: Any = None) -> dist.Work:
        every = [(out, part) for row, part in zip(outs, mine, strict=False) for out in row]
        filled = [out for out, _ in every]
        work = [partial(data(out).copy_, data(part)) for out, part in every]
        return self._run("all_gather", self._ring([*mine] * self._ranks), work, filled, mine, opts)

    def reduce_scatter_single(self, out: Tensor, full: Tensor, opts: Any = None) -> dist.Work:
        """Sets `out` [n], the reduction of this rank's slice of `full` [R n]."""
        return self.reduce_scatter_single_coalesced([out], [full], opts)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], full: list[Tensor], opts: Any = None) -> dist.Work:
        op = reduction(opts)
        work = [
            scattered(flat(out), self._rows("reduce_scatter", whole, out.numel()), op)
            for out, whole in zip(outs, full, strict=True)
        ]
        return self._run("reduce_scatter", self._ring(full), work, outs, full, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        work = [reduced(data(x), reduction(opts), self._ranks) for x in tensors]
        return self._run("all_reduce", self._ring(tensors) * 2, work, tensors, [], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run("broadcast", self._ring(tensors), [], tensors, [], opts)

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Copies `mine` [R n] to `out` [R n]. Raises NotImplementedError for uneven slices."""
        if len(set(sizes)) > 1 or len(set(out_sizes)) > 1:
            raise NotImplementedError(f"the emulated all-to-all has even slices only, got {list(sizes or out_sizes)}")
        work = [
            partial(self._rows("all_to_all", out, mine.numel() // self._ranks).copy_, mine.data.view(self._ranks, -1))
        ]
        phases = self._cluster.all_to_all(mine.nbytes, self.place)
        return self._run("all_to_all", phases, work, [out], [mine], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier", self._ring([]) * 2, [], [], [], opts)

    # names of other torch versions
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "the emulated backend has no send and no receive, nothing that one rank gathers, reduces or scatters, and "
            "no lists of tensors but in an all-gather: use collectives of one tensor, in which all ranks do the same"
        )

    send = recv = recv_anysource = gather = reduce = scatter = reduce_scatter = alltoall = _refuse

    # ---- how

    def _ring(self, tensors: Sequence[Tensor]) -> tuple[Phase, ...]:
        return self._cluster.ring(sum(x.nbytes for x in tensors), self.place)

    def _rows(self, name: str, whole: Tensor, n: int) -> Tensor:
        """Returns `whole` as [R, n]. Raises ValueError for another size."""
        if whole.numel() != self._ranks * n:
            raise ValueError(
                f"{name}: a rank's slice has {n} elements and there are {self._ranks} ranks, so the whole needs "
                f"{self._ranks * n}; got {whole.numel()} (shape {tuple(whole.shape)})"
            )
        return data(whole).view(self._ranks, n)

    def _run(
        self,
        name: str,
        phases: Sequence[Phase],
        work: Sequence[Callable[[], object]],
        outs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
    ) -> dist.Work:
        self.issued[name] += 1
        kind = next((x.device.type for x in (*outs, *inputs)), "cpu")
        if kind not in self._lanes:
            self._lanes[kind] = self._make(kind)
        asynchronous = bool(getattr(opts, "asyncOp", True))
        return self._lanes[kind].run(Collective(name, phases, work, outs, inputs, asynchronous))


def place(members: Sequence[int], per_node: int) -> CollectiveRanks:
    """Returns the distribution of a group of global ranks over nodes of `per_node`."""
    nodes = len({rank // per_node for rank in members})
    return CollectiveRanks(len(members), -(-len(members) // nodes))


def data(tensor: Tensor) -> Tensor:
    """Returns the same memory, whose writes autograd does not see, as with any backend."""
    return tensor.data


def flat(tensor: Tensor) -> Tensor:
    return tensor.data.view(-1)


def reduction(opts: Any) -> dist.ReduceOp:
    """Returns the reduction that `opts` asks for, SUM by default."""
    op: dist.ReduceOp = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    return op


# ---- What collectives leave.

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
    by: dict[Any, Callable[[], Tensor]] = {
        Op.SUM: lambda: rows.sum(0),
        Op.AVG: lambda: rows.sum(0) / len(rows),
        Op.PREMUL_SUM: lambda: rows.sum(0) * _factor(op),
        Op.PRODUCT: lambda: rows.prod(0),
        Op.MIN: lambda: rows.amin(0),
        Op.MAX: lambda: rows.amax(0),
    }
    found = _reduction_of("reduce-scatter", by, op)
    return lambda: out.copy_(found())


def reduced(value: Tensor, op: Any, ranks: int) -> Callable[[], object]:
    """Returns work that reduces `value`, equal on all `ranks`, in place."""
    by: dict[dist.ReduceOp.RedOpType, Callable[[], object]] = {
        Op.SUM: lambda: value.mul_(ranks),
        Op.PREMUL_SUM: lambda: value.mul_(ranks * _factor(op)),
        Op.PRODUCT: lambda: value.pow_(ranks),
    } | dict.fromkeys(KEPT, lambda: None)
    return _reduction_of("all-reduce", by, op)


def _reduction_of(name: str, by: Mapping[Any, Callable[[], Any]], op: Any) -> Callable[[], Any]:
    """Returns that of `by` for `op`. Raises NotImplementedError where there is none."""
    found = [reduction for known, reduction in by.items() if op == known]
    if not found:
        names = ", ".join(str(each).rpartition(".")[2] for each in by)
        raise NotImplementedError(f"the emulated {name} knows the reductions {names}: take one of these")
    return found[0]


def _factor(op: Any) -> Tensor | float:
    """Returns the factor of a PREMUL_SUM, which torch exposes only to pickle."""
    factor: Tensor | float = op.__getstate__()[1]
    return factor
