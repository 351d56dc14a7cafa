"""States saved by some ranks and loaded by others: the same bits, and errors that name the leaf."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint.io import load, load_params, save

TX = ya.optim.adamw(1e-2, weight_decay=0.1)


class Net(NamedTuple):
    embed: Any
    layers: Any
    head: Any


def net(width: int = 5, leaf: str = "w", mark: Any = ya.Pinned) -> Net:
    """Odd sizes; a unit of its own, a frozen part and pinned leaves inside the stack, an unstacked frozen unit."""
    layer = {
        leaf: ya.Param((3, width, 3)),
        "gain": mark({"g": ya.Param((3, 7)), "size": ya.Param((3,))}),
        "own": ya.Unit({"x": ya.Param((3, 11))}),
        "still": ya.frozen({"y": ya.Param((3, 2, 3))}),
    }
    return Net(ya.Param((7, 5)), ya.Stacked(layer), ya.frozen({"scale": ya.Param((13,))}, torch.float32))


def fresh(mesh: Any, mark: Any = ya.Pinned, **options: Any) -> ya.ShardedState:
    return ya.init(net(mark=mark), TX, mesh=mesh, **options)


def unmarked(leaf: Any) -> Any:
    return leaf


def activations(params: Net, batch: Tensor) -> Tensor:
    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        y = torch.tanh(x @ w["w"]) @ w["still"]["y"].T
        return x + y.sum(-1, keepdim=True) * w["gain"]["size"] + w["own"]["x"].sum() + w["gain"]["g"].sum(), None

    x = ya.apply(lambda table, tokens: table[tokens], params.embed, batch)
    x, _ = ya.scan(block, x, params.layers)
    return x


def loss(params: Net, batch: Tensor) -> Tensor:
    return ya.apply(lambda w, x: (x.sum() * w["scale"]).square().mean(), params.head, activations(params, batch))


def stepped(state: ya.ShardedState, count: int) -> ya.ShardedState:
    """Updates with gradients that are the same at every world size, so that the moments are not zeros."""
    for number in range(count):
        state = state.apply_gradients(ya.normal_like(state.step + number, state.params), TX)
    return state


def whole(state: ya.ShardedState) -> list[Tensor]:
    """Every logical tensor of a state, on every rank."""
    trees = [ya.unshard(state.params), ya.unshard(state.opt_state)]
    return [leaf.clone() for leaf in optree.tree_leaves(trees)]


def saved(mesh: Any, directory: Path, precision: ya.Precision) -> tuple[list[Tensor], list[Tensor], float]:
    """What was saved, what one more update makes of it, and its loss."""
    state = stepped(fresh(mesh, seed=4, precision=precision), 3)
    folder = save(directory, state, {"position": 17, "note": ["a", None]})
    assert folder.name == "step-00000003"
    return found(state)


def found(state: ya.ShardedState) -> tuple[list[Tensor], list[Tensor], float]:
    before = whole(state)
    value = float(ya.eval_step(loss)(state, TOKENS)["loss"])
    return before, whole(stepped(state, 1)), value


def loaded(mesh: Any, directory: Path, precision: ya.Precision) -> tuple[list[Tensor], list[Tensor], float, Any]:
    if mesh.size() == 2:  # through layers without a pinned leaf
        plain, extra = load(directory, fresh(mesh, unmarked, seed=98, precision=precision))
        directory = Path(f"{directory}-unmarked")
        save(directory, plain, extra)
    like = fresh(mesh, seed=99, precision=precision)
    state, extra = load(directory, like, donate=True)
    with pytest.raises(RuntimeError, match="donated"):
        like.check()
    facts = state.step, state.seed, extra
    return *found(state), facts


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


TOKENS = torch.arange(6) % 7
FP32 = ya.Precision()
BF16 = ya.Precision(compute=torch.bfloat16)


@pytest.mark.sampled
@pytest.mark.parametrize("readers", [1, 2, 3, 4])
@pytest.mark.parametrize(("writers", "precision"), [(1, FP32), (2, BF16), (3, FP32), (4, FP32)])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    pools: Pools, tmp_path: Path, writers: int, precision: ya.Precision, readers: int
) -> None:
    before, after, value = pools[writers].run(saved, tmp_path, precision)[0]
    assert any(leaf.abs().sum() > 0 for leaf in before[-4:]), "the moments are zero: the test would prove nothing"
    for got, got_after, got_value, facts in pools[readers].run(loaded, tmp_path, precision):
        assert same(got, before)
        assert same(got_after, after)
        assert got_value == pytest.approx(value, rel=1e-6)
        assert facts == (3, 4, {"position": 17, "note": ["a", None]})


def by_row(params: Net, batch: Tensor) -> Tensor:
    """`loss`, as a mean over rows: the same for all rows together and for the ranks' parts of them."""
    x = activations(params, batch)
    return ya.apply(lambda w, x: (x.sum(-1) * w["scale"].sum()).square().mean(), params.head, x)


SHAPES = {
    "zero3 on 1": (1, {}, ya.schedules.zero3()),
    "zero2 on 2": (2, {}, ya.schedules.zero2(remat="all")),
    "zero3 on 3": (3, {}, ya.schedules.zero3(update=True)),
    "zero3 on 4": (4, {}, ya.schedules.zero3()),
    "hsdp on 2 x 2": (4, {"replicate": 2}, ya.schedules.zero3()),
    "hpz on 2 nodes": (4, {"local": 2}, ya.schedules.hpz(6)),
    "ddp on 2": (2, {"replicate": 2, "shard": 1}, ya.schedules.zero2()),
}
ROWS = torch.arange(24) % 7


def losses(_: Any, shape: str, directory: Path | None, begins: int, ends: int) -> tuple[list[float], list[Tensor]]:
    """Of steps from `begins`, where a checkpoint is loaded, to `ends`, where one is written; 24 rows over all ranks."""
    _, axes, schedule = SHAPES[shape]
    mesh = ya.mesh(**axes)
    state = fresh(mesh, precision=ya.Precision(torch.float64))
    if begins and directory:
        state, _extra = load(f"{directory}/{begins}", state)
    step = ya.train_step(by_row, TX, schedule=schedule)
    out = []
    while state.step < ends:
        state, metrics = step(state, ya.shard_batch(ROWS, mesh))
        out.append(float(metrics["loss"]))
    if directory:
        save(f"{directory}/{ends}", state)
    return out, whole(state)


def test_a_run_goes_on_anywhere_as_if_it_had_been_there_all_along(pools: Pools, tmp_path: Path) -> None:
    """A run that moves, every second step, from one number of ranks and way of sharding to another."""
    unbroken, values = pools[1].run(losses, "zero3 on 1", None, 0, 2 * len(SHAPES))[0]
    found = []
    for number, shape in enumerate((*list(SHAPES)[1:], "zero3 on 1")):
        got = pools[SHAPES[shape][0]].run(losses, shape, tmp_path, 2 * number, 2 * number + 2)
        assert all(other == got[0][0] for other, _ in got), shape
        found += got[0][0]
    assert found == pytest.approx(unbroken, rel=1e-12)
    for a, b in zip(got[0][1], values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def parameters_alone(mesh: Any, directory: Path) -> tuple[list[Tensor], int]:
    like = ya.init(net(), ya.optim.identity(), mesh=mesh, seed=99)
    state = load_params(directory, like)
    return optree.tree_leaves(ya.unshard(state.params)), state.step


def test_parameters_alone_need_no_optimizer(pools: Pools, tmp_path: Path) -> None:
    before, _, _ = pools[2].run(saved, tmp_path, FP32)[0]
    got, step = pools[1].run(parameters_alone, tmp_path)[0]
    assert same(got, before[: len(got)])
    assert step == 3


def trained(mesh: Any, directory: Path, remat: str) -> str:
    """Two steps, saved; the program's text."""
    state = fresh(mesh)
    step = ya.train_step(loss, TX, schedule=ya.schedules.zero2(remat=remat))
    for _ in range(2):
        state, _ = step(state, TOKENS)
    assert state.program == step.program(state)
    save(directory, state)
    return state.program.to_json()


def resumed(mesh: Any, directory: Path, other: str) -> str | None:
    """The program that a state has which was loaded; a step goes on with it, and it is what the next one has."""
    like = fresh(mesh, precision=ya.Precision(reduce=getattr(torch, other)))
    state, _ = load(directory, like)
    if state.program is None:
        return None
    after, _ = ya.train_step(loss, TX, schedule=state.program)(state, TOKENS)
    assert after.program == state.program
    return after.program.to_json()


@pytest.mark.parametrize("remat", ["none", "all"])
def test_a_state_goes_on_with_the_program_that_it_was_trained_by(pools: Pools, tmp_path: Path, remat: str) -> None:
    text, _ = pools[2].run(trained, tmp_path, remat)
    assert pools[2].run(resumed, tmp_path, "float32") == [text] * 2
    assert pools[3].run(resumed, tmp_path, "float32") == [None] * 3, "of two ranks"
    assert pools[2].run(resumed, tmp_path, "bfloat16") == [None] * 2, "units of other sizes on the wire"


W = ya.Param((3, 4))
NONE = ya.Param((3, 0))


def hollow() -> dict[str, Any]:
    """Units without elements: by themselves, in a stack, frozen, and inside of one that has others."""
    layer = {"w": W, "own": ya.Unit({"x": NONE})}
    return {
        "kinds": {"weight": ya.Param((0, 4))},
        "layers": ya.Stacked(layer),
        "still": ya.frozen({"none": ya.Param((2, 0)), "scale": ya.Param((0,))}),
        "tail": {"none": ya.Param((0,)), "w": ya.Param((5,))},
    }


def hollow_loss(params: dict[str, Any], batch: Tensor) -> Tensor:
    """Visits all of them."""
    x = ya.apply(lambda w, x: x + w["weight"].sum(), params["kinds"], batch)
    x, _ = ya.scan(lambda x, w: (x * w["w"] + w["own"]["x"].sum(), None), x, params["layers"])
    x = ya.apply(lambda w, x: x + w["none"].sum() + w["scale"].sum(), params["still"], x)
    return ya.apply(lambda w, x: x.square().mean() * w["w"].sum() + w["none"].sum(), params["tail"], x)


def trains_hollow(mesh: Any, directory: Path, begins: int, ends: int, regrouped: bool = False) -> list[Tensor]:
    """The state after steps from `begins`, where it is loaded, to `ends`, where it is saved, by name as well."""
    state = ya.init(hollow(), TX, mesh=mesh, seed=begins)
    if begins:
        like = hollow() if not regrouped else {**hollow(), "layers": ya.Stacked({"w": W, "own": {"x": NONE}})}
        state, _ = load(directory, ya.init(like, TX, mesh=mesh))
    step = ya.train_step(hollow_loss, TX)
    while state.step < ends:
        state, _ = step(state, torch.ones(4))
    if not begins:
        save(directory, state)
    name = lambda path, layer: f"{path}.{layer}"  # noqa: E731
    checkpoint.save_named(f"{directory}-{begins}-{ends}", state.params, name)
    again = ya.shard(checkpoint.load_named(f"{directory}-{begins}-{ends}", hollow(), name), TX, mesh=mesh)
    assert same(optree.tree_leaves(ya.unshard(again.params)), optree.tree_leaves(ya.unshard(state.params)))
    return whole(state)


def test_units_without_elements_are_loaded(pools: Pools, tmp_path: Path) -> None:
    unbroken, _ = pools[2].run(trains_hollow, tmp_path / "unbroken", 0, 4)
    pools[2].run(trains_hollow, tmp_path / "a", 0, 2)
    for readers, regrouped in ((2, False), (1, False), (3, True)):
        found = pools[readers].run(trains_hollow, tmp_path / "a", 2, 4, regrouped)
        for a, b in zip(found[0], unbroken, strict=True):
            torch.testing.assert_close(a, b)
        shutil.rmtree(tmp_path / "a-2-4")


def several(mesh: Any, directory: Path) -> None:
    state = fresh(mesh)
    for _ in range(3):
        state = stepped(state, 1)
        save(directory, state, keep_last=2)


@on_ranks(2)
def test_the_state_that_a_load_is_like_stays_unless_it_is_donated(mesh: Any, tmp_path: Path) -> None:
    state = stepped(fresh(mesh), 1)
    save(tmp_path, state)
    before = whole(moved := stepped(state.copy(), 1))
    for load_it, donated in ((load, False), (load_params, False), (load, True)):
        found = load_it(tmp_path, moved, donate=True) if donated else load_it(tmp_path, like=moved)
        loaded = found[0] if isinstance(found, tuple) else found
        want = ya.unshard(state.params)
        got = ya.unshard(loaded.params)
        assert same(optree.tree_leaves(got), optree.tree_leaves(want))
        assert loaded.step == state.step
        if not donated:
            assert same(whole(moved), before)
            assert moved.check() is moved
    with pytest.raises(RuntimeError, match="donated"):
        moved.check()


def loading_fails(mesh: Any, directory: Path, kind: str) -> None:
    tx = TX
    params = net()
    precision = FP32
    if kind == "shape":
        params = net(width=6)
    elif kind == "name":
        params = net(leaf="u")
    elif kind == "optimizer":
        tx = ya.optim.sgd(0.1)
    elif kind == "dtype":
        precision = ya.Precision(param=torch.float64)
    elif kind == "part":
        load_params(directory, ya.init({"embed": params.embed, "layers": params.layers}, mesh=mesh))
    load(directory, ya.init(params, tx, mesh=mesh, precision=precision))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "leaf layers.w: the checkpoint has torch.float32 [3, 5, 3], this state torch.float32 [3, 6, 3]"),
        ("name", "params.layers:layers, leaf layers.u: the checkpoint has nothing, this state torch.float32 [3, 5, 3]"),
        ("optimizer", "which this state has not"),
        ("part", "the checkpoint holds head.scale in params.head, which this state has not"),
        ("dtype", "leaf embed: the checkpoint has torch.float32 [7, 5], this state torch.float64 [7, 5]"),
    ],
)
def test_another_state_is_refused_by_leaf(pools: Pools, tmp_path: Path, kind: str, text: str) -> None:
    pools[1].run(saved, tmp_path, FP32)
    for error in pools[2].errors(loading_fails, tmp_path, kind):
        assert "CheckpointError: " in error and text in error, error


def test_missing_truncated_and_damaged_checkpoints_are_named_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    for error in pools[2].errors(loading_fails, tmp_path / "none", "missing"):
        assert "found no checkpoint" in error
    pools[2].run(saved, tmp_path, FP32)
    file = tmp_path / "step-00000003" / "rank-00001.safetensors"
    size = file.stat().st_size
    file.write_bytes(bytes(size))
    for error in pools[2].errors(loading_fails, tmp_path, "damaged"):
        assert "Damaged: checking step-00000003: rank 0: " in error, error
        assert f"rank-00001.safetensors ({size:,} bytes) is not what was written" in error, error
    os.truncate(file, size - 1)
    for error in pools[2].errors(loading_fails, tmp_path, "truncated"):
        assert f"rank-00001.safetensors ({size - 1:,} bytes) is not what was written" in error, error
    file.unlink()
    for error in pools[2].errors(loading_fails, tmp_path, "missing"):
        assert "rank-00001.safetensors is missing" in error, error


def loads_an_earlier_one(mesh: Any, directory: Path) -> int:
    with pytest.warns(
        UserWarning, match=r"manifest\.json \(.* is not what was written.*: passed over for step-00000002"
    ):
        return load(directory, fresh(mesh))[0].step


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_unless_it_was_asked_for(
    pools: Pools, tmp_path: Path
) -> None:
    pools[2].run(several, tmp_path)
    with (tmp_path / "step-00000003" / "manifest.json").open("a") as file:
        file.write(" ")
    assert pools[2].run(loads_an_earlier_one, tmp_path) == [2, 2]
    for error in pools[2].errors(loads_a_step, tmp_path, 3):
        assert "Damaged: checking step-00000003" in error, error


def loads_a_step(mesh: Any, directory: Path, step: int) -> None:
    load(directory, fresh(mesh), step=step)


@on_ranks(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(mesh: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(checkpoint.CheckpointError, match="NotADirectoryError"):
        save(tmp_path / "file" / "checkpoints", fresh(mesh))
    assert checkpoint.latest(tmp_path) is None


@on_ranks(1)
def test_a_donated_state_is_not_saved(mesh: Any, tmp_path: Path) -> None:
    state = fresh(mesh)
    stepped(state, 1)
    with pytest.raises(RuntimeError, match="was donated"):
        save(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_deterministic_run_that_goes_on_in_other_circumstances_is_told(_: Any, tmp_path: Path) -> None:
    exact = ya.mesh(deterministic=12)
    save(tmp_path, fresh(exact))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(
            UserWarning, match=rf"'threads': '{threads}'.*'threads': '{threads + 1}'.*: bits will not be"
        ):
            load(tmp_path, fresh(exact))
    finally:
        torch.set_num_threads(threads)
