"""Captured visits, with a tape of CPU operations in the place of CUDA graphs: as exact as without, to the bit."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from tests.extras.tape import TapeRecorder
from tests.harness.gpu import on_gpu
from tests.harness.pool import on_ranks
from tests.harness.small import (
    L,
    Model,
    assert_equal,
    batch,
    block,
    dropout_block,
    embed,
    head,
    loss,
    model,
    one_rank,
    with_block,
    with_ends,
)
from yafsdp_fn.extras.cuda_graphs import CudaCapture, Graphs, NotCapturable, _Inspector, function_key
from yafsdp_fn.program.ops import Backward, Forward

TX = ya.optim.adamw(1e-2)
REMAT = ya.schedules.zero3(remat=ya.schedules.remat.all)
Block = Callable[..., Any]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A refusal that a test does not expect fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def captured(run: Callable[..., Any], **options: Any) -> tuple[Any, TapeRecorder]:
    """A step that is captured, and what captures it."""
    step, tapes = ya.train_step(run, TX, **{"schedule": REMAT} | options), TapeRecorder()
    step._function._graphs, step._function._replays = True, Graphs(tapes)
    return step, tapes


def trained(step: Any, mesh: DeviceMesh, count: int = L, steps: int = 5) -> Any:
    """Parameters and losses after `steps`."""
    state, losses = ya.init(model(count), TX, mesh=mesh, seed=1), []
    for number in range(steps):
        state, metrics = step(state, batch(number))
        losses.append(metrics["loss"])
    return state.params, losses


def check(run: Callable[..., Any], mesh: DeviceMesh | None = None, count: int = L, **options: Any) -> TapeRecorder:
    """Bits with captures and without; gives what captured."""
    step, tapes = captured(run, **options)
    plain = ya.train_step(run, TX, **{"schedule": REMAT} | options)
    mesh = one_rank() if mesh is None else mesh
    assert_equal(trained(step, mesh, count), trained(plain, mesh, count))
    return tapes


# ---- what is captured


def test_every_layer_is_captured_where_slots_are_shards() -> None:
    tapes = check(loss)
    assert tapes.recorded == 2 * L  # embedding and head keep their graphs
    assert tapes.replayed == 3 * 2 * L  # the first step looks at blocks, the second warms up


@on_ranks(2)
@pytest.mark.parametrize("count", [5, 8])
def test_one_graph_per_slot_stands_for_every_layer(mesh: DeviceMesh, count: int) -> None:
    tapes = check(loss, mesh, count)
    program = ya.train_step(loss, TX, schedule=REMAT).lower(ya.init(model(count), TX, mesh=mesh), batch())
    layers = {visit.id for visit in program.trace.visits[1:-1]}
    ops = [op for op in program.ops if isinstance(op, Forward | Backward) and op.visit in layers]
    places = {(op.slots, getattr(op, "grad_slots", None)) for op in ops}
    assert tapes.recorded == len(places) == 4  # two forwards and two backwards
    assert tapes.replayed == 4 * 2 * count - 4  # of four steps with a program, all but the first run of each


CALLS: list[int] = []


def test_a_replay_runs_no_python() -> None:
    def counted(c: Tensor, w: Any) -> Any:
        CALLS.append(1)
        return block(c, w)

    step, _ = captured(with_block(counted))
    state = ya.init(model(), TX, mesh=one_rank())
    for _ in range(3):
        state, _ = step(state, batch())
    assert CALLS
    CALLS.clear()
    step(state, batch())
    assert not CALLS


def test_blocks_made_anew_in_every_call_are_one() -> None:
    def run(p: Model, b: Any) -> ya.Mean:
        factor = 0.5

        def scaled(c: Tensor, w: Any) -> Any:
            return factor * block(c, w)[0], None

        return with_block(scaled)(p, b)

    assert check(run).recorded == 2 * L


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"schedule": ya.schedules.zero2(remat=ya.schedules.remat.all), "microbatches": 2},
        {"schedule": ya.schedules.zero3(remat=ya.schedules.remat.first(1))},
        {"schedule": ya.schedules.zero3(remat=ya.schedules.remat.offload(ahead=0))},
    ],
    ids=["microbatches", "zero2", "one layer", "offload"],
)
def test_options(options: dict[str, Any]) -> None:
    assert check(loss, **options).recorded


def test_visits_that_add_to_their_gradient_have_graphs_of_their_own() -> None:
    """Layers visited twice, weights used twice in a visit, ya.linear: writes and additions, straight into the slot."""

    def tied(c: Tensor, w: Any) -> Any:
        hidden = torch.tanh(ya.linear(c, w["up"], w["bias"]) + ya.linear(2 * c, w["up"]))
        return c + ya.linear(hidden, w["down"]), None

    @with_ends
    def twice(p: Model, x: Tensor) -> Tensor:
        for reverse in (False, True):
            x, _ = ya.scan(tied, x, p.layers, reverse=reverse)
        return x

    assert check(twice).recorded == 3 * L  # one forward of each layer, one backward that writes, one that adds


def test_outputs_arguments_and_constants_of_any_kind() -> None:
    def odd(c: Any, w: Any, consts: Any) -> Any:
        x, number = c
        out = block(x * consts["scale"], w)[0]
        return (out, number), {"index": out.argmax(-1), "same": number, "none": None, "text": "t"}

    def run(p: Model, b: Any) -> tuple[ya.Mean, Any]:
        x = ya.apply(embed, p.embed, b["tokens"])
        consts = {"scale": x.detach().mean().exp()}
        (x, _), ys = ya.scan(
            lambda *args: _drop(odd(*args)), (x.mT.contiguous().mT, b["tokens"]), p.layers, consts=consts
        )
        return ya.apply(head, p.head, x, b["targets"]), ys

    def _drop(out: Any) -> Any:
        return out[0], {key: value for key, value in out[1].items() if key in ("index", "same")}

    tapes = check(run, has_aux=True)
    assert tapes.recorded == 2 * L


def test_shapes_that_change_and_come_back() -> None:
    step, tapes = captured(loss)
    plain = ya.train_step(loss, TX, schedule=REMAT)
    results = []
    for each in (step, plain):
        state = ya.init(model(), TX, mesh=one_rank(), seed=1)
        for rows in (4, 4, 4, 2, 2, 4, 2):
            state, _ = each(state, batch(rows, rows=rows))
        results.append(state.params)
    assert_equal(*results)
    assert tapes.recorded == 2 * 2 * L


# ---- what is refused, and runs as it is


def refused(f: Block, match: str, **scan: Any) -> None:
    run = with_block(f, **scan)
    with pytest.warns(RuntimeWarning, match=match) as told:
        tapes = check(run)
    assert tapes.recorded == tapes.replayed == 0 and len(told) == 1


TABLE = torch.ones(5)


def test_random_numbers_of_the_cpu_are_refused() -> None:
    refused(dropout_block, "layers: not captured: the block draws from the CPU's generator")


def test_tensors_from_outside_are_refused() -> None:
    closed = torch.ones(5)
    refused(lambda c, w: (block(c, w)[0] * closed, None), r"uses a tensor of shape \(5,\) that is not an argument")
    refused(lambda c, w: (block(c, w)[0] * TABLE, None), r"uses a tensor of shape \(5,\) that is not an argument")


def test_what_may_change_is_refused() -> None:
    settings = {"factor": 0.5}
    refused(lambda c, w: (block(c, w)[0] * settings["factor"], None), "depends on a dict, which may change")


def test_constants_made_inside_are_fine() -> None:
    def made(c: Tensor, w: Any) -> Any:
        return block(c, w)[0] * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + torch.arange(5), None

    assert check(with_block(made)).recorded == 2 * L


def test_values_that_the_host_reads_are_refused() -> None:
    refused(lambda c, w: (block(c, w)[0] * c.mean().item(), None), "reads a value on the host")
    refused(lambda c, w: (block(c, w)[0] if c.sum() > 0 else c, None), "reads a value on the host")


def looked_at(work: Callable[[Tensor], object]) -> str | None:
    """What a capture on the device "meta" has against `work`."""
    x = torch.empty(3, device="meta")
    with _Inspector(x.device, [x]) as look:
        work(x)
    return look.found


def test_copies_between_host_and_device_are_refused() -> None:
    """Those that stay on one side are not."""
    assert "copies between host and device" in str(looked_at(lambda x: x + torch.ones(3).to(x.device)))
    assert "copies between host and device" in str(looked_at(lambda x: x.copy_(torch.ones(3))))
    assert looked_at(lambda x: x.copy_(x.double()).to(torch.bfloat16)) is None


def test_attention_that_gives_its_seed_on_the_host_is_captured() -> None:
    with torch.library._scoped_library("yafsdp_test", "DEF") as library:
        library.define("attention(Tensor x) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("attention", lambda x: (torch.empty_like(x), torch.zeros(())), "Meta")
        library.impl("noise", torch.empty_like, "CPU")
        ops = torch.ops.yafsdp_test
        assert looked_at(lambda x: ops.attention(x)[0] + 1) is None
        assert "draws from the CPU's generator" in str(looked_at(lambda x: ops.noise(torch.ones(1))))


def test_an_error_of_the_block_is_the_users() -> None:
    def broken(c: Tensor, w: Any) -> Any:
        raise KeyError("mine")

    both = []
    for step in (captured(with_block(broken))[0], ya.train_step(with_block(broken), TX, schedule=REMAT)):
        with pytest.raises(KeyError, match="mine"):
            step(ya.init(model(), TX, mesh=one_rank()), batch())
        both.append(step)


def test_more_graphs_than_the_limit() -> None:
    step, tapes = captured(loss)
    step._function._replays = Graphs(tapes, limit=3)
    with pytest.warns(RuntimeWarning, match="one of more than 3 kinds of visit"):
        got = trained(step, one_rank())
    assert_equal(got, trained(ya.train_step(loss, TX, schedule=REMAT), one_rank()))
    assert len(step._function._replays) <= 3


def test_static_buffers_are_shared_and_die_with_their_graphs() -> None:
    step, _ = captured(loss)
    trained(step, one_rank())
    graphs = step._function._replays
    assert len(graphs._buffers) == 3  # of forwards x in and out; backwards share them, and take the gradient
    buffer = weakref.ref(next(iter(graphs._buffers.values())))
    graphs._entries.clear()
    gc.collect()
    assert buffer() is None


# ---- the switch


def test_where_there_is_nothing_to_capture() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    with pytest.raises(ValueError, match="graphs=True captures CUDA graphs, but the state is on the device cpu"):
        ya.train_step(loss, TX, schedule=REMAT, graphs=True)(state, batch())
    with pytest.raises(ValueError, match="this state is plain"):
        plain = ya.PlainState(ya.unshard(state), TX.init(ya.unshard(state)), 0, 0)
        ya.train_step(loss, TX, graphs=True)(plain, batch())
    step, _ = captured(loss, schedule=ya.schedules.zero3())
    with pytest.raises(ValueError, match="keeps the autograd graph of every visit"):
        step(state, batch())


# ---- keys


def test_keys_of_functions() -> None:
    def make(value: Any) -> Callable[[int], Any]:
        return lambda x, y=1: x + y + value

    assert function_key(make(1)) == function_key(make(1)) != function_key(make(2))
    assert function_key(make(1)) != function_key(make(1.0)) != function_key(make(True))
    assert function_key(make(make(1))) == function_key(make(make(1))) != function_key(make(make(2)))
    assert (
        function_key(functools.partial(make, 1))
        == function_key(functools.partial(make, 1))
        != function_key(functools.partial(make, 2))
    )
    assert function_key(lambda: 1) != function_key(lambda: 2)
    assert function_key("ab".join) == function_key("ab".join)

    def itself(n: int) -> int:
        return n and itself(n - 1)

    assert function_key(itself) == function_key(itself)
    module = torch.nn.Linear(2, 2)
    assert function_key(module) == function_key(module) != function_key(torch.nn.Linear(2, 2))
    assert function_key(module.forward) == function_key(module.forward)
    for value in ([1], torch.ones(1)):
        with pytest.raises(NotCapturable):
            function_key(make(value))


# ---- CUDA


@on_gpu
@pytest.mark.parametrize("f", [block, dropout_block])
def test_cuda_graphs_are_exact(f: Block) -> None:
    """Random numbers, too: a replay takes the seed of its visit."""
    results = []
    for graphs in (False, True):
        state = ya.init(model(), TX, mesh=ya.mesh(device="cuda"), seed=1)
        step = ya.train_step(with_block(f), TX, schedule=REMAT, graphs=graphs)
        for number in range(5):
            state, _ = step(state, {key: value.cuda() for key, value in batch(number).items()})
        results.append(state.params)
        found = step._function._replays
        assert (found is None) if not graphs else (len(found) == 2 * L and isinstance(found.capture, CudaCapture))
    assert_equal(*results)


def reads(c: Tensor, w: Any) -> Any:
    return block(c, w)[0] * (1.0 if float(c.detach().sum()) > 0 else 0.5), None


def synchronises(c: Tensor, w: Any) -> Any:
    torch.cuda.synchronize()
    return block(c, w)


def told(f: Block, mesh: DeviceMesh, device: Any) -> list[tuple[int, str]]:
    """Warnings of steps with graphs, and in which step; the bits are those of steps without."""
    results, said = [], []
    for graphs in (False, True):
        state = ya.init(model(), TX, mesh=mesh, seed=1)
        step = ya.train_step(with_block(f), TX, schedule=REMAT, graphs=graphs)
        for number in range(4):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always", RuntimeWarning)
                state, _ = step(state, {key: value.to(device) for key, value in batch(number).items()})
            said += [(number, str(each.message)) for each in found if each.category is RuntimeWarning]
        results.append([leaf.tolist() for leaf in optree.tree_leaves(ya.unshard(state.params))])
    assert results[0] == results[1]
    return said


@on_gpu
def test_a_block_that_waits_for_the_device_runs_as_it_is() -> None:
    """It is refused as soon as it is looked at, in the second step, and nothing of it is captured."""
    ((number, text),) = told(reads, ya.mesh(device="cuda"), "cuda")
    assert number == 1 and "reads a value on the host" in text
    torch.ones(4, device="cuda").bernoulli_()
