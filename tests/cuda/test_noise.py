"""The device's generator is seeded for a call of the loss, and given back."""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from tests.cuda.days import MESHES
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.oracle import batch_of
from tests.harness.problems import Batch, Params, base_params, dropout_loss

TX = ya.optim.adamw(1e-2)


@in_child_process
def test_both_generators_are_seeded_and_given_back() -> None:
    """Their seeds beside the visits of each microbatch, in two steps."""
    seeds: list[tuple[int, int]] = []

    def loss(params: Params, batch: Batch) -> ya.Mean:
        seeds.append((torch.initial_seed(), torch.cuda.default_generators[0].initial_seed()))
        return dropout_loss(params, batch)

    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        generators = torch.default_generator, torch.cuda.default_generators[0]
        before = [generator.get_state() for generator in generators]
        batch = {key: value.to(CUDA) for key, value in batch_of(0, rows=4).items()}
        state = ya.init(base_params(2), TX, mesh=mesh)
        step = ya.train_step(loss, TX, microbatches=2)
        for _ in range(2):
            state, _ = step(state, batch)
        for generator, state_before in zip(generators, before, strict=True):
            assert torch.equal(generator.get_state(), state_before)
    assert len(set(seeds)) == 4
    assert all(host == device for host, device in seeds)
