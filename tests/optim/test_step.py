"""`step_` against its definition: `tx.update(grads / scale, ...)` and `apply_updates`."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

from tests.harness.gpu import DEVICES, on_gpu
from tests.harness.watching import Watch
from tests.optim.trees import Model, assert_close, bits, clone, defined_step, flat, matrices, model
from yafsdp_fn import optim
from yafsdp_fn.optim.step.analysis import analysis
from yafsdp_fn.params.algebra import global_norm

RAMP = optim.warmup_cosine_decay_schedule(0.01, 0.1, 2, 6, end_value=0.01)

FUSED = {
    "adamw": lambda: optim.adamw(0.05, weight_decay=0.1),
    "adamw_masked": lambda: optim.adamw(0.05, weight_decay=0.1, mask=matrices),
    "adamw_mask_of_nothing": lambda: optim.adamw(0.05, weight_decay=0.1, mask=lambda path, p: False),
    "adamw_schedule": lambda: optim.adamw(RAMP, b1=0.8, b2=0.95, eps=1e-6),
    "adam": lambda: optim.adam(0.05),
    "adam_l2": lambda: optim.chain(optim.add_decayed_weights(0.1), optim.adam(RAMP)),
    "adam_l2_masked": lambda: optim.chain(optim.masked(optim.add_decayed_weights(0.1), matrices), optim.adam(0.05)),
    "sgd": lambda: optim.sgd(0.05),
    "sgd_schedule": lambda: optim.sgd(RAMP),
    "momentum": lambda: optim.sgd(0.05, momentum=0.9),
    "nesterov": lambda: optim.sgd(RAMP, momentum=0.9, nesterov=True),
    "sgd_l2": lambda: optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.05)),
    "momentum_l2_masked": lambda: optim.chain(optim.add_decayed_weights(0.1, matrices), optim.sgd(0.05, momentum=0.9)),
    "by_hand": lambda: optim.chain(
        optim.identity(), optim.scale_by_adam(), optim.chain(optim.add_decayed_weights(0.1), optim.scale(-0.05))
    ),
    "ascent": lambda: optim.scale(0.05),
}
GENERAL = {
    "momentum_zero": lambda: optim.sgd(0.05, momentum=0.0),
    "masked_whole": lambda: optim.masked(optim.adamw(0.05), matrices),
    "two_rates": lambda: optim.chain(
        optim.masked(optim.sgd(0.1), matrices), optim.masked(optim.sgd(0.01), lambda *leaf: not matrices(*leaf))
    ),
    "clip_late": lambda: optim.chain(optim.scale_by_adam(), optim.clip_by_global_norm(0.5), optim.scale(-0.1)),
    "decay_after_trace": lambda: optim.chain(optim.trace(0.9), optim.add_decayed_weights(0.1), optim.scale(-0.1)),
    "nothing": optim.identity,
    "foreign": lambda: optim.chain(foreign_sign(), optim.scale(-0.1)),
}
ALL = FUSED | GENERAL


def foreign_sign() -> tuple[Any, Any]:
    """A bare pair of functions with a tensor counter."""
    return (
        lambda params: {"count": torch.zeros((), device=flat(params)[0].device)},
        lambda updates, state, params=None: (optree.tree_map(torch.sign, updates), {"count": state["count"] + 1}),
    )


def clipped(tx: Any) -> Any:
    return optim.chain(optim.clip_by_global_norm(0.7), optim.chain(tx))


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_equals_the_definition_over_steps_with_a_skip(
    name: str, clip: bool, dtype: torch.dtype, rtol: float, device: str
) -> None:
    tx = clipped(ALL[name]()) if clip else ALL[name]()
    params = model(0, dtype, device)
    expected = clone(params)
    state = tx.init(params)
    expected_state = tx.init(params)
    for step in range(6):
        grads = model(step + 1, dtype, device)
        bad = step in (0, 3)
        found_inf = torch.tensor(float(bad), device=device)
        scale = torch.tensor(3.0, device=device)
        if bad:
            grads.bias[1], grads.layers.weight[0, 0, 0] = float("nan"), float("inf")
        before = bits((params, state))
        if not bad:
            expected, expected_state = defined_step(tx, expected, grads, expected_state, 3.0)
        norm = global_norm(grads) / scale if analysis(tx).clips else None
        state = optim.step_(tx, params, grads, state, scale=scale, found_inf=found_inf, grad_norm=norm)
        if bad:
            assert bits((params, state)) == before
        assert_close((params, state), (expected, expected_state), rtol)
    assert bits(params) != bits(model(0, dtype, device))


@on_gpu
def test_cuda_never_waits_for_the_device() -> None:
    for name, make in ALL.items():
        if "mask" in name or name == "two_rates":  # the mask of a plain tree is read
            continue
        tx = clipped(make())
        params = model(0, device="cuda")
        grads = model(1, device="cuda")
        state = tx.init(model(0, device="cuda"))
        scale = torch.ones((), device="cuda")
        found_inf = torch.zeros((), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            optim.step_(tx, params, grads, state, scale=scale, found_inf=found_inf)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_norm_that_is_given_is_the_one_that_clips() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_global_norm(0.5), optim.sgd(1.0))
    params = model(0)
    grads = model(1)
    expected = optree.tree_map(lambda p, g: p - g / 2 * (1 / 16) * (0.5 / 1.0), params, grads)
    optim.step_(tx, params, grads, tx.init(params), scale=torch.tensor(2.0), grad_norm=torch.tensor(16.0))
    assert_close(params, expected, 1e-6)


def test_a_small_gradient_is_not_scaled_up() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1e6), optim.sgd(1.0))
    params = model(0)
    grads = model(1)
    expected = optree.tree_map(torch.sub, params, grads)
    optim.step_(tx, params, grads, tx.init(params), scale=torch.tensor(1.0))
    assert bits(params) == bits(expected)


@pytest.mark.parametrize("name", FUSED)
def test_fused_reads_nothing_back_and_allocates_nothing(name: str) -> None:
    tx = clipped(FUSED[name]())
    params = Model(*clone(model(0)))
    grads = model(1)
    state = tx.init(params)
    scalars = {"scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0), "grad_norm": torch.tensor(3.0)}
    addresses = [leaf.data_ptr() for leaf in optree.tree_leaves((params, state))]
    with Watch() as watch:
        state = optim.step_(tx, params, grads, state, **scalars)
    assert any("_fused_" in op for op in watch.ops)
    if "masked" not in name and "mask_of" not in name:  # the mask of a plain tree is read; that of a sharded one is not
        assert "aten::_local_scalar_dense" not in watch.ops
    assert max(watch.fresh) <= 8
    assert [leaf.data_ptr() for leaf in optree.tree_leaves((params, state))] == addresses


@pytest.mark.parametrize("name", [n for n in GENERAL if n not in ("masked_whole", "two_rates")])
def test_the_general_path_reads_nothing_back(name: str) -> None:
    tx = clipped(GENERAL[name]())
    params = model(0)
    grads = model(1)
    state = tx.init(model(0))
    with Watch() as watch:
        optim.step_(tx, params, grads, state, scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
    assert not any("_fused_" in op for op in watch.ops)
    assert "aten::_local_scalar_dense" not in watch.ops


def test_gradients_of_another_order_or_dtype() -> None:
    tx = optim.adamw(0.1)
    weight = torch.randn(4, 3)
    gradient = torch.randn(3, 4)
    expected, _ = defined_step(tx, [weight.clone()], [gradient.t()], tx.init([weight]))
    params = [weight]
    optim.step_(tx, params, [gradient.t()], tx.init(params))
    assert_close(params, expected, 1e-6)
    params = [weight.clone()]
    optim.step_(tx, params, [gradient.t().bfloat16()], tx.init(params))
    torch.testing.assert_close(params[0], expected[0] * 1.0, rtol=1, atol=0.25)


def test_parameters_in_another_order_take_the_general_path() -> None:
    tx = optim.adamw(0.1)
    params = [torch.randn(3, 4).t()]
    grads = [torch.randn(4, 3)]
    expected, _ = defined_step(tx, clone(params), grads, tx.init(params))
    with Watch() as watch:
        optim.step_(tx, params, grads, tx.init(params))
    assert not any("_fused_" in op for op in watch.ops)
    assert_close(params, expected, 1e-6)


def test_half_precision_keeps_dtypes() -> None:
    dtype = torch.bfloat16
    for make in ALL.values():
        tx = clipped(make())
        params = model(0, dtype)
        state = tx.init(model(0, dtype))
        dtypes = [leaf.dtype for leaf in optree.tree_leaves((params, state))]
        expected, _ = defined_step(tx, clone(params), model(1, dtype), state)
        state = optim.step_(tx, params, model(1, dtype), state, scale=torch.tensor(1.0))
        assert [leaf.dtype for leaf in optree.tree_leaves((params, state))] == dtypes
        assert_close(params, expected, 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "sgd_l2", "adamw"])
def test_a_step_of_16_bit_parameters_moves_every_element(name: str, dtype: torch.dtype) -> None:
    """torch's fused SGD on the CPU moves only the last few."""
    tx = FUSED[name]()
    params = [torch.full((100,), 0.5, dtype=dtype)]
    grads = [torch.full((100,), 2.0, dtype=dtype)]
    expected, _ = defined_step(FUSED[name](), [torch.tensor([0.5])], [torch.tensor([2.0])], tx.init([torch.zeros(1)]))
    if name == "nesterov":  # its ramp begins at 0.01
        assert expected[0].item() == pytest.approx(0.5 - 0.01 * 2.0 * 1.9)
    optim.step_(tx, params, grads, tx.init(params))
    torch.testing.assert_close(params[0].float(), expected[0].expand(100), rtol=0.01, atol=0.0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("name", ALL)
def test_scalar_parameters_keep_their_dtype(name: str, dtype: torch.dtype, rtol: float) -> None:
    """0-dim tensors of two dtypes promote each other, unlike a factor and a vector."""
    tx = clipped(ALL[name]())
    params = {"layers": {"weight": torch.tensor(2.0, dtype=dtype)}}
    updates, state = tx.update(clone(params), tx.init(params), params)
    assert optree.tree_leaves(updates)[0].dtype == dtype
    assert [leaf.dtype for leaf in optree.tree_leaves(state)] == [
        leaf.dtype for leaf in optree.tree_leaves(tx.init(params))
    ]
    expected, expected_state = defined_step(tx, params, params, tx.init(params))
    state = optim.step_(tx, params, clone(params), tx.init(params))
    assert_close((params, state), (expected, expected_state), rtol)


def test_an_empty_tree_takes_a_step() -> None:
    tx = clipped(optim.adamw(0.1))
    state = optim.step_(tx, {}, {}, tx.init({}), scale=torch.tensor(1.0), grad_norm=torch.tensor(0.0))
    assert optree.tree_leaves(state)[0].item() == 1


def test_a_gradient_of_another_shape_is_named() -> None:
    params = model(0)
    grads = model(1)
    wrong = grads._replace(layers=grads.layers._replace(norm=torch.zeros(2, 7)))
    with pytest.raises(
        ValueError, match=r"gradient of layers\.norm should be like torch\.float32 \(3, 7\), got .*2, 7"
    ):
        optim.step_(optim.sgd(0.1), params, wrong, optim.sgd(0.1).init(params))


def test_a_counter_that_is_no_tensor_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"count": state["count"] + 1}

    tx = optim.chain((lambda params: {"count": 0}, update), optim.scale(-0.1))
    params = model(0)
    before = bits(params)
    with pytest.raises(TypeError, match=r"count of the state of .*update went from int to int.*must be a tensor"):
        optim.step_(tx, params, model(1), tx.init(params), found_inf=torch.tensor(0.0))
    assert bits(params) == before


def test_a_state_that_swaps_its_leaves() -> None:
    """New values are all made before the first is written."""
    tx = (
        lambda params: (torch.zeros(3), torch.ones(3)),
        lambda updates, state, params=None: (updates, (state[1], state[0])),
    )
    params = [torch.zeros(3)]
    for found_inf in (None, torch.tensor(0.0)):
        state = optim.step_(tx, params, [torch.zeros(3)], (torch.zeros(3), torch.ones(3)), found_inf=found_inf)
        assert [leaf.tolist() for leaf in state] == [[1.0] * 3, [0.0] * 3]
