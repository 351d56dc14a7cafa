"""Agreement between ranks: is a text the same on all of them? Costs one 8-byte all-gather where it is."""

import itertools
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from yafsdp_fn.comm.collectives import Group
from yafsdp_fn.comm.streams import CommunicationError


class RanksDisagree(CommunicationError):
    """Ranks would do different things; the message shows the ranks on each side."""


def first_difference(parts: Mapping[str, str], group: Group) -> str | None:
    """The first part that is not the same on all ranks, with the text of each rank. Every rank must call it."""
    every: list[dict[str, str]] = [{}] * group.process_group.size()
    dist.all_gather_object(every, dict(parts), group=group.process_group)
    for part in dict.fromkeys(itertools.chain(*every)):
        sides: dict[str, list[int]] = {}
        for rank, mine in enumerate(every):
            sides.setdefault(mine.get(part, "nothing"), []).append(rank)
        if len(sides) > 1:
            shown = "\n".join(f"    rank {', '.join(map(str, ranks))}: {text}" for text, ranks in sides.items())
            return f"{part} differs:\n{shown}"
    return None


def same_on_all(text: str, group: Group) -> bool:
    """Whether all ranks of `group`, a gloo group, pass the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64)
    every = torch.empty(group.process_group.size(), dtype=torch.int64)
    group.all_gathers([every], [mine])
    return bool((every == mine).all())
