"""Agreement between ranks: is a text the same on all of them? Costs one 8-byte all-gather where it is."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from yafsdp_fn.comm.collectives import all_gather
from yafsdp_fn.comm.streams import CommunicationError


class RanksDisagree(CommunicationError):
    """Ranks would do different things; the message shows the ranks on each side."""


def first_difference(parts: Mapping[str, str], group: ProcessGroup) -> str | None:
    """The first part that is not the same on all ranks, with the text of each rank. Every rank must call it."""
    every: list[dict[str, str]] = [{}] * group.size()
    dist.all_gather_object(every, dict(parts), group=group)
    for part in dict.fromkeys(itertools.chain(*every)):
        sides: dict[str, list[int]] = {}
        for rank, mine in enumerate(every):
            sides.setdefault(mine.get(part, "nothing"), []).append(rank)
        if len(sides) > 1:
            shown = "\n".join(f"    rank {', '.join(map(str, ranks))}: {text}" for text, ranks in sides.items())
            return f"{part} differs:\n{shown}"
    return None


def same_on_all(text: str, group: ProcessGroup) -> bool:
    """Whether all ranks of `group`, a gloo group, pass the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64)
    every = torch.empty(group.size(), dtype=torch.int64)
    all_gather(every, mine, group)
    return bool((every == mine).all())
