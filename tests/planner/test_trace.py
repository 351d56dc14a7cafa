"""ya.planner.trace: what train_step traces on a state, from abstract parameters on any mesh, and by what rules it
counts."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import yafsdp_fn as ya
from models import llama
from tests.harness.abstract import step_of
from tests.harness.pool import Pools
from tests.harness.small import L, Model, batch, block, embed, head, loss, model, one_rank, param, with_block, with_ends
from yafsdp_fn import optim
from yafsdp_fn.planner.footprint import state_bytes
from yafsdp_fn.planner.trace import trace
from yafsdp_fn.util.torch_private import causal_to_the_last

TX = optim.adamw(1e-2)
BF16 = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)
META = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in batch().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("precision", [ya.Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("skip", [True, False])
def test_it_is_the_trace_of_a_step(precision: ya.Precision, microbatches: int, skip: bool) -> None:
    tree = model()._replace(embed=ya.frozen(model().embed))
    state = ya.init(tree, TX, mesh=one_rank(), precision=precision)
    step = ya.train_step(loss, TX, microbatches=microbatches, skip_nonfinite=skip)
    expected = step.trace(state, batch())
    found = trace(loss, tree, META, precision=precision, microbatches=microbatches, tx=TX, skip_nonfinite=skip)
    assert found == expected
    assert trace(loss, tree, batch(), precision=precision, microbatches=microbatches).update_when == "never"


@pytest.mark.parametrize(
    "axes",
    [
        (("shard", 3),),
        (("shard", 1000),),
        (("replicate", 4), ("shard", 2)),
        (("node", 2), ("local", 8)),
        (("replicate", 2), ("node", 3), ("local", 4)),
    ],
)
def test_a_trace_moves_to_another_mesh(axes: tuple[tuple[str, int], ...]) -> None:
    tree = model()._replace(head=ya.frozen(model().head, torch.float64))
    one, moved = (trace(loss, tree, META, precision=BF16, tx=TX, mesh=mesh) for mesh in (None, axes))
    assert one.on(axes) == moved
    assert moved.on(one.mesh) == one
    assert moved.units != one.units or moved.ranks == 2
    assert state_bytes(moved)["optimizer"] < state_bytes(one)["optimizer"]
    assert trace(loss, tree, META, ranks=4) == trace(loss, tree, META, mesh=(("shard", 4),))


def with_norm(p: Model, b: Any) -> ya.Mean:
    """A loss that communicates beside its visits."""
    mean = loss(p, b)
    return mean._replace(total=mean.total + 0.1 * ya.global_norm(p))


def trace_on_one_rank(mesh: Any) -> Any:
    """What the first rank traces while the others do nothing."""
    state = ya.init(model(), TX, mesh=mesh)
    step = ya.train_step(with_norm, TX)
    return step.trace(state, batch()) if mesh.get_local_rank() == 0 else None


def test_ranks_do_not_communicate_to_trace(pools: Pools) -> None:
    found, _ = pools[2].run(trace_on_one_rank)
    assert found.visits == trace(with_norm, model(), META, ranks=2, tx=TX).visits
    assert state_bytes(found)["optimizer"] > 0
    assert found.update_when == "after norm"


def test_what_goes_into_a_visit_came_out_of_one() -> None:
    first, *layers, last = trace(loss, model(), META).visits
    assert first.cost.takes == ()  # tokens are not the step's
    for before, visit in zip([first, *layers], [*layers, last], strict=True):
        assert visit.cost.takes == before.cost.gives
        assert visit.cost.takes[0].nbytes == visit.cost.takes[0].grad_bytes > 0
    assert len({visit.cost.gives for visit in layers}) == L


def test_memory_that_several_visits_read_is_one_value() -> None:
    @with_ends
    def with_table(p: Model, x: Tensor) -> Tensor:
        table = torch.ones(x.shape[-1], dtype=x.dtype)
        x, _ = ya.scan(lambda c, w, t: block(c * t[:3].sum(), w), x, p.layers, consts=table)
        x, _ = ya.scan(lambda c, w: (c.view_as(c), None), x, p.layers)  # gives what it takes
        return x

    visits = trace(with_table, model(), META).visits
    (table,) = set.intersection(*(set(visit.cost.takes) for visit in visits[1 : 1 + L]))
    assert table.nbytes == 5 * 4
    assert table.grad_bytes == 0
    for visit in visits[1 + L : 1 + 2 * L]:
        assert visit.cost.gives == visit.cost.takes
        assert visit.cost.peak_bytes == visit.cost.inner_bytes == 0


def test_what_the_loss_saves_outside_of_blocks() -> None:
    def outside(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        x, _ = ya.scan(block, x, p.layers)
        scores = ya.apply(lambda w, x: F.linear(x, w["weight"]), p.head, x)
        return F.cross_entropy(scores.flatten(0, 1), b["targets"].flatten())

    *rest, last = trace(outside, model(), META).visits
    scores = 4 * 3 * 11 * 4
    assert last.cost.beside_bytes == scores + 4 + 4  # log softmax, the number of targets, the loss
    # in its backward the gradient of the scores, which nothing has saved, is beside log softmax, and they are gone
    assert last.cost.beside_peak_bytes + scores >= 2 * scores
    assert last.cost.gives[0].number in last.cost.unsaved
    assert not any(visit.cost.beside_bytes for visit in rest)


def test_torch_func_inside_of_blocks_and_losses() -> None:
    def slope(x: Tensor, w: Any) -> Tensor:
        return torch.func.grad(lambda x: block(x, w)[0].square().sum())(x)

    def run(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        x, _ = ya.scan(lambda x, w: (x + slope(x, w), None), x, p.layers)
        gradient = torch.func.grad(lambda p: loss(p, b).total)(p)
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return mean.total + ya.global_norm(gradient) + ya.global_norm(p)

    visits = trace(run, model(), META, ranks=4).visits
    assert [visit.name for visit in visits] == ["embed", *(f"layers[{i}]" for i in range(L)), "head"]
    plain = trace(loss, model(), META).visits
    assert visits[1].cost.flops == 2 * plain[1].cost.flops  # forward, and backward to the carry


def test_compiled_blocks_are_traced_as_written() -> None:
    compiled = torch.compile(block, fullgraph=True)  # which will not do with less than the whole

    assert trace(with_block(compiled), model(), META) == trace(loss, model(), META)


# ---- attention

B, H, K, S, T, D = 2, 4, 2, 16, 24, 8


def cost_of(block: Any, weights: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """What a block costs on a tensor of this shape."""

    def run(p: Any, b: Tensor) -> Tensor:
        return ya.apply(block, p["a"], b).float().sum()

    given = torch.empty(shape, dtype=dtype, device="meta")
    return trace(run, {"a": weights}, given, precision=ya.Precision(compute=dtype)).visits[0].cost


def attended(**how: Any) -> Any:
    """What a block that attends costs: queries [B, H, S, D], keys and values [B, K or H, T, D]."""
    options = {"wrap": lambda f: f, "keys": T, "heads": H, "dtype": torch.float32, **how}
    wrap, keys, heads, dtype = (options.pop(name) for name in ("wrap", "keys", "heads", "dtype"))

    def attend(w: Any, q: Tensor) -> Tensor:
        q = q * w["w"]
        k = q[:, :1, :1].expand(q.shape[0], heads, keys, D).contiguous()
        mask = options.get("attn_mask")
        if mask == "last":
            mask = causal_to_the_last(S, keys)
        elif mask:
            mask = torch.ones(S, keys, dtype=torch.bool)
        call = options | ({"attn_mask": mask} if mask is not None else {})
        return 2 * F.scaled_dot_product_attention(q, k, k.clone(), **call)

    return cost_of(wrap(attend), {"w": param(D)}, B, H, S, D, dtype=dtype)


@pytest.mark.parametrize(
    ("how", "pairs"),
    [
        ({}, S * T),
        ({"attn_mask": True}, S * T),
        ({"dropout_p": 0.1}, S * T),
        ({"heads": K, "enable_gqa": True}, S * T),
        ({"dtype": torch.bfloat16}, S * T),
        ({"is_causal": True, "keys": S}, S * S / 2),
        ({"is_causal": True, "keys": S, "heads": K, "enable_gqa": True, "dtype": torch.bfloat16}, S * S / 2),
        ({"is_causal": True}, S * S / 2),  # query i sees keys up to i, however many there are
        ({"is_causal": True, "keys": S // 2}, S * S / 8 + S * S / 4),
        ({"attn_mask": "last", "keys": 2 * S}, S * S + S * S / 2),  # query i sees keys up to S + i
    ],
)
def test_attention_saves_no_scores_and_is_counted_apart(how: dict[str, Any], pairs: float) -> None:
    cost = attended(**how)
    assert cost.attention_flops == 2 * B * H * pairs * 2 * D
    assert cost.bwd_attention_flops == 2.5 * cost.attention_flops
    assert cost.flops == cost.bwd_flops == 0
    keys = how.get("keys", T)
    heads = how.get("heads", H)
    size = how.get("dtype", torch.float32).itemsize
    rows = B * H * S * D * size
    columns = B * heads * keys * D * size
    mask = S * keys if how.get("attn_mask") is True else 0
    assert cost.carry_bytes == rows
    assert cost.kept_bytes == rows + rows + 2 * columns + rows + B * H * S * 4 + mask  # x, q, k and v, out, logsumexp


def checkpointed(f: Any) -> Any:
    def recomputed(w: Any, q: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda q: f(w, q), q, use_reentrant=False)

    return recomputed


@pytest.mark.parametrize(
    "wrap", [checkpointed, lambda f: ya.chunk(f, 2, in_axes=(None, 0))], ids=["checkpoint", "chunk"]
)
def test_attention_inside_blocks_that_recompute(wrap: Any) -> None:
    plain = attended()
    cost = attended(wrap=wrap)
    assert cost.attention_flops == plain.attention_flops
    assert cost.bwd_attention_flops == 3.5 * plain.attention_flops
    assert cost.kept_bytes < plain.kept_bytes / 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_inside_of_torchs_own_functions(is_causal: bool) -> None:
    """They take function modes away, and call a kernel."""
    width = H * D

    def attend(w: Any, x: Tensor) -> Tensor:
        x = x * w["gain"]
        mask = torch.ones(S, S, dtype=torch.bool) if is_causal else None
        inside: Any = F.multi_head_attention_forward
        how = {"need_weights": False, "attn_mask": mask, "is_causal": is_causal}
        return inside(x, x, x, width, H, w["in"], w["b"], None, None, False, 0.0, w["out"], w["b2"], **how)[0]

    weights = {
        "gain": param(width),
        "in": param(3 * width, width),
        "b": param(3 * width),
        "out": param(width, width),
        "b2": param(width),
    }
    cost = cost_of(attend, weights, S, B, width)
    assert cost.flops == 2 * S * B * width * 4 * width
    assert cost.attention_flops == 2 * B * H * S * S * 2 * D / (2 if is_causal else 1)
    assert cost.bwd_attention_flops == 2.5 * cost.attention_flops


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 hides the products of flex attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_counted() -> None:
    """Its forward: torch refuses its backward on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(w: Any, q: Tensor) -> Tensor:
        out: Any = flex_attention(q, q, q)
        return out * w["w"]

    cost = cost_of(attend, {"w": param(D)}, B, H, 128, D)
    assert cost.attention_flops == 2 * B * H * 128**2 * 2 * D
    assert cost.flops == 0


def test_attention_written_by_hand_is_matrix_products() -> None:
    def attend(w: Any, q: Tensor) -> Tensor:
        q = q * w["w"]
        return torch.softmax(q @ q.mT, -1) @ q

    cost = cost_of(attend, {"w": param(D)}, B, H, S, D)
    assert cost.flops == 2 * 2 * B * H * S * S * D
    assert cost.attention_flops == 0


# ---- scale


def test_llama_405b_on_16384_ranks_needs_no_memory() -> None:
    config = llama.CONFIGS["llama3.1-405b"]
    before = _resident()
    precision = ya.Precision(compute=torch.bfloat16)
    found = trace(*step_of(config, 1, 8192), mesh=(("node", 2048), ("local", 8)), precision=precision)
    assert len(found.visits) == 128
    assert found.ranks == 16384
    parameters = sum(unit.numel for unit in found.units)
    assert 405e9 < parameters < 406e9
    flops = sum(visit.cost.flops for visit in found.visits)
    products = parameters - found.units[0].numel - 253 * config.embed  # norms and embedding apart
    head = config.vocab * config.embed  # whose gradients are formed in the forward
    assert flops == 2 * 8192 * (products + 2 * head)
    assert flops + sum(visit.cost.bwd_flops for visit in found.visits) == 3 * 2 * 8192 * products
    logits = 2048 * config.vocab * (2 + 1)  # rows at a time, in bf16, and a quarter of them in fp32
    rows = 8192 * config.embed * 2
    cost = found.visits[-1].cost
    assert logits + 2 * rows < cost.peak_bytes < 1.01 * (logits + 2 * rows)  # normalised, and its gradient
    assert found.visits[1].cost.attention_flops == 2 * 8192**2 * config.embed
    assert _resident() - before < 400 * 2**20


def _resident() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def momentum_of_matrices(path: str, param: ya.Param) -> bool:
    return len(param.shape) > 1


OPTIMIZERS = [
    TX,
    optim.sgd(0.1),
    optim.masked(optim.sgd(0.1, momentum=0.9), momentum_of_matrices),
    optim.chain(optim.clip_by_global_norm(1.0), optim.assume_elementwise((TX.init, TX.update))),
]


RATES = [optim.adamw(lambda count: 1e-3 / (1 + count)), optim.sgd(lambda count: 1e-3 / (1 + count), 0.9)]


@pytest.mark.parametrize("tx", RATES, ids=["adamw", "sgd"])
def test_a_rate_that_changes_takes_no_real_memory(tx: Any) -> None:
    """A petabyte: torch itself would run fused kernels with a rate that is a tensor on real zeros."""
    tree = {"w": ya.Param((2**24, 2**24))}
    one = torch.empty((), device="meta")
    found = trace(lambda params, x: ya.apply(lambda w, x: (w["w"][0] * x).sum(), params, x), tree, one, tx=tx)
    assert state_bytes(found)["optimizer"] >= 2**50


@pytest.mark.parametrize("tx", OPTIMIZERS, ids=["adamw", "sgd", "masked", "foreign"])
def test_the_state_of_an_optimizer(tx: Any) -> None:
    tree = model()._replace(embed=ya.frozen(model().embed))
    state = ya.init(tree, tx, mesh=one_rank())
    held = [leaf for leaf in torch.utils._pytree.tree_leaves(state.opt_state) if isinstance(leaf, Tensor)]
    traced = trace(loss, tree, META, tx=tx)
    found = traced.optimizer
    assert state_bytes(traced)["optimizer"] == sum(leaf.nbytes for leaf in held)
    assert found == ya.train_step(loss, tx).trace(state, batch()).optimizer
    nbytes, elements = found.step
    assert (nbytes > 4 * elements) == any(tx is plain for plain in OPTIMIZERS[2:])  # fused kernels need a few scalars


# ---- bad arguments


def test_a_plan_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fork of a process that has asked for a GPU can use one, so `ya.launch` would not work after it."""

    def asked(*args: object) -> Any:
        raise AssertionError("CUDA is asked for something")

    FakeTensorMode()  # imports what would look for CUDA's names
    for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, asked, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)  # that needs no driver
    plan = ya.planner.plan(loss, model(), META, tx=optim.muon(1e-2), ranks=16, cluster="h100-80g")
    assert plan.fits
    assert not torch.cuda.is_initialized()


def test_bad_arguments_are_named() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    trees = {
        r"params has no leaves; expected a tree of ya\.Param": {},
        r"a state's sharded params; give the tree that ya\.init": state.params,
        "embed: expected a Param, a tensor or a Lazy leaf, got int": model()._replace(embed=3),
    }
    for text, tree in trees.items():
        with pytest.raises(TypeError, match=text):
            trace(loss, tree, META)
    both = r"trace: ranks=., mesh=.*: expected a number of ranks, such as ranks=32, or"
    sizes = r"mesh: expected positive sizes of axes .*'replicate', 'node', 'local'.*shards"
    options: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, sizes, {"mesh": (("shards", 4),)}),
        (ValueError, "mesh: expected positive sizes", {"ranks": 0}),
        (ValueError, r"outermost first, .*'replicate', 2", {"mesh": (("shard", 4), ("replicate", 2))}),
        (TypeError, both, {"mesh": 4}),
        (TypeError, both, {"mesh": (("shard", 4),), "ranks": 4}),
        (TypeError, "precision=torch.bfloat16: expected dtypes, such as", {"precision": torch.bfloat16}),
        (ValueError, "microbatches=0: expected an integer >= 1", {"microbatches": 0}),
        (ValueError, "argument 1 has 4 rows, not a multiple of 3 microbatches", {"microbatches": 3}),
        (TypeError, r"has_aux=True: the function must return \(loss, aux\), got Mean", {"has_aux": True}),
    ]
    for error, text, wrong in options:
        with pytest.raises(error, match=text):
            trace(loss, model(), META, **wrong)


def test_a_loss_that_needs_values_says_so() -> None:
    with pytest.raises(RuntimeError, match="the loss depends on the values of tensors"):
        trace(lambda p, b: ya.apply(embed, p.embed, b["tokens"]).sum() * b["tokens"].sum().item(), model(), META)


def test_aux_is_left_out() -> None:
    assert trace(lambda p, b: (loss(p, b), {"n": 1}), model(), META, has_aux=True) == trace(loss, model(), META)
