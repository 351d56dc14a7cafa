"""Agreement between ranks: one 8-byte all-gather where a text is the same on all of them, a description of who differs
where not. `Communicators` has the checks that raise.
"""

import itertools
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.streams import CommunicationError


class RanksDisagree(CommunicationError):
    """Ranks would do different things; the message shows the ranks on each side."""


def first_difference(parts: Mapping[str, str], group: RankGroup, first: int = 0) -> str | None:
    """Returns the first part that differs between ranks, with each rank's text, or None. Collective. first: the number
    of the group's first rank"""
    every: list[dict[str, str]] = [{}] * group.process_group.size()
    dist.all_gather_object(every, dict(parts), group=group.process_group)
    for part in dict.fromkeys(itertools.chain(*every)):
        sides: dict[str, list[int]] = {}
        for rank, mine in enumerate(every, first):
            sides.setdefault(mine.get(part, "nothing"), []).append(rank)
        if len(sides) > 1:
            shown = "\n".join(f"    rank {', '.join(map(str, ranks))}: {text}" for text, ranks in sides.items())
            return f"{part} differs:\n{shown}"
    return None


def same_on_all(text: str, group: RankGroup) -> bool:
    """Returns whether all ranks of `group`, a gloo group, pass the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64, device="cpu")
    return bool((numbers_of_all(mine, group) == mine).all())


def numbers_of_all(mine: Tensor, group: RankGroup) -> Tensor:
    """Gathers [n] of each rank of `group`, a gloo group, into [ranks, n]."""
    every = mine.new_empty(group.process_group.size(), mine.numel())
    group.all_gathers([every.view(-1)], [mine])
    return every
