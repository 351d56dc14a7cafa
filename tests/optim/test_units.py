"""`UnitSteps` against `step_`: equal bits, whatever the order of units and their grouping."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.gpu import DEVICES
from tests.harness.marks import nightly
from tests.harness.watching import Watch
from tests.optim.test_elementwise import TXS
from tests.optim.test_step import ALL, FUSED, RAMP, clipped, foreign_sign
from tests.optim.trees import bits, clone
from yafsdp_fn import optim, unshard
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.optim.cutting import row_runs
from yafsdp_fn.optim.step.units import UnitSteps
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.markers import Pinned, Stacked, Unit, frozen
from yafsdp_fn.params.sharded import Origin, handles, placed, trainable
from yafsdp_fn.params.tree import Param
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.util.mesh_axes import round_up

SHAPES = {
    "layers": Stacked({"a_norm": Pinned(Param((5, 7))), "b": Unit({"w": Param((5, 3, 7))}), "w": Param((5, 7, 9))}),
    "frozen": frozen({"w": Param((4, 4))}),
    "head": {"bias": Param((3,)), "w": Param((70, 3)), "z": Param((1,))},
}
UNITS = list(range(1, 13))
"""0 is frozen, 1 the head, 2 what is pinned; 3 + 2 l and 4 + 2 l are of layer l."""


def matrices(path: str, param: Param) -> bool:
    return path.endswith("w")


def shards(seed: int, dtype: torch.dtype = torch.float32, rank: int = 0, length: Callable[[int], int] = int) -> Any:
    """The shards of `rank`: [L, n] and [n] with `n = length(elements of the unit)`, odd ones too. No reductions."""
    layout, _ = tree_layout(SHAPES)
    generator = torch.Generator().manual_seed(seed)
    comms = Ranks(1, 1, rank + 1, torch.device("cpu"), rank)
    owner: Any = SimpleNamespace(comms=comms, generation=0)
    shapes = [(len(g.units),) * g.stacked + (length(g.layout.numel),) for g in layout.groups]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return trainable(placed(layout, leaves, Origin(owner, 0)))


def foreign_lion() -> Any:
    """An elementwise pair with a tree, a counter, and a scalar per leaf."""

    def new(params: Any) -> Any:
        scalars = optree.tree_map(lambda p: torch.zeros((), dtype=torch.float64), params)
        return {"m": optree.tree_map(torch.zeros_like, params), "count": torch.zeros(()), "decays": scalars}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        out = optree.tree_map(lambda m, g: (0.9 * m + 0.1 * g).sign() / (1 + state["count"]), state["m"], updates)
        m = optree.tree_map(lambda m, g: m + 0.01 * (g.to(m.dtype) - m), state["m"], updates)
        decays = optree.tree_map(lambda d: d + 0.5, state["decays"])
        return out, {"m": m, "count": state["count"] + 1, "decays": decays}

    return optim.chain(optim.assume_elementwise((new, update)), optim.scale(-0.1))


UNITWISE: dict[str, Callable[[], Any]] = {name: make for name, make in ALL.items() if name != "clip_late"} | {
    "adamw_masked": lambda: optim.adamw(RAMP, weight_decay=0.5, mask=matrices),
    "adam_l2_masked": lambda: optim.chain(optim.add_decayed_weights(0.5, matrices), optim.adam(RAMP)),
    "momentum_l2_masked": lambda: optim.chain(optim.add_decayed_weights(0.5, matrices), optim.sgd(0.05, momentum=0.9)),
    "partition in a chain": lambda: optim.chain(
        optim.partition({"a": optim.trace(0.9), "b": optim.scale_by_adam()}, lambda path, p: "ab"["head" in path]),
        optim.scale(-0.1),
    ),
    "masked_whole": lambda: optim.masked(optim.adamw(0.05), matrices),
    "two_rates": lambda: optim.chain(
        optim.masked(optim.sgd(0.1, momentum=0.9), matrices),
        optim.masked(optim.adam(RAMP), lambda *leaf: not matrices(*leaf)),
    ),
    "foreign": lambda: optim.chain(optim.assume_elementwise(foreign_sign()), optim.scale_by_schedule(RAMP)),
    "foreign_lion": foreign_lion,
    **{name: lambda tx=tx: tx for name, tx in TXS.items()},
}


def parts(data: st.DataObject) -> list[list[int]]:
    """All units in some order, in calls of some sizes."""
    order = data.draw(st.permutations(UNITS))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1))))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@pytest.mark.parametrize("name", UNITWISE)
@pytest.mark.parametrize("examples", [5, nightly(15)])
def test_equals_the_separate_step_bit_for_bit(name: str, examples: int) -> None:
    settings(max_examples=examples)(given(data=st.data())(equals_the_separate_step))(name=name)


def equals_the_separate_step(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    rank, extra = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 40))
    where = {"dtype": dtype, "rank": rank, "length": lambda numel: numel // (rank + 1) + extra}
    tx = clipped(UNITWISE[name]()) if data.draw(st.booleans()) else UNITWISE[name]()
    grad_dtype = data.draw(st.sampled_from([dtype, torch.bfloat16]))
    params = shards(0, **where)
    expected = shards(0, **where)
    state = tx.init(params)
    expected_state = tx.init(expected)
    memory = shards(0, **where | {"dtype": grad_dtype})
    steps = UnitSteps(tx, params, memory, state)
    first = bits(params)
    for step in range(4):
        grads = shards(step + 1, **where | {"dtype": grad_dtype})
        optree.tree_map(lambda to, value: to.copy_(value), memory, grads)
        if step == 2:
            memory["head"].leaves[0].fill_(float("nan"))
            grads = clone(memory)
        scalars: Any = {"scale": torch.tensor(1.7), "found_inf": torch.tensor(float(step == 2))}
        scalars["grad_norm"] = global_norm(grads) / 1.7
        before = bits((params, state))
        expected_state = optim.step_(tx, expected, grads, expected_state, **scalars)
        for units in parts(data):
            steps.run(units, **scalars)
        assert steps.finish(scalars["found_inf"]) is state
        assert bits((params, state)) == bits((expected, expected_state))
        assert step != 2 or bits((params, state)) == before, "a skipped step keeps all bits"
    assert bits(params) != first or name == "foreign"  # its schedule begins at 0.01, lost on bf16 parameters
    assert steps.fits(params, memory, state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UNITWISE)
def test_scalars_may_be_left_out(name: str, device: str) -> None:
    def there(seed: int) -> Any:
        return optree.tree_map(lambda leaf: leaf.to(device), shards(seed))

    tx = UNITWISE[name]()
    params = there(0)
    expected = there(0)
    state = tx.init(params)
    expected_state = tx.init(expected)
    optim.step_(tx, expected, there(1), expected_state)
    steps = UnitSteps(tx, params, there(1), state)
    for unit in reversed(UNITS):
        steps.run([unit])
    steps.finish()
    assert bits((params, state)) == bits((expected, expected_state))


@pytest.mark.sampled
@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "adam_l2", "sgd_l2", "nesterov"])
def test_threads_leave_no_mark(name: str, dtype: torch.dtype, rest: int) -> None:
    """Threads are dealt whole vectors of 64 bytes, so only the end of a row has an odd rest."""
    for vectors in (3, 1023):
        n = vectors * 64 // dtype.itemsize + rest

        def after(threads: int) -> list[bytes]:
            def leaves(seed: int) -> list[torch.Tensor]:
                return list(torch.randn(3, n, generator=_rng(seed)).to(dtype).unbind())  # noqa: B023

            torch.set_num_threads(threads)
            params = leaves(0)
            tx = FUSED[name]()
            state = tx.init(params)
            for step in range(3):
                optim.step_(tx, params, leaves(step + 1), state, scale=torch.tensor(1.7))
            return bits(torch.cat([leaf.view(-1) for leaf in params]))

        assert after(2) == after(1)


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_runs_are_aligned_for_vector_loads() -> None:
    for handle in handles(shards(0, length=round_up)):
        for _, group, leaf in handle.group_leaves():
            runs = row_runs(matrices, handle, group, leaf.shape[-1])
            assert all(length % 8 == 0 for _, length in runs)


@pytest.mark.parametrize(("name", "kernels"), [("adamw", 1), ("adamw_masked", 2), ("nesterov", 1)])
def test_several_units_are_one_call_that_allocates_nothing(name: str, kernels: int) -> None:
    tx = clipped(UNITWISE[name]())
    params = shards(0)
    grads = shards(1)
    steps = UnitSteps(tx, params, grads, tx.init(params))
    scalars = {"scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0), "grad_norm": torch.tensor(3.0)}
    for units in (UNITS[::2], UNITS[1::2]):  # with and without decay in each
        with Watch() as watch:
            steps.run(units, **scalars)
        assert sum("_fused_" in op for op in watch.ops) == kernels
        assert "aten::_local_scalar_dense" not in watch.ops
        assert max(watch.fresh, default=0) <= 8
    steps.finish()


class TestErrors:
    def steps(self, tx: Any = None) -> UnitSteps:
        tx = tx or optim.adamw(0.1)
        params = shards(0, length=round_up)
        return UnitSteps(tx, params, shards(1, length=round_up), tx.init(params))

    def test_another_gradient(self) -> None:
        params = shards(0)
        tx = optim.sgd(0.1)
        with pytest.raises(ValueError, match=r"the gradient of head.* should be like"):
            UnitSteps(tx, params, shards(0) | {"head": optree.tree_map(lambda x: x[1:], shards(0)["head"])}, ())

    def test_a_plain_tree(self) -> None:
        tx = optim.adamw(0.1)
        params = {"a": {"w": torch.zeros(3)}}
        with pytest.raises(TypeError, match=r"a\.w is torch\.float32 \(3,\), no sharded handle"):
            UnitSteps(tx, params, clone(params), tx.init(params)).run([1])

    def test_a_state_outside_of_handles(self) -> None:
        tx = optim.assume_elementwise((lambda params: {"key": torch.zeros(2)}, lambda u, s, params=None: (u, s)))
        with pytest.raises(TypeError, match=r"key of the state of .* is torch\.float32 \(2,\) outside"):
            self.steps(tx).run([1])

    def test_a_state_of_another_shape(self) -> None:
        def new(params: Any) -> Any:
            return optree.tree_map(lambda p: torch.zeros(*p.shape, 2), params)

        with pytest.raises(TypeError, match=r"head of the state of .* like the parameters, \(\d+,\) or a 0-dim"):
            self.steps(optim.assume_elementwise((lambda p: new(p)["head"], lambda u, s, params=None: (u, s)))).run([1])

    @pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
    @pytest.mark.parametrize("asks", [global_norm, unshard])
    def test_a_foreign_update_that_asks_for_all(self, asks: Callable[[Any], Any], mask: bool) -> None:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            asks(updates)
            return updates, state

        tx = optim.assume_elementwise((lambda params: (), update))
        steps = self.steps(optim.masked(tx, matrices) if mask else tx)
        with pytest.raises(TypeError, match=r"over all parameters or ranks .*keep the optimizer outside the program"):
            steps.run([1])

    @pytest.mark.parametrize("together", [False, True])
    def test_counts_that_disagree(self, together: bool) -> None:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return updates, optree.tree_map(lambda s, u: torch.maximum(s, u.abs().max()), state, updates)

        steps = self.steps(optim.assume_elementwise((lambda p: optree.tree_map(lambda x: x.new_zeros(()), p), update)))
        with pytest.raises(RuntimeError, match=r"takes a 0-dim tensor of the state from 0\.0 to .*, another's to "):
            for units in [UNITS] if together else [[unit] for unit in UNITS]:
                steps.run(units)

    def test_another_memory(self) -> None:
        tx = optim.adamw(0.1)
        params = shards(0)
        grads = shards(1)
        state = tx.init(params)
        steps = UnitSteps(tx, params, grads, state)
        assert steps.fits(trainable(params), grads, state)
        assert not steps.fits(clone(params), grads, state)
        assert not steps.fits(params, grads, tx.init(params))
        steps.run([1])
        assert not steps.fits(params, grads, state)  # a step is under way


@pytest.mark.parametrize("name", UNITWISE)
def test_what_can_be_cut(name: str) -> None:
    assert optim.why_not_unitwise(UNITWISE[name]()) is None
    assert optim.why_not_unitwise(clipped(clipped(UNITWISE[name]()))) is None


CLIP = optim.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (ALL["clip_late"](), "clip_by_global_norm is not the first"),
        (optim.masked(CLIP, matrices), "clip_by_global_norm is not the first"),
        (optim.chain(optim.scale(1.0), optim.masked(optim.chain(CLIP, optim.sgd(1.0)), matrices)), "is not the first"),
        (optim.chain(optim.scale(1.0), optim.assume_elementwise(CLIP)), "is not the first"),
        (optim.contrib.schedule_free(optim.chain(CLIP, optim.sgd(0.1)), 0.1), "is not the first"),
        (foreign_sign(), "foreign_sign.* does not declare `elementwise`: it may need whole leaves"),
        (optim.chain(CLIP, optim.chain(foreign_sign())), "does not declare `elementwise`"),
        (optim.masked(foreign_sign(), matrices), "does not declare `elementwise`"),
    ],
    ids=["late", "masked", "masked chain", "wrapped", "schedule_free", "bare", "in a chain", "masked foreign"],
)
def test_what_cannot_be_cut(tx: Any, reason: str) -> None:
    why = optim.why_not_unitwise(tx)
    assert why is not None
    with pytest.raises(TypeError, match=rf"^optim: .*{reason}.*keep the optimizer outside the program"):
        params = {"w": torch.zeros(3)}  # foreign pairs are refused on shards before anybody asks for units
        UnitSteps(tx, params, clone(params), optim.chain(tx).init(params)[0]).run([1])
