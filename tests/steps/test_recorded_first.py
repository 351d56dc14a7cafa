"""The first call of a loss is recorded before its first step: losses that no fake tensors could run, and ranks that
differ."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.collector import no_collection
from tests.harness.failing import TX, E, LossFn, batch, bits, embed, head, layer, loss, params, same, state, with_ends
from tests.harness.groups import SOON, breakable, breakable_stages, outcome
from tests.harness.oracle import plain
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import one_rank
from yafsdp_fn.errors import RanksDisagree

Table = Callable[[int], Tensor]


def cached() -> Table:
    """A table that Python keeps for good."""

    @functools.cache
    def table(n: int) -> Tensor:
        return torch.arange(float(n)) / n

    return table


def with_item(tree: Any, data: Any) -> Tensor:
    """Reads values in the loss, and in a block."""
    x = ya.apply(embed, tree["embed"], data["tokens"])
    scale = 2.0 if x.abs().sum().item() > 0 else 1.0

    def reading(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return layer(x, w)[0] * (1.0 if x.isfinite().all() else 0.0), None

    x, _ = ya.scan(reading, x, tree["layers"])
    return scale * ya.apply(head, tree["head"], x, data["targets"])


def with_mask(tree: Any, data: Any) -> Tensor:
    """Shapes follow from values: rows that a mask chooses."""
    x = ya.apply(embed, tree["embed"], data["tokens"])
    keep = data["tokens"][:, 0] >= 0
    x, _ = ya.scan(layer, x[keep], tree["layers"])
    return ya.apply(head, tree["head"], x, data["targets"][keep])


@with_ends
def mixture(tree: Any, x: Tensor) -> Any:
    """Each row goes to one of two experts, whose rows are found by `nonzero`."""

    def routed(x: Tensor, w: Any) -> tuple[Tensor, None]:
        rows = x.flatten(0, 1)
        chosen = (rows.detach().sum(-1) > 0).long()
        out = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            (mine,) = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, mine, layer(rows[mine], w)[0] * (expert + 1))
        return out.view_as(x), None

    return ya.scan(routed, x, tree["layers"])[0]


def tabled(table: Table, *, in_block: bool) -> LossFn:
    def body(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return layer(x + table(x.shape[-1]), w)[0], None

    @with_ends
    def total(tree: Any, x: Tensor) -> Tensor:
        x, _ = ya.scan(body if in_block else layer, x, tree["layers"])
        return x * table(x.shape[-1])

    return total


LOSSES: dict[str, Callable[[], LossFn]] = {
    "item": lambda: with_item,
    "mask": lambda: with_mask,
    "mixture": lambda: mixture,
    "table": lambda: tabled(cached(), in_block=False),
    "table in a block": lambda: tabled(cached(), in_block=True),
}


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("which", LOSSES)
def test_a_loss_of_values_trains(mesh: Any, which: str) -> None:
    """Two steps as the plain loop's; step 0 runs the program, which computes the same bits as it does from then on."""
    total = LOSSES[which]()
    rank = mesh.get_rank()
    step = ya.train_step(total, TX)
    first = ya.train_step(total, TX)
    oracle = ya.train_step(LOSSES[which](), TX)
    whole = [batch(k) for k in range(mesh.size())]
    data = optree.tree_map(lambda *xs: torch.cat(xs), *whole)
    now = state(mesh)
    expected = ya.PlainState.create(plain(params()), TX)
    start = bits(now)
    evaluated = ya.eval_step(total)(now, batch(rank))["loss"]
    for number in range(3):
        kept = now.copy()
        now, metrics = step(now, batch(rank))
        again, _ = first(kept, batch(rank))
        assert same(bits(now), bits(again))
        expected, wanted = oracle(expected, data)
        torch.testing.assert_close(metrics["loss"], wanted["loss"])
        if number == 0:
            assert torch.equal(metrics["loss"], evaluated)
            assert not same(bits(now), start)
            assert step.lower(now, batch(rank)) == step.program(now)


# ---- tables that are cached while a loss is traced on fake tensors


@pytest.mark.parametrize("in_block", [False, True])
def test_a_table_from_a_trace_is_refused_by_name(in_block: bool) -> None:
    table = cached()
    total = tabled(table, in_block=in_block)
    step = ya.train_step(total, TX)
    now = state()
    step.lower(now, batch())
    for use in (step, ya.eval_step(total)):
        with pytest.raises(RuntimeError, match=r"a tensor of shape \(5,\) .* made while the loss was traced .*cache"):
            use(now, batch())
    table.cache_clear()
    now, _ = step(now, batch())
    step.lower(now, batch())  # the program's; and a trace takes the real table
    ya.train_step(total, TX).lower(now, batch())
    step(now, batch())


def test_a_table_that_the_planner_has_made_is_refused_by_name() -> None:
    total = tabled(cached(), in_block=True)
    ya.planner.trace(total, params(), batch())
    with pytest.raises(RuntimeError, match="made while the loss was traced"):
        ya.train_step(total, TX)(state(), batch())


def across_stages(_: Any, there_before: bool) -> tuple[str, float]:
    """A step across stages is always traced first."""
    table, found = cached(), [float("nan")]
    mesh = breakable_stages(2)
    assignment = ya.schedules.assign(ya.planner.trace(loss, params(), batch()), 2)
    now, total = ya.init(params(), TX, mesh=mesh, stages=assignment), tabled(table, in_block=True)
    if there_before:
        table(5)

    step = ya.train_step(total, TX)
    step.lower(now, batch())  # all that ranks compare before they run

    def run() -> None:
        found.append(step(now, batch())[1]["loss"].item())

    # the last stage waits for what the first one, which raises, never sends
    left_alone = mesh.get_local_rank("stage") > 0 and not there_before
    return outcome(run, SOON if left_alone else None), found[-1]


def test_a_table_from_the_trace_of_a_pipeline_is_refused_by_name(pools: Pools) -> None:
    first, _ = pools[2].run(across_stages, False)
    assert "made while the loss was traced" in first[0], first


@on_ranks(2)
def test_a_table_that_is_there_before_the_trace_serves_a_pipeline(mesh: Any) -> None:
    want = ya.train_step(tabled(cached(), in_block=True), TX)(state(), batch())[1]["loss"].item()
    said, found = across_stages(mesh, True)
    assert said == "returned"
    assert found == pytest.approx(want, rel=1e-5)


# ---- weights without a graph, which blocks let out


def keeping(copied: bool, used: str) -> Callable[[Any, Any], Any]:
    """A loss that uses a layer's weights after its visit, itself or in the head, or returns them."""

    def total(tree: Any, data: Any) -> Any:
        kept = []

        def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
            weight = w["w"].detach()
            assert weight.shape == (E, E)
            kept.append(weight.clone() if copied else weight)
            return layer(x, w)

        def ending(w: Any, x: Tensor, targets: Tensor) -> Tensor:
            value = head(w, x, targets)
            return value * kept[0].square().sum() if used == "in a block" else value

        x = ya.apply(embed, tree["embed"], data["tokens"])
        x, _ = ya.scan(block, x, tree["layers"])
        first = kept[0]
        value = ya.apply(ending, tree["head"], x, data["targets"])
        if used == "in the loss":
            value = value * first.square().sum()
        return value, {"first": first if used == "in aux" else first.shape}

    return total


@on_ranks(1, 2)
@pytest.mark.parametrize("used", ["in the loss", "in aux", "in a block"])
def test_weights_are_used_after_their_visit_as_copies_alone(mesh: Any, used: str) -> None:
    """On one rank they are where they were; on several their memory holds those of another layer."""
    expected = keeping(True, used)(ya.unshard(state(mesh).params), batch())[0]
    for copied in (True, False):
        step = ya.value_and_grad(keeping(copied, used), has_aux=True)
        if copied or mesh.size() == 1:
            (value, _), _ = step(state(mesh).params, batch())
            torch.testing.assert_close(value, expected)
            continue
        with pytest.raises(RuntimeError, match=r"layers\[0\]: the loss uses weights of this block, of shape"):
            step(state(mesh).params, batch())


# ---- what the loss may notice of being recorded


def test_the_loss_runs_once_more_with_the_same_random_numbers() -> None:
    drawn: list[tuple[float, ...]] = []

    def noisy(tree: Any, data: Any) -> Tensor:
        numbers = [torch.rand(()).item()]
        x = ya.apply(lambda w, tokens: embed(w, tokens) * torch.rand(()), tree["embed"], data["tokens"])
        numbers.append(x.detach().sum().item())
        x, _ = ya.scan(layer, x, tree["layers"])
        drawn.append(tuple(numbers))
        return ya.apply(head, tree["head"], x, data["targets"])

    step = ya.train_step(noisy, TX)
    now = state()
    before = torch.get_rng_state()
    for _ in range(2):
        now, _ = step(now, batch())
    recorded, zero, one = drawn
    assert recorded == zero != one
    assert torch.equal(torch.get_rng_state(), before)
    ya.train_step(noisy, TX, schedule=step.program(now))(state(), batch())
    assert len(drawn) == 4, "a program that is given needs no recording"


def test_no_outputs_are_kept_while_a_call_is_recorded() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def counting(x: Tensor, w: Any) -> tuple[Tensor, None]:
        alive.append(sum(ref() is not None for ref in seen))
        out = layer(x, w)[0]
        seen.append(weakref.ref(out))
        return out, None

    @with_ends
    def total(tree: Any, x: Tensor) -> Any:
        return ya.scan(counting, x, tree["layers"])[0]

    with no_collection():
        ya.train_step(total, TX)(state(), batch())
    assert alive[:3] == [0, 0, 0]


def test_blocks_are_not_compiled_once_more_for_the_recorded_call() -> None:
    """A mode of torch functions watches the loss then, for each of which torch.compile makes graphs of its own."""
    graphs: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        return lambda graph, _: graphs.append(name) or graph.forward  # type: ignore[func-returns-value]

    block = torch.compile(lambda x, w: torch.tanh(x @ w), backend=counted("block"), fullgraph=True)
    last = torch.compile(lambda x: x.square().mean(), backend=counted("last"), fullgraph=True)

    def compiled(tree: Any, x: Tensor) -> Tensor:
        return last(ya.scan(lambda x, w: (block(x, w), None), x, tree)[0])

    step = ya.train_step(compiled, TX, schedule=ya.schedules.zero3(remat="all"))
    own = ya.init(ya.Stacked(ya.Param((2, 4, 4))), TX, mesh=one_rank())
    for _ in range(2):
        own, _ = step(own, torch.ones(3, 4))
    assert graphs.count("block") == 3, "without grad; with it, for two kinds of carries"
    assert graphs.count("last") <= 2, "what the loss itself calls is"


def test_outputs_of_a_recorded_visit_may_be_written_in_place() -> None:
    data = batch() | {"x": torch.ones(4, 3, 5)}

    def total(tree: Any, data: Any) -> Tensor:
        passed = ya.apply(lambda w, x: x, tree["embed"], data["x"])
        return loss(tree, data) * passed.mean()

    def writing(tree: Any, data: Any) -> Tensor:
        passed = ya.apply(lambda w, x: x * 1, tree["embed"], data["x"])
        passed.mul_(2.0)
        return loss(tree, data) * passed.mean()

    got = [ya.value_and_grad(fun)(state().params, data)[0] for fun in (total, writing)]
    assert got[1] == 2 * got[0]


def test_a_recording_is_closed() -> None:
    kept: list[Any] = []

    def keeping(tree: Any, data: Any) -> Tensor:
        kept.append(tree)
        if len(kept) == 1:
            raise OSError("planned")
        return loss(tree, data)

    step = ya.train_step(keeping, TX)
    now = state()
    with pytest.raises(OSError, match="planned"):
        step(now, batch())
    step(now, batch())
    for tree in kept:
        with pytest.raises(RuntimeError, match="given to a step that is over"):
            loss(tree, batch())


@pytest.mark.parametrize("grad", [False, True])
def test_a_recorded_block_that_writes_into_its_weights_is_refused(grad: bool) -> None:
    def total(tree: Any, data: Any) -> Tensor:
        with torch.set_grad_enabled(grad):
            ya.apply(lambda w: w["w"].mul_(2.0).sum(), tree["head"])
        return loss(tree, data)

    with pytest.raises(RuntimeError, match="head: the block writes into its weights in place"):
        ya.train_step(total, TX)(state(), batch())


# ---- ranks that differ


def regularised(tree: Any, data: Any) -> Tensor:
    return loss(tree, data) + tree["head"].leaves[0].square().sum()


def teaching(tree: Any, data: Any) -> Tensor:
    with torch.no_grad():
        ya.apply(lambda w: w["w"].sum(), tree["head"])
    return loss(tree, data)


def with_aux(tree: Any, data: Any, aux: Any) -> Any:
    return loss(tree, data), aux


OTHERS: dict[str, tuple[LossFn, str, bool]] = {
    "regularised": (regularised, "leaves read outside visits", False),
    "without grad": (teaching, "forward of head (without grad, microbatch 0, step 0)", False),
    "aux": (functools.partial(with_aux, aux=torch.ones(3)), "what the function returns", True),
}


@on_ranks(2)
@pytest.mark.parametrize("which", OTHERS)
def test_ranks_that_record_other_calls_say_so(mesh: Any, which: str) -> None:
    mesh = breakable()
    other, text, has_aux = OTHERS[which]
    own: Any = functools.partial(with_aux, aux=torch.ones(2)) if has_aux else loss
    now = state(mesh)
    before = bits(now)
    step = ya.train_step(other if mesh.get_local_rank() else own, TX, has_aux=has_aux)
    error = outcome(lambda: step(now, batch()))
    assert error.startswith(f"{RanksDisagree.__module__}.RanksDisagree: ranks disagree on what to communicate")
    assert text in error
    assert "rank 0: " in error
    assert "rank 1: " in error
    assert same(bits(now), before)
