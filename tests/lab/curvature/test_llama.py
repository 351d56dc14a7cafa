"""The top eigenvalue of a Llama is the same at two ranks as at one; vectors' shards alone are larger than a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pool
from tests.steps.test_allocations import watched_streams
from yafsdp_fn.lab.curvature import hessian_product, top_eigenpairs

CONFIG = llama.CONFIGS["debug"]
LAYER = (CONFIG.num_parameters - 2 * CONFIG.vocab * CONFIG.embed - CONFIG.embed) // CONFIG.layers


def setting(mesh: Any) -> tuple[Any, Any]:
    """Parameters, and the product on a batch of two words, as small as one can be: all time is for the weights."""
    params = ya.init(llama.params(CONFIG), ya.optim.sgd(0.1), mesh=mesh).params
    text = torch.tensor([list(b"in "), list(b"if ")])
    batch = ya.shard_batch({"tokens": text[:, :-1], "targets": text[:, 1:]}, mesh)
    return params, partial(hessian_product(llama.loss(CONFIG)), params, batch)


def top(mesh: Any) -> tuple[float, int]:
    params, product = setting(mesh)
    with sdpa_kernel(SDPBackend.MATH):
        found = top_eigenpairs(product, params, tolerance=0.1)
    return float(found.values), found.products


def test_the_top_eigenvalue_of_a_llama(pools: dict[int, Pool]) -> None:
    ((alone, products),) = pools[1].run(top)
    assert alone > 0 and products > 3
    for value, _ in pools[2].run(top):
        assert abs(value / alone - 1.0) < 1e-4


def allocations(mesh: Any) -> tuple[set[int], set[int]]:
    """Numbers of float32 elements: of the shards, and of all that is allocated, here and for collectives."""
    params, product = setting(mesh)
    memory = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with sdpa_kernel(SDPBackend.MATH), watched_streams() as streams, memory, pytest.raises(RuntimeError):
        top_eigenpairs(product, params, tolerance=0.0, products=2)
    events = memory.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return {leaf.numel() for leaf in optree.tree_leaves(params)}, {size // 4 for size in [*sizes, *streams.sizes]}


def test_nothing_of_its_size_is_allocated(pools: dict[int, Pool]) -> None:
    for shards, allocated in pools[2].run(allocations):
        assert max(allocated) < CONFIG.num_parameters / 2
        assert {size for size in allocated if size > LAYER} <= shards
        assert max(shards) in allocated and LAYER in allocated  # it does see them
