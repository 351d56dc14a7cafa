"""Agreement between ranks: is a text the same on all of them? Costs one 8-byte all-gather where it is."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from yafsdp_fn.comm.collectives import all_gather
from yafsdp_fn.comm.streams import CommunicationError


class RanksDisagree(CommunicationError):
    """Ranks would do different things; the message shows the ranks on each side."""


def disagreement(text: str, what: str, group: ProcessGroup) -> RanksDisagree:
    """The error for ranks whose texts differ; every rank must call it."""
    texts: list[str] = [""] * group.size()
    dist.all_gather_object(texts, text, group=group)
    sides: dict[str, list[int]] = {}
    for rank, one in enumerate(texts):
        sides.setdefault(one, []).append(rank)
    shown = "\n".join(f"    ranks {', '.join(map(str, ranks))}: {one}" for one, ranks in sides.items())
    return RanksDisagree(f"{what}:\n{shown}\n    every rank must visit the same units in the same order")


def same_on_all(text: str, group: ProcessGroup) -> bool:
    """Whether all ranks of `group`, a gloo group, pass the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64)
    every = torch.empty(group.size(), dtype=torch.int64)
    all_gather(every, mine, group)
    return bool((every == mine).all())
