"""Bad arguments are refused on every rank alike, before anything is communicated; the next step is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, global_batch, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import TX, Batch, Params, base_loss, base_params, block, embed, layer, param

State = ya.ShardedState
Case = tuple[type[Exception], str, Callable[[State, Batch, Any], object]]


def raises(loss: Callable[[Params, Batch], Any], **options: Any) -> Callable[[State, Batch, Any], object]:
    return lambda state, batch, mesh: ya.train_step(loss, TX, **options)(state, batch)


def of_layers(params: Params, batch: Batch) -> Any:
    return ya.scan(block, ya.apply(embed, params.embed, batch["tokens"]), params.layers)[0]


def of_two_layers(params: Params, batch: Batch) -> ya.Mean:
    return base_loss(params._replace(layers=optree.tree_map(lambda leaf: leaf[:2], params.layers)), batch)


zero2, zero3 = ya.schedules.zero2, ya.schedules.zero3
LOSSES: list[Case] = [
    (TypeError, "apply on the stack 'layers'", raises(lambda p, b: ya.apply(embed, p.layers, b["tokens"]))),
    (TypeError, "'embed', which is not Stacked", raises(lambda p, b: ya.scan(block, b["tokens"], p.embed))),
    (ValueError, "unroll=0", raises(lambda p, b: ya.scan(block, b["tokens"], p.layers, unroll=0))),
    (ValueError, "length has 4, layers has 3", raises(lambda p, b: ya.scan(block, 0.0, p.layers, 4))),
    (ValueError, "layers has 3, xs.1 has 2", raises(lambda p, b: ya.scan(block, 0.0, (p.layers, torch.ones(2))))),
    (TypeError, "embed is sharded", raises(lambda p, b: p.embed[b["tokens"]].sum())),
    (AttributeError, "layers is sharded", raises(lambda p, b: p.layers.up.sum())),
    (TypeError, "expected a scalar tensor or ya.Mean", raises(of_layers)),
    (ValueError, "depends on parameters", raises(lambda p, b: ya.Mean(of_layers(p, b).sum(), of_layers(p, b).sum()))),
    (
        ValueError,
        r"layers are torch.float32 \(2, \d+\), expected 3 layers .*: a part of a stack .* order=range\(k\)",
        raises(of_two_layers),
    ),
    (ValueError, "does not depend on", raises(lambda p, b: of_layers(p, b).sum().detach())),
    (TypeError, r"must return \(loss, aux\)", raises(base_loss, has_aux=True)),
    (ValueError, "3 rows, not a multiple of 2", raises(base_loss, microbatches=2)),
]
OTHERS: list[Case] = [
    (ValueError, "microbatches=0", raises(base_loss, microbatches=0)),
    (TypeError, "expected a function from a trace", raises(base_loss, schedule="zero3")),
    (ValueError, r"zero3\(prefetch=-1\)", lambda *_: zero3(prefetch=-1)),
    (ValueError, r"zero3\(resident=1.5\)", lambda *_: zero3(resident=1.5)),
    (ValueError, r"zero2\(prefetch=-1\)", lambda *_: zero2(prefetch=-1)),
    (ValueError, r"first\(-1\)", lambda *_: ya.schedules.remat.first(-1)),
    (ValueError, r"every\(0\)", lambda *_: ya.schedules.remat.every(0)),
    (TypeError, "takes a ShardedState", lambda state, batch, _: ya.train_step(base_loss, TX)(state.params, batch)),
    (ValueError, "argnums=2", lambda state, batch, _: ya.value_and_grad(base_loss, argnums=2)(state.params, batch)),
    (TypeError, "torch.int64", lambda state, batch, _: ya.value_and_grad(base_loss, argnums=1)(state.params, batch)),
    (TypeError, "tree of Param", lambda state, _, mesh: ya.init(plain(base_params(2)), TX, mesh=mesh)),
    (TypeError, "floating point", lambda state, _, mesh: ya.shard({"a": torch.arange(3)}, TX, mesh=mesh)),
    (TypeError, "expected a Param", lambda state, _, mesh: ya.shard({"a": 3}, TX, mesh=mesh)),
    (ValueError, "disagree", lambda *_: ya.init({"s": ya.Stacked({"a": param(2, 3), "b": param(3, 3)})}, TX)),
    (ValueError, "do not nest", lambda *_: ya.init({"s": ya.Stacked({"a": ya.Stacked(layer(2))})}, TX)),
    (TypeError, "Precision.compute", lambda *_: ya.Precision(compute=torch.int64)),
    (ValueError, "the job has 2 ranks", lambda *_: ya.mesh(shard=3, device="cpu")),
    (ValueError, "not a multiple of 2 ranks", lambda state, batch, mesh: ya.shard_batch(batch, mesh)),
    (TypeError, "not Stacked", lambda state, *_: ya.map_whole_layers(lambda w: w, state.params.embed)),
    (ValueError, "differ in structure", lambda state, *_: ya.vdot(state.params, state.params.head)),
    (ValueError, "gradient of .* should be like", lambda state, *_: state.apply_gradients(cut(state.params), TX)),
    (ValueError, "not a program", lambda *_: ya.Program.from_json("{}")),
]


def cut(params: Params) -> Params:
    return optree.tree_map(lambda leaf: leaf[..., :-1], params)


@on_ranks(2)
@pytest.mark.parametrize("number", range(len(LOSSES) + len(OTHERS)), ids=[text for _, text, _ in [*LOSSES, *OTHERS]])
def test_bad_arguments(mesh: Any, number: int) -> None:
    error, text, call = [*LOSSES, *OTHERS][number]
    state, batch = ya.init(base_params(3), TX, mesh=mesh), batch_of(mesh.get_local_rank())
    step = ya.train_step(base_loss, TX)
    for _ in range(2):
        with pytest.raises(error, match=text):
            call(state, batch, mesh)
    for seed in range(2):
        expected = ya.value_and_grad(base_loss)(ya.unshard(state), global_batch(mesh.size(), seed=seed))[0]
        state, metrics = step(state, batch_of(mesh.get_local_rank(), seed=seed))
        compare(metrics["loss"], expected, 1e-5, "the next step")
