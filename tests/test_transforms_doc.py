"""What docs/transforms.md shows runs, and is what it says."""

from __future__ import annotations

from typing import Any

import optree

import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.harness.pages import blocks, doc
from tests.harness.pool import on_ranks
from tests.harness.small import batch, loss, model

TX = ya.optim.sgd(0.1)
PAGE = doc("transforms")
(CODE,) = blocks(PAGE)


@on_ranks(1, 2)
def test_the_code_runs(mesh: Any) -> None:
    own = batch(mesh.get_rank())
    state = ya.init(model(), TX, mesh=mesh)
    names = {"ya": ya, "optree": optree, "loss_fn": loss, "batch": own, "state": state}
    names["world"] = mesh.size()
    exec(CODE, names)
    compare(names["grads"], ya.grad(loss)(state.params, own), 1e-5, "ya.grad")
    compare(names["hvp"], names["same"], 1e-5, "Hessian-vector products")
    compare(names["slope"], names["mean"], 1e-5, "by the learned rate")
    assert float(ya.global_norm(names["meta"])) > 0
