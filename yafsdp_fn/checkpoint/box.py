"""`Box`: one rank's slice of a flat vector, as torch.distributed.checkpoint sees it.

    whole tensor   [L, N]  (or [N])                 N: elements of a unit, without the padding of any world size
    this rank's    [:, a:b], one box: offsets (0, a), sizes (L, b - a); nothing where a >= N
    of a stage     [c:d, a:b] for each run of its layers

torch.distributed.checkpoint writes boxes, each rank its own; any other cut of them is read by reader.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(Tensor):
    """A tensor of the whole shape that holds only `shard`, this rank's part of the last axis.

    A wrapper subclass, since torch.distributed.checkpoint takes tensors; only its metadata and `shard` exist.
    shard: [L here, n] or [n], padding included; shape: (L, N) or (N,); start: a
    layers: of the rows of the shard, where there are layers; saved: rows that this stage saves, (0,) of an [n]
    """

    shard: Tensor
    start: int
    layers: tuple[int, ...] | None
    saved: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        shard: Tensor,
        *,
        shape: tuple[int, ...],
        start: int,
        layers: tuple[int, ...] | None,
        saved: tuple[int, ...],
    ) -> "Box":
        box: Box = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        box.start, box.layers, box.saved = min(start, shape[-1]), layers, saved
        box.shard = shard.narrow(-1, 0, min(start + shard.shape[-1], shape[-1]) - box.start)
        return box

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says it is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a Box: it describes a checkpoint's tensor, it is not computed with")

    def parts(self, *, saved: bool = False) -> dict[tuple[int, ...], Tensor]:
        """By where it begins in the whole, each stretch of neighbouring layers here, or all where there are none.

        saved: only what this stage saves
        """
        if self.layers is None:
            return {(self.start,): self.shard} if self.saved or not saved else {}
        runs: list[list[int]] = []  # [first row, first layer, length]
        for row in self.saved if saved else range(len(self.layers)):
            layer = self.layers[row]
            if runs and (row, layer) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1][2] += 1
            else:
                runs.append([row, layer, 1])
        return {(layer, self.start): self.shard.narrow(0, row, length) for row, layer, length in runs}

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = []
        for offsets, part in self.parts(saved=True).items():
            if part.numel():
                chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
                data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape)
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "as it was written"
        return self.parts(saved=True)[tuple(index.offset)]


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a plain one everything."""
    return tensor.shard if isinstance(tensor, Box) else tensor


def parts(tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    """The same in boxes, by where each begins in the tensor."""
    return tensor.parts() if isinstance(tensor, Box) else {(0,) * tensor.ndim: tensor}


def in_place_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """The same tensor or Box over `memory`, of the shape of what is held of it, on any device."""
    if not isinstance(tensor, Box):
        return memory
    return Box(memory, shape=tuple(tensor.shape), start=tensor.start, layers=tensor.layers, saved=tensor.saved)
