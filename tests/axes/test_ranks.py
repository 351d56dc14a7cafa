"""The numbers of ranks on axes inside blocks, without any process."""

from __future__ import annotations

import itertools

import pytest
import torch

from yafsdp_fn.communication.ranks import Axis, Ranks

CPU = torch.device("cpu")
SIZES = {"expert": 2, "context": 2, "tensor": 3}


def ranks_at(shard: int, replica: int = 1, **places: int) -> Ranks:
    """Of a mesh of 2 replicas, 2 ranks on `shard`, and SIZES."""
    rank = shard
    for name, size in SIZES.items():
        rank = rank * size + places.get(name, 0)
    axes = {name: Axis(size, places.get(name, 0)) for name, size in SIZES.items()}
    return Ranks(2, 1, 24, CPU, rank, replica, axes=axes)


def test_ranks_of_other_tokens_draw_by_other_seeds() -> None:
    places = itertools.product(range(2), repeat=4)
    seeds = [ranks_at(s, r, expert=e, context=c).seed_rank for s, r, e, c in places]
    assert sorted(seeds) == list(range(16))


def test_the_ranks_of_a_unit_that_is_split() -> None:
    ranks = ranks_at(1, expert=1, context=0, tensor=2)
    assert ranks.without(()) is ranks
    assert ranks.without(("elsewhere",)) is ranks
    few = ranks.without(("tensor",))
    assert few is ranks.without(("tensor",))
    assert (few.ranks, few.rank, few.local_ranks, few.nodes, few.world) == (8, 6, 8, 1, 48)
    fewer = ranks.without(("expert", "tensor"))
    assert (fewer.ranks, fewer.rank) == (4, 2)  # shard and context
    assert fewer is ranks.without(("tensor", "expert"))
    assert ranks.ranks == 24
    assert ranks.rank == ranks_at(1, expert=1, tensor=2).rank


def test_a_unit_that_is_split_on_nodes() -> None:
    """2 nodes of 2 x 3 ranks, three of which have the parts of a unit: 2 ranks of each node have this one's."""
    found = [
        Ranks(1, 2, 6, CPU, 6 * node + 3 * local + place, axes={"tensor": Axis(3, place)}).without(("tensor",))
        for node, local, place in itertools.product(range(2), range(2), range(3))
    ]
    assert {(few.ranks, few.nodes, few.local_ranks) for few in found} == {(4, 2, 2)}
    assert [few.rank for few in found[1::3]] == [0, 1, 2, 3]
    whole = Ranks(1, 2, 3, CPU, 4, axes={"tensor": Axis(3, 1)}).without(("tensor",))  # all of a node
    assert (whole.ranks, whole.nodes, whole.local_ranks, whole.rank) == (2, 2, 1, 1)


@pytest.mark.parametrize("across", [("tensor",), ("expert",), ("expert", "tensor"), ("expert", "context", "tensor")])
def test_groups_of_ranks(across: tuple[str, ...]) -> None:
    ranks = ranks_at(1, expert=1, context=0, tensor=2)
    subgroups = ranks.subgroups(across=across)
    assert sorted(rank for members in subgroups for rank in members) == list(range(24))
    (mine,) = (members for members in subgroups if ranks.rank in members)
    few = ranks.without(across)
    assert len(mine) == few.ranks
    assert mine.index(ranks.rank) == few.rank
    assert mine == sorted(mine)
    # parts in the order of axes, the innermost fastest
    part = 0
    for name in across:
        part = part * SIZES[name] + ranks.axes[name].rank
    assert subgroups.index(mine) == part
    for name in across:
        (along,) = (members for members in ranks.subgroups(along=(name,)) if ranks.rank in members)
        assert along[ranks.axes[name].rank] == ranks.rank
        assert len(along) == SIZES[name]
