"""`Box`: one rank's slice of a flat vector, as torch.distributed.checkpoint sees it.

    whole tensor   [L, N]  (or [N])                 N: elements of a unit, without the padding of any world size
    this rank's    [:, a:b], one box: offsets (0, a), sizes (L, b - a); nothing where a >= N

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
    shard: [L, n] or [n], padding included; numel: N; start: a
    """

    shard: Tensor
    start: int

    @staticmethod
    def __new__(cls, shard: Tensor, *, numel: int, start: int) -> "Box":
        shape = (*shard.shape[:-1], numel)
        box: Box = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        box.start = min(start, numel)
        box.shard = shard.narrow(-1, 0, min(start + shard.shape[-1], numel) - box.start)
        return box

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says it is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a Box: it describes a checkpoint's tensor, it is not computed with")

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0,) * (self.ndim - 1) + (self.start,)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not self.shard.numel():
            return []
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), self.shard.shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.shard


def held(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and where that begins in it: of a plain tensor everything."""
    return (tensor.shard, tensor.offsets) if isinstance(tensor, Box) else (tensor, (0,) * tensor.ndim)


def in_place_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """The same tensor or Box over `memory`, of the shape of what is held of it, on any device."""
    return Box(memory, numel=tensor.shape[-1], start=tensor.start) if isinstance(tensor, Box) else memory
