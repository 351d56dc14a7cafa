"""linear_cross_entropy: the head and the loss in one, in chunks of rows (cross_entropy_chunks.py)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from yafsdp_fn.cross_entropy_chunks import Chunked
from yafsdp_fn.linear import linear
from yafsdp_fn.torch_private import transforms_active

ON_CPU, ELSEWHERE = (32 << 20, 256), (256 << 20, 2048)
"""Bytes of logits, in the dtype of the softmax, that may be there at once; and rows that may in any case: with fewer,
the pass of each chunk over grad_W would show."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), targets, reduction="sum")`, with the softmax and the sum in fp32 at least.

    x [..., E], weight [V, E], targets [...] of integers -> a scalar. Targets of `ignore_index` do not count.
    chunk: rows of x whose logits are held at once. None: as many as make 32 MiB, but at least 256; on a GPU 256 MiB and
        2048. Under torch.func, and for a second derivative, all
    Raises torch's error for a target outside of [0, V): IndexError, on CUDA a failed assertion on the device.
    """
    if has_torch_function((x, weight)):  # the planner's mode: what would be done on a GPU
        how: dict[str, Any] = {"ignore_index": ignore_index, "chunk": chunk}
        result: Tensor = handle_torch_function(linear_cross_entropy, (x, weight), x, weight, targets, **how)
        return result
    rows, labels = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if chunk is None:
        chunk = rows_at_once(rows, weight, device=device)
    elif chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk={chunk}, expected 1 row or more")
    if chunk >= len(rows) or transforms_active():
        return _whole(rows, weight, labels, ignore_index)
    total: Tensor = Chunked.apply(rows, weight, labels, ignore_index, chunk, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


def rows_at_once(x: Tensor, weight: Tensor, *, device: str) -> int:
    """Rows of a chunk, where the caller does not say, on this type of device; all chunks are of a size."""
    nbytes, least = ON_CPU if device == "cpu" else ELSEWHERE
    rows = x.shape[:-1].numel()
    most = max(least, nbytes // (len(weight) * max(4, x.dtype.itemsize)))
    return math.ceil(rows / math.ceil(rows / most)) if rows else 1


def _whole(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    scores = linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="sum")
