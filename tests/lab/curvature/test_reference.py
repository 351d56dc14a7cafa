"""Others on the same model: curvlinops for matrices, kronfluence for influences. Skipped where they are not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.harness.small import Model, model
from tests.lab.curvature.problem import (
    BOUND,
    DAMPING,
    DOUBLE,
    IGNORED,
    TX,
    Dense,
    batch,
    here,
    logits,
    loss,
    loss_of_logits,
    off,
    vector,
)
from yafsdp_fn.lab.curvature import gauss_newton_product, hessian_product, influence, top_eigenpairs
from yafsdp_fn.lab.curvature.trees import directions

# ---- curvlinops


class Plain(nn.Module):
    """tokens [B, S] -> logits [B * S, V]; the parameters are the leaves of `Dense.tree`, in their order."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        leaves, self._spec = optree.tree_flatten(dense.tree(dense.params))
        self.leaves = nn.ParameterList(leaves)

    def forward(self, tokens: Tensor) -> Tensor:
        return logits(optree.tree_unflatten(self._spec, list(self.leaves)), {"tokens": tokens}).flatten(0, 1)


def products(mesh: Any) -> tuple[Tensor, ...]:
    params, own, _ = here(mesh)
    v, hessian = directions(3, params), partial(hessian_product(loss), params, own)
    gauss_newton = partial(gauss_newton_product(logits, loss_of_logits), params, own)
    top = top_eigenpairs(hessian, params, 2, tolerance=1e-6).values
    return vector(v), vector(hessian(v)), vector(gauss_newton(v)), top


def test_curvlinops(pools: dict[int, Pool]) -> None:
    """Products, and the top of the spectrum by ARPACK."""
    theirs, sparse = pytest.importorskip("curvlinops"), pytest.importorskip("scipy.sparse.linalg")
    plain = Plain(Dense())
    data = [(batch()["tokens"], batch()["targets"].flatten())]
    hessian, gauss_newton = (
        of(plain, nn.CrossEntropyLoss(ignore_index=IGNORED), list(plain.parameters()), data)
        for of in (theirs.HessianLinearOperator, theirs.GGNLinearOperator)
    )
    v, along_hessian, along_gauss_newton, top = pools[2].run(products)[0]
    assert off(along_hessian, hessian @ v) < BOUND
    assert off(along_gauss_newton, gauss_newton @ v) < BOUND
    arpack = sparse.eigsh(hessian.to_scipy(), 2, which="LA", return_eigenvectors=False)
    assert off(top, torch.tensor(sorted(arpack, reverse=True))) < BOUND


# ---- kronfluence: matrices of linear layers alone; embedding and norm gains are frozen


class Linears(nn.Module):
    """The same model of torch's own layers."""

    def __init__(self, params: Model) -> None:
        super().__init__()
        embed, layers, head = params
        self.embed = nn.Embedding.from_pretrained(embed["weight"], freeze=True)
        self.register_buffer("norm", head["norm"])
        self.head = self._linear(head["weight"])
        self.up = nn.ModuleList(map(self._linear, layers["up"], layers["bias"]))
        self.down = nn.ModuleList(map(self._linear, layers["down"]))

    @staticmethod
    def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
        made = nn.Linear(*weight.shape[::-1], bias=bias is not None, dtype=weight.dtype)
        made.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return self.head(x * self.norm)


def matrices() -> Model:
    given = model(2)
    return given._replace(embed=ya.frozen(given.embed), head=given.head | {"norm": ya.frozen(given.head["norm"])})


def total(params: Any, batch: Any) -> ya.Mean:
    return ya.Mean(loss(params, batch).total, 1.0)


def judged(mesh: Any, diagonal: Any) -> Tensor:
    """Influences of this rank's training examples on each of the test examples, [test, train], for a curvature that is
    a diagonal matrix, or where there is none is the damping alone."""
    state = ya.init(matrices(), TX, mesh=mesh, precision=DOUBLE)
    own, product = ya.shard_batch(batch(), mesh), lambda v: optree.tree_map(torch.zeros_like, v)
    if diagonal is not None:
        curvature = ya.shard(diagonal, TX, mesh=mesh, precision=DOUBLE).params
        product = lambda v: optree.tree_map(torch.mul, curvature, v)  # noqa: E731
    rows = [{key: value[i : i + 1] for key, value in batch(1).items()} for i in range(4)]
    found = [influence(total, state.params, own, row, product, damping=DAMPING, tolerance=1e-12) for row in rows]
    return torch.stack(found)


def scores(folder: Path, strategy: str) -> Tensor:
    """Those of kronfluence, [test, train]: test gradient, (curvature + damping)^-1, gradient of a training loss."""
    names = ("analyzer", "task", "arguments")
    analyzer, task, arguments = (pytest.importorskip(f"kronfluence.{name}") for name in names)

    class Task(task.Task):  # type: ignore[name-defined,misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return loss_of_logits(model(batch[0]), {"targets": batch[1]}).total

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    dense, own, float64 = Dense(), Task(), torch.float64
    prepared = analyzer.prepare_model(Linears(dense.tree(dense.params)), own)
    found = analyzer.Analyzer("small", prepared, own, cpu=True, output_dir=str(folder), disable_tqdm=True)
    train, test = (torch.utils.data.TensorDataset(*batch(seed).values()) for seed in (0, 1))
    factors = arguments.FactorArguments(
        strategy=strategy, use_empirical_fisher=True, per_sample_gradient_dtype=float64, lambda_dtype=float64
    )
    found.fit_all_factors("factors", train, per_device_batch_size=4, factor_args=factors)
    how = arguments.ScoreArguments(
        damping_factor=DAMPING, per_sample_gradient_dtype=float64, precondition_dtype=float64, score_dtype=float64
    )
    found.compute_pairwise_scores("scores", "factors", test, train, 4, score_args=how)
    out: Tensor = found.load_pairwise_scores("scores")["all_modules"]
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning:kronfluence")
@pytest.mark.parametrize("strategy", ["identity", "diagonal"])
def test_kronfluence(pools: dict[int, Pool], tmp_path: Path, strategy: str) -> None:
    """identity: no curvature, undamped; diagonal: that of the empirical Fisher matrix."""
    pytest.importorskip("kronfluence")
    theirs, dense = scores(tmp_path, strategy), Dense()
    mean_weight = float(loss(dense.marked, batch()).weight) / 4
    squares = (mean_weight * dense.examples).square().mean(0)
    diagonal = None if strategy == "identity" else like(matrices(), dense.tree(squares))
    ours = -torch.cat(pools[2].run(judged, diagonal), dim=1)
    ours = ours * DAMPING if strategy == "identity" else ours
    assert off(ours, theirs) < BOUND


def like(marked: Model, tree: Model) -> Model:
    """`tree` with the markers of the model."""
    return optree.tree_unflatten(optree.tree_structure(marked), optree.tree_leaves(tree))
