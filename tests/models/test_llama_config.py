"""The table of shapes against the published numbers of parameters, and the texts of refusals."""

import dataclasses
import math

import optree
import pytest

from models import llama

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    assert llama.CONFIGS[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", llama.CONFIGS)
def test_count_is_that_of_the_tree(name: str) -> None:
    config = llama.CONFIGS[name]
    leaves = optree.tree_leaves(llama.params(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == config.num_parameters
    assert all(leaf.shape[0] == config.layers for leaf in optree.tree_leaves(llama.params(config).layers))


def test_every_name_is_covered() -> None:
    assert set(llama.CONFIGS) == {"debug", *PUBLISHED}
    assert 3.5e6 < llama.CONFIGS["debug"].num_parameters < 4.5e6


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_heads": 3}, r"Config.kv_heads: 3 does not divide heads=4"),
        ({"head_dim": 63}, r"Config.head_dim: expected an even number, got 63"),
        ({"layers": 0}, r"Config.layers: expected a positive integer, got 0"),
        ({"vocab": 256.0}, r"Config.vocab: expected a positive integer, got 256.0"),
        ({"ffn": True}, r"Config.ffn: expected a positive integer, got True"),
        ({"norm_eps": 0.0}, r"Config.norm_eps: expected a positive number, got 0.0"),
        ({"rope_theta": math.inf}, r"Config.rope_theta: expected a positive number, got inf"),
    ],
)
def test_refusals_name_the_field(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(llama.CONFIGS["debug"], **change)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"factor": 0.5}, r"RopeScaling.factor: expected a number of at least 1, got 0.5"),
        ({"factor": 8.0, "low_freq_factor": 4.0}, r"RopeScaling.low_freq_factor: .* got 4.0 and 4.0"),
        ({"factor": 8.0, "original_max_length": 0}, r"RopeScaling.original_max_length: expected a positive integer"),
    ],
)
def test_rope_scaling_refusals(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        llama.RopeScaling(**arguments)
