"""Muon: torch's own, the orthogonalised matrices, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import model, param
from yafsdp_fn import optim
from yafsdp_fn.params.tree import named_leaves

LR, DECAY = 0.02, 0.1
Blocks = dict[str, tuple[int, int] | None]
"""Matrices, and the dimension and number of the blocks that each is cut into."""


def parts(tree: Any, blocks: Blocks) -> list[tuple[str, torch.Tensor]]:
    """Each layer of each leaf, or each of its blocks, with the leaf's path."""
    found = []
    for path, leaf in named_leaves(ya.unshard(tree)):
        dim, count = blocks.get(path) or (0, 1)
        for row in leaf.unbind() if path.startswith("layers") else (leaf,):
            found += [(path, part.clone()) for part in row.chunk(count, dim)]
    return found


def is_torchs(mesh: Any, params: Any, tx: Any, blocks: Blocks, steps: int) -> None:
    """Steps are those of torch's Muon on `parts`, beside torch's AdamW on those of other leaves."""
    state = ya.init(params, tx, mesh=mesh)
    theirs = [(path, torch.nn.Parameter(part)) for path, part in parts(state.params, blocks)]
    matrices, others = ([part for path, part in theirs if (path in blocks) == own] for own in (True, False))
    optimizers: list[Any] = [torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=0.01, weight_decay=DECAY))
    for step in range(steps):
        grads = ya.normal_like(step, state.params)
        for (_, own), (_, grad) in zip(theirs, parts(grads, blocks), strict=True):
            own.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        state = state.apply_gradients(grads, tx)
    for (path, got), (_, wanted) in zip(parts(state.params, blocks), theirs, strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=1e-5, msg=path)


@on_ranks(1, 2, 3, 4)
def test_is_torchs(mesh: Any) -> None:
    tx = optim.muon(LR, dtype=torch.bfloat16, weight_decay=DECAY, others=optim.adamw(0.01, weight_decay=DECAY))
    is_torchs(mesh, model(), tx, {"layers.up": None, "layers.down": None}, 20)


@on_ranks(1, 2)
def test_by_heads_is_torchs_of_each_head(mesh: Any) -> None:
    params = {"layers": ya.Stacked({"q": param(3, 6, 5), "o": param(3, 5, 6), "w": param(3, 5, 7)})}
    blocks: Blocks = {"layers.q": (-2, 3), "layers.o": (1, 2), "layers.w": None}
    tx = optim.muon(LR, dtype=torch.bfloat16, weight_decay=DECAY, blocks=lambda path, p: blocks[path])
    is_torchs(mesh, params, tx, blocks, 5)


@pytest.mark.parametrize("blocks", [(-2, 2), (2, 1), (0, 0)])
def test_blocks_that_do_not_fit(blocks: tuple[int, int]) -> None:
    tx = optim.muon(0.1, blocks=lambda path, p: blocks if path == "layers.up" else None)
    for create in (ya.PlainState.create, ya.init):
        with pytest.raises(
            ValueError, match=r"optim: blocks=\(.*\) for layers.up, \(\d, \d\): expected \(dim, count\)"
        ):
            create(model(), tx)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (3, 7, 4)], ids=str)
def test_singular_values_come_close_to_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optim.newton_schulz(x))
    assert values.min() > 0.6
    assert values.max() < 1.3
    many = torch.linalg.svdvals(optim.newton_schulz(x.double(), 30, (1.5, -0.5, 0.0)))
    torch.testing.assert_close(many, torch.ones_like(many))


@pytest.mark.parametrize(("adjust", "factor"), [("original", 1.5), ("match_rms_adamw", 0.6), ("none", 1.0)])
def test_adjusts_for_the_shape(adjust: Any, factor: float) -> None:
    leaf = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    new, _ = optim.orthogonalize(dtype=None, adjust=adjust).update([leaf], optim.LeafwiseState([optim.EmptyState()]))
    torch.testing.assert_close(new[0], factor * optim.newton_schulz(leaf))


def test_a_vector_is_refused() -> None:
    tx = optim.muon(0.1, where=lambda path, param: True)
    for create in (ya.PlainState.create, ya.init):
        with pytest.raises(ValueError, match=r"orthogonalize: a leaf of shape \(7,\) is no matrix; .*`partition`"):
            create(model(), tx)
    with pytest.raises(ValueError, match="adjust='rms'; expected one of original, match_rms_adamw, none"):
        optim.orthogonalize(adjust="rms")
