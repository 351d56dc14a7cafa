"""`python -m train bench weights`: weights for a generator in another process, in bfloat16, in several ways.

    whole      `ya.named_weights`; rank 0 puts each whole tensor into shared memory, and the generator copies it
    sent       the same, and rank 0 sends each tensor to the generator, by a process group
    ranges     `ya.publish_weights`; the generator pulls ranges of each rank's shards, all of them
    half       the same; it pulls what one of two tensor-parallel ranks has: rows of some matrices, columns of others

The generator's tensors are the same in every turn: queries, keys and values are one matrix, gate and up another. A
turn begins when all processes are ready, and ends when all have done their part. Weights change between turns; in the
end the ways must have brought the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import harness
from train.bench.options import OfModel
from train.bench.report import Rows, apart, mib, ratios, table

GOAL = 0.5
"""Goal of the time of `ranges`, over `whole`."""
WAYS = ("whole", "sent", "ranges", "half")
DTYPE = torch.bfloat16
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
COLUMNS = ("o_proj", "down_proj")
MOVED = {"between": "between_ranks", "written": "written", "read": "read"}


@dataclasses.dataclass(frozen=True)
class Weights(OfModel):
    """Time updates of a generator's weights: whole tensors, and ranges of the shards."""

    ranks: int = 2
    """Rank processes of the trainer, with gloo; the generator is one more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 1:
            raise ValueError(f"--ranks {self.ranks}: expected at least 1")


def shapes_of(task: harness.Task) -> dict[str, tuple[int, ...]]:
    """The shapes of whole leaves, in the order of `ya.named_weights`."""
    state = ya.init(llama.params(task.shape.llama()), mesh=alone())
    return {name: tuple(weight.shape) for name, weight in ya.named_weights(state.params)}


def wanted(shapes: dict[str, tuple[int, ...]], parts: int) -> dict[str, Any]:
    """The generator's tensors, as `ya.pull_weights` takes them: rows of fused matrices. parts: that matrices are cut
    into; it has the first"""
    cuts: dict[str, tuple[slice, ...]] = {}
    fused: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        kind = name.split(".")[-2]
        cut = 1 if kind in COLUMNS else 0 if kind in FUSED else None
        cuts[name] = tuple(slice(n // parts if dim == cut else n) for dim, n in enumerate(shape))
        fused.setdefault(name.replace(kind, FUSED.get(kind, kind)), []).append(name)
    out: dict[str, Any] = {}
    for names in fused.values():
        sizes = [[cut.stop for cut in cuts[name]] for name in names]
        whole = torch.zeros(sum(rows for rows, *_ in sizes), *sizes[0][1:], dtype=DTYPE)
        parts_of_it = torch.split(whole, [rows for rows, *_ in sizes])
        out |= {name: (part, cuts[name]) for name, part in zip(names, parts_of_it, strict=True)}
    return out


def places(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The memory of whole leaves that all processes share."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.from_file(str(path), shared=True, size=sum(sizes), dtype=DTYPE)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, torch.split(flat, sizes), strict=True)}


class Trainer:
    """A rank of the trainer. Its ways, and the generator's, are methods."""

    def __init__(self, task: harness.Task, folder: Path, mesh: DeviceMesh, shapes: dict[str, tuple[int, ...]]) -> None:
        self._state = ya.init(llama.params(task.shape.llama()), mesh=mesh, seed=task.seed)
        self._places, self._first, self._generator = places(folder / "whole", shapes), dist.get_rank() == 0, mesh.size()
        self._publish, self._version = ya.publish_weights(folder / "ranges", dtype=DTYPE), 0

    def change(self) -> None:
        """Changes the weights, as a step does."""
        optree.tree_map_(lambda leaf: leaf.mul_(0.999), self._state.params)

    def whole(self) -> None:
        for name, weight in ya.named_weights(self._state.params, dtype=DTYPE):
            if self._first:
                self._places[name].copy_(weight)
        dist.barrier()

    def sent(self) -> None:
        for _, weight in ya.named_weights(self._state.params, dtype=DTYPE):
            if self._first:
                dist.send(weight, self._generator)

    def ranges(self) -> None:
        self._version += 1
        self._publish(self._state.params, self._version)

    half = ranges


class Generator:
    """The process that generates. nbytes: that `ranges` and `half` have read in a turn"""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.tensors, self.halves = wanted(shapes, 1), wanted(shapes, 2)
        self._places, self._version = places(folder / "whole", shapes), 0
        self._pulls = [ya.pull_weights(folder / "ranges", into) for into in (self.tensors, self.halves)]
        self.nbytes: dict[str, int] = {}

    def change(self) -> None:
        """Does nothing: the trainer changes weights."""

    def whole(self) -> None:
        dist.barrier()
        for name, place in self._places.items():
            self.tensors[name][0].copy_(place)

    def sent(self) -> None:
        for name in self._places:
            dist.recv(self.tensors[name][0], 0)

    def ranges(self) -> None:
        self._pull("ranges", 0)

    def half(self) -> None:
        self._pull("half", 1)

    def _pull(self, way: str, number: int) -> None:
        self._version += 1
        self._pulls[number](self._version)
        self.nbytes[way] = self._pulls[number].nbytes

    def forget(self) -> None:
        """Zeroes all that it has."""
        for target, _ in (*self.tensors.values(), *self.halves.values()):
            target.zero_()


def alone() -> DeviceMesh:
    """The mesh of this process alone. All processes call it."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], "cpu", mesh_dim_names=("shard",))


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Seconds of each way, those of the slowest process, and the bytes that a generator reads."""
    shapes, trainers = shapes_of(task), list(range(task.ranks - 1))
    group, folders = dist.new_group(trainers), [""]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        folders[0] = own
        dist.broadcast_object_list(folders)
        folder, nbytes = Path(folders[0]), dict[str, int]()
        each: Trainer | Generator
        if dist.get_rank() in trainers:
            each = Trainer(task, folder, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("trainer",)), shapes)
        else:
            each = Generator(folder, shapes)

        def turn(name: str, _: int) -> harness.Sample:
            each.change()
            dist.barrier()
            return harness.timed(device, getattr(each, name))[0]

        samples = harness.interleave(task.everybody, turn, warmup=task.warmup, rounds=task.steps)
        first: dict[str, Tensor] = {}
        for name in task.everybody:
            dist.barrier()
            if isinstance(each, Generator):
                each.forget()
            getattr(each, name)()
            if isinstance(each, Generator):
                first = first or {name: target.clone() for name, (target, _) in each.tensors.items()}
                for leaf, (target, cut) in (each.halves if name == "half" else each.tensors).items():
                    if not torch.equal(target, first[leaf][cut]):
                        raise RuntimeError(f"{name}: {leaf} is not what {task.everybody[0]} has brought")
                nbytes = each.nbytes
        every = harness.gathered((samples, nbytes), task.ranks)
    return {
        "seconds": {name: [s.seconds for s in found] for name, found in harness.slowest([e[0] for e in every]).items()},
        "read": every[-1][1],
        "elements": sum(map(math.prod, shapes.values())),
    }


def measure(options: Weights, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    with console.status(f"bringing weights of {options.ranks} rank(s) to a generator"):
        found = harness.run(
            "train.bench.weights:rank", WAYS, ranks=options.ranks + 1, shape=options.shape, **options.turns
        )
    seconds, whole = found["seconds"], found["elements"] * DTYPE.itemsize
    ways = {}
    for name in WAYS:
        gathers = name in ("whole", "sent")
        ways[name] = {
            "ms": 1e3 * statistics.median(seconds[name]),
            "over_whole": ratios(seconds[name], seconds["whole"]),
            "between_ranks_bytes": whole * (options.ranks - 1) if gathers else 0,
            "written_bytes": whole,
            "read_bytes": whole if gathers else found["read"][name],
        }
    return {"bytes": whole, "ways": ways}


def show(options: Weights, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each way."""
    yield (
        f"config {options.config}, {mib(found['bytes'])} MiB in bfloat16 from {options.ranks} rank(s) to a generator; "
        f"{options.steps} interleaved rounds, medians. Between: what ranks receive from each other; written: to shared "
        "memory, or sent to the generator; read: by it"
    )
    rows: Rows = {}
    for name, each in found["ways"].items():
        over = each["over_whole"]
        missed = " MISSED" if name == "ranges" and over["median"] > GOAL else ""
        rows[name] = {
            "ms": f"{each['ms']:.1f}",
            "ratio": f"{over['median']:.3f}{missed}",
            "p10 - p90": apart(over),
            **{f"{what} MiB": mib(each[f"{key}_bytes"]) for what, key in MOVED.items()},
        }
    yield table("an update", rows)
