"""Trees of parameters: markers, layouts, shards, and where initial values come from."""

from yafsdp_fn.params import initializers
from yafsdp_fn.params.algebra import map_trainable, sum_over_ranks, to_shards
from yafsdp_fn.params.leaf_mask import leaf_mask
from yafsdp_fn.params.markers import without_markers
from yafsdp_fn.params.sources import with_wire
from yafsdp_fn.params.tree import leaf_names

__all__ = [
    "initializers",
    "leaf_mask",
    "leaf_names",
    "map_trainable",
    "sum_over_ranks",
    "to_shards",
    "with_wire",
    "without_markers",
]


def __dir__() -> list[str]:
    return sorted(__all__)
