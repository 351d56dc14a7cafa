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

STEPS, LR, DECAY = 20, 0.02, 0.1
MATRICES = ("layers.up", "layers.down")


def torchs(whole: Any) -> dict[str, torch.Tensor]:
    """The parameters by name after as many steps of torch.optim.Muon, layer by layer, beside torch's AdamW."""

    def rows(path: str, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return leaf.unbind() if path in MATRICES else (leaf,)

    own = {path: [torch.nn.Parameter(row.clone()) for row in rows(path, leaf)] for path, leaf in named_leaves(whole)}
    chosen = [row for path in MATRICES for row in own[path]]
    muon = torch.optim.Muon(chosen, lr=LR, weight_decay=DECAY)
    others = [row for path in own.keys() - set(MATRICES) for row in own[path]]
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=DECAY)
    like = whole._replace(layers=ya.Stacked(whole.layers))  # `normal_like` draws layer by layer
    for step in range(STEPS):
        for path, grad in named_leaves(ya.normal_like(step, like)):
            for mine, row in zip(own[path], rows(path, grad), strict=True):
                mine.grad = row
        muon.step()
        adamw.step()
    return {path: torch.stack([row.detach() for row in of]) for path, of in own.items()}


@on_ranks(1, 2, 3, 4)
def test_is_torchs(mesh: Any) -> None:
    tx = optim.muon(LR, dtype=torch.bfloat16, weight_decay=DECAY, others=optim.adamw(0.01, weight_decay=DECAY))
    state = ya.init(model(), tx, mesh=mesh)
    expected = torchs(ya.unshard(state.params))
    for step in range(STEPS):
        state = state.apply_gradients(ya.normal_like(step, state.params), tx)
    for path, got in named_leaves(ya.unshard(state.params)):
        torch.testing.assert_close(got, expected[path].view(got.shape), rtol=0, atol=1e-5)


# ---- by heads: blocks of a leaf

BLOCKS = {"layers.q": (-2, 3), "layers.o": (1, 2), "layers.w": None}
"""Of [6, 5], [5, 6] and [5, 7] a layer."""


@on_ranks(1, 2)
def test_by_heads_is_torchs_of_each_head(mesh: Any) -> None:
    """Each block as a parameter of torch's Muon."""
    params = {"layers": ya.Stacked({"q": param(3, 6, 5), "o": param(3, 5, 6), "w": param(3, 5, 7)})}
    tx = optim.muon(LR, dtype=torch.bfloat16, weight_decay=DECAY, blocks=lambda path, p: BLOCKS[path])
    state = ya.init(params, tx, mesh=mesh)
    whole = ya.unshard(state.params)["layers"]

    def parts(of: Any) -> list[torch.Tensor]:
        each = [(name, row) for name in sorted(of) for row in of[name]]
        cuts = [(row, BLOCKS[f"layers.{name}"] or (0, 1)) for name, row in each]
        return [part.clone() for row, (dim, count) in cuts for part in row.chunk(count, dim)]

    theirs = [torch.nn.Parameter(part) for part in parts(whole)]
    muon = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY)
    for step in range(5):
        grads = ya.normal_like(step, state.params)
        for own, grad in zip(theirs, parts(ya.unshard(grads)["layers"]), strict=True):
            own.grad = grad
        state = state.apply_gradients(grads, tx)
        muon.step()
    for got, wanted in zip(parts(ya.unshard(state.params)["layers"]), theirs, strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=1e-5)


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
    assert values.min() > 0.6 and values.max() < 1.3
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
