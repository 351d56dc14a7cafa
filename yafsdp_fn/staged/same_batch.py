"""All stages of a pipeline compute on one batch, each its own visits: ranks at one place in their stages must be given
the same rows. Compared before the first step with a batch of new shapes."""

import zlib
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.agreement import RanksDisagree
from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.engine.steps import argument_name
from yafsdp_fn.params.sharded import is_sharded

WHAT = "the batch, on which all stages compute"
NEW = "comparing a batch of new shapes"


def must_be_same(rest: Any, comms: Communicators) -> None:
    """Raises RanksDisagree on every rank where shapes differ between any two, or values between stages.

    rest: the arguments of the function, positional and keyword, but for parameters
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(rest, is_leaf=is_sharded)
    named = {argument_name(at): x for at, x in zip(accessors, leaves, strict=True) if not is_sharded(x)}
    comms.must_agree(WHAT, {name: _outline(leaf) for name, leaf in named.items()}, NEW)
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}
    if not tensors:
        return
    sums = torch.tensor([_checksum(tensor) for tensor in tensors.values()], dtype=torch.int64)
    every = comms.numbers_of_all(sums, NEW).view(comms.stages, -1, len(sums))
    for stage, place, number in (every != every[0]).nonzero()[:1].tolist():
        one, other = place, stage * every.shape[1] + place
        raise RanksDisagree(
            f"ranks disagree on {WHAT}; {list(tensors)[number]} has other values on rank {one} (stage 0) than on rank "
            f"{other} (stage {stage}). Read the same batch on all stages, as ya.shard_batch deals it"
        )


def _outline(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def _checksum(tensor: Tensor) -> int:
    values: Any = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return zlib.crc32(values)
