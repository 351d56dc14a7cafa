"""Predicted memory: to the byte what memories and slots hold, and the peak that the allocator sees."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import yafsdp_fn as ya
from benchmarks.counting import no_scratch
from models import llama
from models.parts.axes import Axes
from tests.axes import model as small
from tests.harness.abstract import step_of
from tests.harness.gpu import on_gpu
from tests.harness.marks import nightly
from tests.harness.meshes import on
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import Model, batch, embed, loss, model, one_rank
from tests.models.theirs import gains_in_float32
from yafsdp_fn import optim
from yafsdp_fn.nn import linear
from yafsdp_fn.nn.linear import multiplies_wider
from yafsdp_fn.planner.footprint import Dtypes, Memory, NamedDtype, predict_memory
from yafsdp_fn.planner.trace import trace
from yafsdp_fn.program.measured import Cost, Value
from yafsdp_fn.program.trace import UnitSpec, Visit, chained_order
from yafsdp_fn.schedules import Backward, Program, Schedule, Trace, hpz, zero2, zero3

Items = dict[str, int]
"""Bytes of each."""
Compared = tuple[Items, Items]
"""Predicted, and real."""
HeldCase = tuple[str, str, int]
"""Names of a precision and of a schedule, and microbatches."""
TX = optim.adamw(1e-2)
KNOWN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = {
    "fp32": ya.Precision(),
    "bf16": ya.Precision(compute=torch.bfloat16),
    "bf16, no copy": ya.Precision(compute=torch.bfloat16, copy=False),
    "bf16 wire": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    "wide sums": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
    "fp64": ya.Precision(param=torch.float64),
    "fp64 wide": ya.Precision(param=torch.float64, reduce=torch.float32, accumulate=torch.float64),
    "bf16 alone": ya.Precision(param=torch.bfloat16, accumulate=torch.float32),
}
SCHEDULES: dict[str, Schedule] = {
    "zero3": zero3(),
    "remat": zero3(remat="all", update=True),
    "zero2": zero2(),
    "hpz": hpz(3),
}


def frozen_embedding() -> Model:
    return model()._replace(embed=ya.frozen(model().embed, torch.float32))


def own_dtypes() -> Model:
    """The same with leaves that are gathered, and reduced, in dtypes of their own."""
    made = frozen_embedding()
    layers = model().layers.tree
    bias = dataclasses.replace(layers["bias"], compute=torch.float32, reduce=torch.bfloat16)
    down = dataclasses.replace(layers["down"], compute=torch.float32, reduce=torch.float32)
    norm = dataclasses.replace(made.head["norm"], compute=torch.float64)
    stack = ya.Stacked({**layers, "bias": bias, "down": down})
    return made._replace(layers=stack, head={**made.head, "norm": norm})


def on_the_wire() -> Model:
    """The same with matrices that travel in a format whose cuts are those of dtypes: the optimizer's memory knows no
    others."""
    int8 = ya.formats.Scaled(torch.int8, 8)
    made = frozen_embedding()
    both = {"up": ya.Wire(int8, int8), "down": ya.Wire(gather=int8)}
    leaves = made.layers.tree.items()
    layers = {name: dataclasses.replace(leaf, wire=both.get(name, ya.Wire())) for name, leaf in leaves}
    embed = ya.frozen({"weight": dataclasses.replace(made.embed.tree["weight"], wire=both["down"])}, torch.float32)
    return made._replace(layers=ya.Stacked(layers), embed=embed)


def cast_loss(p: Model, b: Any) -> ya.Mean:
    """`loss` in the dtype of the layers, whatever the embedding's is."""
    x, _ = ya.scan(_any_dtype, ya.apply(embed, p.embed, b["tokens"]), p.layers)
    mean: ya.Mean = ya.apply(_head, p.head, x, b["targets"])
    return mean


def _any_dtype(x: Tensor, w: Any) -> tuple[Tensor, None]:
    hidden = torch.tanh(F.linear(x.to(w["up"].dtype), w["up"], w["bias"].to(w["up"].dtype)))
    return x + F.linear(hidden.to(w["down"].dtype), w["down"]).to(x.dtype), None


def _head(w: Any, x: Tensor, targets: Tensor) -> ya.Mean:
    dtype = w["weight"].dtype
    scores = F.linear(x.to(dtype) * w["norm"].to(dtype), w["weight"]).float()
    return ya.Mean(F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel())


# ---- what the toolkit holds


def held(mesh: Any, cases: list[HeldCase], made: Callable[[], Model] = frozen_embedding) -> list[Compared]:
    """Predicted and real bytes of what a state and its slots hold on this rank after two steps."""
    found = []
    for precision, schedule, microbatches in cases:
        state = ya.init(made(), TX, mesh=mesh, precision=PRECISIONS[precision])
        step = ya.train_step(cast_loss, TX, schedule=SCHEDULES[schedule], microbatches=microbatches)
        program = step.lower(state, batch())
        store = state.memory
        for scratch in (store.comms.reduce_scratch, store.comms.replicate_scratch):
            scratch._made.clear()  # of other states on this mesh
        for number in range(2):
            state, _ = step(state, batch(number))
        assert step.program(state).ops == program.ops
        found.append(compared(program, state))
    return found


def compared(program: Program, state: ya.ShardedState) -> Compared:
    predicted = predict_memory(program, device="cpu").itemised()
    real = held_by(state)
    return {name: predicted[name] for name in real}, real


def held_by(state: ya.ShardedState) -> Items:
    """Bytes that a state, its slots and its buffers hold after a step, by item."""
    store = state.memory
    store.comms.drain()
    (slots,) = store.idle
    state_leaves: list[Any] = torch.utils._pytree.tree_leaves(state.opt_state)
    working = [w for w, m in zip(store.working.present, store.masters(), strict=True) if w is not m]
    buffers = [store._buffers.get(name) for name in ("receive", "replicate")]
    scratches = [s._made.values() for s in (store.comms.reduce_scratch, store.comms.replicate_scratch)]
    through = [_bytes([b] if b is not None else []) + _bytes(s) for b, s in zip(buffers, scratches, strict=True)]
    return {
        "master": _bytes(store.masters()),
        "optimizer": _bytes(leaf for leaf in state_leaves if isinstance(leaf, Tensor)),
        "working_copy": _bytes(working),
        "grad_shards": _bytes(store.kept_grads().present),
        "weight_slots": _bytes(slots._weights.values()),
        "grad_slots": _bytes(slots._grads.values()),
        "secondary": _bytes(slots._secondary.values()),
        "receive": through[0],
        "staging": through[1],
        "carry_slots": _bytes(getattr(slots.activations, "_slots", {}).values()),
    }


def _bytes(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def same(found: list[list[Compared]]) -> Items:
    """Compares on every rank; returns the largest of each real item."""
    for predicted, real in itertools.chain(*found):
        assert predicted == real
    return {name: max(real[name] for _, real in itertools.chain(*found)) for name in found[0][0][1]}


SMALLEST = ("fp32", "zero3", 1)
DEFERRED = ("bf16", "zero2", 2)
RECOMPUTED = ("wide sums", "remat", 2)
CAST = [("bf16, no copy", "zero3", 1), ("bf16, no copy", "remat", 2)]
WIRE = ("bf16 wire", "zero3", 1)
TWICE = ("bf16 wire", "zero3", 2)
ALONE = ("bf16 alone", "zero3", 1)
OWN = [SMALLEST, DEFERRED, WIRE, TWICE, ("wide sums", "remat", 1), ("fp64 wide", "zero2", 2), ALONE]
FORMATS = [(name, *case) for name in ("fp32", "wide sums", "fp64 wide") for case in (("zero3", 1), ("zero2", 2))]
FORMATS_ON_NODES = [(name, "hpz", 1) for name in ("fp32", "wide sums", "fp64 wide")]
TRAVELS = ("working_copy", "weight_slots", "receive")


@pytest.mark.parametrize(
    ("world", "mesh", "made", "cases", "some", "none"),
    [
        (
            1,
            "shard",
            frozen_embedding,
            [SMALLEST, ("bf16", "remat", 2), WIRE, TWICE, RECOMPUTED, ALONE],
            ("grad_slots", "receive"),
            ("weight_slots", "secondary", "staging"),
        ),
        (2, "shard", frozen_embedding, [SMALLEST, DEFERRED, WIRE, RECOMPUTED], ("weight_slots",), ("secondary",)),
        (1, "shard", own_dtypes, CAST, ("weight_slots",), ("working_copy",)),
        (2, "shard", own_dtypes, CAST, ("weight_slots",), ("working_copy",)),
        (4, "replicate", frozen_embedding, [("wide sums", "zero3", 1)], ("staging",), ()),
        (4, "copies", frozen_embedding, [WIRE], ("staging",), ()),
        (4, "nodes", frozen_embedding, [("bf16", "hpz", 1), ("wide sums", "zero3", 2)], ("secondary",), ()),
        (1, "shard", own_dtypes, OWN, ("working_copy",), ()),
        (2, "shard", own_dtypes, OWN, ("working_copy",), ()),
        (4, "replicate", own_dtypes, [WIRE, ("wide sums", "remat", 1)], (), ()),
        (4, "nodes", own_dtypes, [("bf16 wire", "hpz", 1), ("wide sums", "remat", 1)], (), ()),
        (1, "shard", on_the_wire, FORMATS, TRAVELS, ()),
        (2, "shard", on_the_wire, FORMATS, TRAVELS, ()),
        nightly(4, "replicate", on_the_wire, FORMATS, TRAVELS, ()),
        (4, "nodes", on_the_wire, FORMATS_ON_NODES, TRAVELS, ()),
    ],
)
def test_ranks_hold_what_is_predicted(
    pools: Pools,
    world: int,
    mesh: str,
    made: Callable[[], Model],
    cases: list[HeldCase],
    some: tuple[str, ...],
    none: tuple[str, ...],
) -> None:
    real = same(pools[world].run(on, mesh, held, cases, made))
    assert all(real[item] > 0 for item in some)
    assert not any(real[item] for item in none)


def held_over_axes(_: Any, axes: dict[str, int], cases: list[HeldCase]) -> Any:
    """Of a model that is split over `tensor` and `expert`; predicted from the state's trace, and without any rank."""
    found = []
    for name, schedule, microbatches in cases:
        mesh = small.mesh_of(**axes)
        precision = PRECISIONS[name]
        state = ya.init(small.params(), TX, mesh=mesh, precision=precision)
        step = ya.train_step(small.loss_of(), TX, schedule=SCHEDULES[schedule], microbatches=microbatches)
        given = ya.shard_batch(small.batch_of(0, 8), mesh, split={"context": 1} if "context" in axes else None)
        program = step.lower(state, given)
        state, _ = step(state, given)
        how: Any = {"precision": precision, "tx": TX, "microbatches": microbatches, "device": "cpu"}
        absent = trace(small.loss_of(), small.params(), given, mesh=program.trace.mesh, **how)
        assert absent == program.trace
        found.append(compared(program, state))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "axes",
    [{"tensor": 2}, {"context": 2}, {"expert": 2}],
    ids=str,
)
def test_axes_inside_blocks_hold_what_is_predicted(pools: Pools, axes: dict[str, int]) -> None:
    cases = [("fp64", "zero3", 1), ("fp64 wide", "zero2", 2)]
    assert same(pools[4].run(held_over_axes, axes, cases))["weight_slots"] > 0


def test_units_that_no_rank_shares_are_their_own_slots(pools: Pools) -> None:
    """On tensor ranks alone, where others are still cut."""
    pools[2].stop()  # the scratch of sums stays with a mesh: that of another test would be counted
    assert same(pools[2].run(held_over_axes, {"tensor": 2}, [("fp64", "zero3", 1)]))["weight_slots"] > 0


def held_deterministic(mesh: Any, cases: list[HeldCase]) -> list[Compared]:
    """On a mesh of as many micro-shards as the microbatches of a case make."""
    ranks = mesh.size()
    return [found for case in cases for found in held(ya.mesh(device="cpu", deterministic=ranks * case[2]), [case])]


@pytest.mark.parametrize("world", [1, 2])
def test_deterministic_meshes_hold_what_is_predicted(pools: Pools, world: int) -> None:
    """Nothing aliases at one rank, and reductions land in R shards."""
    real = same(pools[world].run(held_deterministic, [("fp32", "zero3", 2), ("bf16 wire", "zero2", 1)]))
    assert real["weight_slots"] > 0
    assert real["grad_slots"] > 0
    assert real["receive"] > 0


# ---- the peak

CONFIG = llama.Config(vocab=4096, embed=256, ffn=768, layers=3, heads=4, kv_heads=4, head_dim=64, max_length=128)
"""Some five million parameters."""
LARGE_HEAD = llama.Config(vocab=4096, embed=128, ffn=384, layers=3, heads=4, kv_heads=4, head_dim=32, max_length=64)
"""For peaks in bf16, whose products are slow where they are measured (`no_scratch`)."""
SMALL_HEAD = llama.Config(vocab=256, embed=128, ffn=512, layers=4, heads=4, kv_heads=2, head_dim=32, max_length=128)
BF16 = PRECISIONS["bf16"]


def tokens(config: llama.Config, rows: int = 2, device: str = "cpu") -> dict[str, Tensor]:
    made = torch.randint(0, config.vocab, (rows, config.max_length), device=device)
    return {"tokens": made, "targets": made}


def measured(
    mesh: Any,
    config: llama.Config,
    schedule: Schedule,
    microbatches: int,
    *,
    loss: Any = llama.loss,
    params: Any = llama.params,
    tx: Any = TX,
    precision: ya.Precision = BF16,
    stages: Any = None,
    rows: int = 2,
    dealt: Any = dict,
) -> tuple[int, Memory]:
    """The most bytes that the allocator had given out at once during a third step, and what is predicted. loss, params:
    of a config; dealt: the batch on this rank"""
    gc.collect()  # memory from before that is freed meanwhile would count as less than none
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        state = ya.init(params(config), tx, mesh=mesh, precision=precision, stages=stages)
        step = ya.train_step(loss(config), tx, schedule=schedule, microbatches=microbatches)
        given = dealt(tokens(config, rows))
        program = step.lower(state, given)
        for number in range(3):
            with no_scratch() if number == 2 else contextlib.nullcontext(), record_function(f"step {number}"):
                state, _ = step(state, given)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    (start,) = (e.start_ns() for e in events if e.name() == "step 2")
    totals = list(itertools.accumulate(nbytes for _, nbytes in changes))
    real = max(total for (at, _), total in zip(changes, totals, strict=True) if at >= start)
    ran = step.program(state).by_stage[state.memory.comms.stage] if stages else program
    return real, predict_memory(ran, device="cpu")


def agree(real: int, predicted: Memory, tolerance: float) -> None:
    assert abs(predicted.peak_bytes / real - 1) < tolerance, (real, str(predicted))
    assert predicted.peak_bytes > 1.05 * predicted.held_bytes  # else the peak would say nothing about blocks


@pytest.mark.sampled
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("remat", ["none", "all"])
def test_the_peak_of_a_step(remat: str, microbatches: int) -> None:
    real, predicted = measured(one_rank(), LARGE_HEAD, zero3(remat=remat), microbatches)
    agree(real, predicted, 0.01)
    assert predicted.at.startswith("backward head")
    assert predicted.logits > 0


@pytest.mark.parametrize("remat", ["none", "all"])
def test_the_peak_with_gains_in_float32(remat: str) -> None:
    params = gains_in_float32(llama.params(LARGE_HEAD))
    agree(*measured(one_rank(), LARGE_HEAD, zero3(remat=remat), 1, params=lambda _: params), 0.01)


@pytest.mark.parametrize("microbatches", [nightly(1), 2])
def test_the_peak_with_logits_in_chunks(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32: the CPU's sums of two dtypes take memory of their own."""
    measure = functools.partial(measured, one_rank(), CONFIG, zero3(), microbatches, precision=ya.Precision())
    _, whole = measure()
    monkeypatch.setattr(linear, "ON_CPU", (1 << 20, 32))
    real, predicted = measure()
    agree(real, predicted, 0.01)
    assert predicted.logits < whole.logits / 2


def outside(config: llama.Config) -> Any:
    """A loss with its cross entropy outside of any block."""

    def run(p: Any, b: Any) -> Tensor:
        scores = llama.logits(config, p, b["tokens"]).float()
        return F.cross_entropy(scores.flatten(0, 1), b["targets"].flatten())

    return run


def between(config: llama.Config) -> Any:
    """A loss that computes between visits, and visits layers twice."""

    def run(p: Any, b: Any) -> ya.Mean:
        x = ya.apply(llama.embed, p.embed, b["tokens"])
        for _ in range(2):
            x, _ = ya.scan(llama.block(config), torch.tanh(2 * x), p.layers)
        mean: ya.Mean = ya.apply(llama.head_loss(config), p.head, x, b["targets"])
        return mean

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "remat", "how"),
    [
        (SMALL_HEAD, "none", {}),
        (SMALL_HEAD, "all", {}),
        (SMALL_HEAD, "none", {"loss": functools.partial(llama.loss, chunks=2)}),
        (SMALL_HEAD, "all", {"loss": between}),
        (SMALL_HEAD, "all", {"tx": optim.assume_elementwise((TX.init, TX.update))}),
        (LARGE_HEAD, "all", {"loss": outside}),
    ],
    ids=["layers", "recomputed", "chunks", "between", "plain optimizer", "outside"],
)
def test_peaks_in_other_places(config: llama.Config, remat: str, how: dict[str, Any]) -> None:
    real, predicted = measured(one_rank(), config, zero3(remat=remat), 1, **how)
    agree(real, predicted, 0.02)
    where = {"tx": "the optimizer's step", "loss": ""}.get(next(iter(how), ""), "backward layers[3]")
    assert predicted.at.startswith(where if remat == "all" else "")


@pytest.mark.nightly
@on_ranks(2)
@pytest.mark.parametrize(
    ("axes", "sequence"),
    [
        ({"tensor": 2}, True),
        ({"tensor": 2}, False),
        ({"context": 2}, False),
    ],
)
def test_the_peak_over_axes_inside_blocks(_: Any, axes: dict[str, int], sequence: bool) -> None:
    of = Axes(tensor="tensor" in axes, sequence=sequence, context="context" in axes)
    mesh = small.mesh_of(**axes)

    def dealt(given: dict[str, Tensor]) -> Any:
        """As many tokens on each rank as on one alone."""
        ranks = axes.get("context", 1)
        return of.shard_batch({name: x.repeat(1, ranks) for name, x in given.items()}, mesh)

    loss = functools.partial(llama.loss, axes=of)
    params = functools.partial(llama.params, **of.options)
    # autograd adds the two gradients of the head's scores in place, which it does not do on fake tensors
    every = ((SMALL_HEAD, "all", 0.01), (SMALL_HEAD, "none", 0.01), (CONFIG, "all", 0.05))
    for config, remat, tolerance in every[:1] if sequence else every:
        found = measured(mesh, config, zero3(remat=remat), 1, loss=loss, params=params, dealt=dealt)
        agree(*found, tolerance)


@on_ranks(2)
def test_the_peak_on_two_ranks(mesh: Any) -> None:
    agree(*measured(mesh, LARGE_HEAD, zero3(remat="all"), 2), 0.01)


MUON = optim.chain(optim.clip_by_global_norm(1.0), optim.muon(0.02, others=optim.adamw(1e-3)))


@pytest.mark.nightly
@on_ranks(1, 2)
def test_the_peak_with_muon(mesh: Any) -> None:
    agree(*measured(mesh, SMALL_HEAD, zero3(remat="all"), 1, tx=MUON), 0.03)


@on_gpu
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("remat", ["none", "all"])
def test_the_peak_on_a_gpu(remat: str, microbatches: int) -> None:
    """With some 300 million parameters, so that what the allocator rounds up is small."""
    config = llama.Config(
        vocab=32_000, embed=1024, ffn=4096, layers=12, heads=16, kv_heads=16, head_dim=64, max_length=1024
    )
    weight = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.grad((weight @ weight).sum(), weight)  # libraries keep workspaces from the first product on
    del weight
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    mesh = ya.mesh(device="cuda")
    state = ya.init(llama.params(config), TX, mesh=mesh, precision=BF16)
    step = ya.train_step(llama.loss(config), TX, schedule=zero3(remat=remat), microbatches=microbatches)
    given = tokens(config, 4, "cuda")
    predicted = predict_memory(step.lower(state, given))
    for _ in range(2):
        state, _ = step(state, given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    state, _ = step(state, given)
    torch.cuda.synchronize()
    agree(torch.cuda.max_memory_allocated() - before, predicted, 0.03)


# ---- by hand

X = 100
"""Bytes of what goes from visit to visit, and of its gradient."""


def hand_trace(microbatches: int = 1) -> Trace:
    """Three layers that save 1000 bytes inside; a forward has at most 1300 at once, a backward 1700."""
    units = tuple(UnitSpec(i, f"layers[{i}]", "layers", i, 16, 64, 64, True) for i in range(3))
    visits = []
    for i in range(3):
        takes = (Value(i, X, X), Value(99, 7, 0)) if i else (Value(99, 7, 0),)  # a table that every layer reads
        gives = (Value(i + 1, X, X),)
        cost = Cost(takes=takes, gives=gives, inner_bytes=1000, peak_bytes=1300, bwd_peak_bytes=1700)
        visits.append(Visit(i, f"layers[{i}]", (i,), (i,), cost))
    order = chained_order(visits, microbatches)
    return Trace(units, tuple(visits), order, (("shard", 1),), microbatches, precision=ya.Precision().names)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_peak_worked_out_by_hand(microbatches: int) -> None:
    trace = hand_trace(microbatches=microbatches)
    found = predict_memory(zero3()(trace))
    # backward of the last: its own 1700, the gradient of what it gave, two saved insides, three values, the table
    assert (found.activations, found.logits, found.workspace) == (2 * 1000 + 3 * X + 7, 1700, X)
    assert found.at.startswith("backward layers[2]")
    found = predict_memory(zero3(remat="all")(trace))
    # what it gave is not held once the loss is over, but made again: 100 more for its own
    assert (found.activations, found.logits, found.workspace) == (3 * X + 7, 1700 + X, X)
    found = predict_memory(zero3(remat="first:1")(trace))
    assert found.activations == 1000 + 3 * X + 7
    assert found.logits == 1700


def test_microbatches_may_differ_in_what_they_keep() -> None:
    trace = hand_trace(microbatches=2)
    plain = zero3()(trace).ops
    again = zero3(remat="all")(trace).ops
    assert len(plain) == len(again)  # they differ in `keep` alone
    half = next(i for i, op in enumerate(plain) if isinstance(op, Backward) and op.visit == 0) + 1
    for ops in (plain[:half] + again[half:], again[:half] + plain[half:]):
        found = predict_memory(Program(trace, ops))
        assert found.peak_bytes == predict_memory(Program(trace, plain)).peak_bytes
        assert ("microbatch 0" in found.at) == (ops[:half] == plain[:half])


def ending(**figures: int) -> Trace:
    """`hand_trace` whose last visit has other costs."""
    flat = hand_trace()
    *before, last = flat.visits
    return flat._replace(visits=(*before, last._replace(cost=last.cost._replace(**figures))))


def test_a_forward_can_be_the_peak() -> None:
    found = predict_memory(zero3()(ending(peak_bytes=9000, beside_bytes=10, beside_peak_bytes=20)))
    assert found.at.startswith("forward layers[2]")
    assert (found.activations, found.logits, found.workspace) == (2 * 1000 + 2 * X + 7, 9000, 0)
    found = predict_memory(zero3()(ending(beside_bytes=10, beside_peak_bytes=9000)))
    assert (found.activations, found.logits, found.workspace) == (3 * 1000 + 3 * X + 7, 9000, 0)


# ---- what it says


def predicted(ranks: int = 8, remat: str = "none") -> Memory:
    config = llama.CONFIGS["llama3.2-1b"]
    found = trace(*step_of(config, 1, 2048), ranks=ranks, precision=BF16, tx=TX)
    return predict_memory(zero3(remat=remat)(found))


def test_items_add_up_and_recomputing_saves() -> None:
    found = predicted()
    assert sum(found.itemised().values()) == found.peak_bytes > found.held_bytes
    assert predicted(remat="all").activations < found.activations
    few = predicted(2)
    many = predicted(64)
    assert few.master > 30 * many.master
    assert few.activations == many.activations
    (first, largest), *_ = found.largest()
    assert largest == max(found.itemised().values()) == found.itemised()[first]
    lines = str(found).splitlines()
    assert len(lines) == sum(map(bool, found.itemised().values())) + 1  # items of no bytes are left out
    assert lines[-1].startswith("peak")
    assert found.at in lines[-1]
    assert any(line.startswith("gradient slots") and "GiB" in line for line in lines)


@pytest.mark.parametrize("few", [1, 2])
def test_what_does_not_fit_says_what_would(few: int) -> None:
    found = predicted(few)
    budget = found.peak_bytes - 5 * 2**30 // few
    assert found.why_not(found.peak_bytes) is None
    needed = found.why_not(budget)
    assert needed is not None
    assert f"{5 / few:.2f} GiB more than" in needed
    assert f"Largest: {found.largest()[0][0]} " in needed
    ranks = int(needed.split("A shard group of ")[1].split()[0])
    assert ranks > few
    assert predicted(ranks).peak_bytes <= budget
    hopeless = found.why_not(2**20)
    assert hopeless is not None
    assert "would not fit on any number of ranks" in hopeless


@pytest.mark.parametrize(
    "precision", [("int3", "bfloat16", "float32", ""), ("float32", "", "float32", ""), ("float32",)]
)
def test_a_dtype_that_is_not_known_is_named(precision: tuple[str, ...]) -> None:
    traced = trace(loss, model(), batch(), ranks=2)._replace(precision=precision)
    with pytest.raises(ValueError, match=r"trace.precision: expected 3 or 4 of float64, .*, got \('"):
        predict_memory(zero3()(traced))


def test_a_mesh_larger_than_any_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh: 10,000,000 ranks, expected at most 131,072"):
        trace(loss, model(), batch(1), ranks=10_000_000)


def test_a_trace_without_costs_is_refused() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    step = ya.train_step(loss, TX)
    state, _ = step(state, batch())
    with pytest.raises(ValueError, match="the trace has no costs: it was learnt from a real step"):
        predict_memory(step.program(state))
    with pytest.raises(TypeError, match=r"predict_memory: expected a Program, got Trace: schedule\(trace\) makes one"):
        predict_memory(step.trace(state, batch()))  # type: ignore[arg-type]


def test_names_of_dtypes_mean_what_torch_means() -> None:
    """Predictions know dtypes by name, so that they need no torch."""
    known = {NamedDtype(str(dtype).removeprefix("torch.")): dtype for dtype in KNOWN}
    assert [name.itemsize for name in known] == [dtype.itemsize for dtype in KNOWN]
    for (a, one), (b, other) in itertools.product(known.items(), repeat=2):
        assert known[a.promoted(b)] == torch.promote_types(one, other)
        for device in ("cpu", "cuda"):
            assert Dtypes(a, a, b, None).multiplied_wider(device) == multiplies_wider(one, other, device)
