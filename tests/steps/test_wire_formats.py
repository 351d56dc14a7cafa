"""Units that travel in wire formats, against the plain loop whose weights and gradients pass through the same."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.formats import (
    EXACT,
    F64,
    TX,
    Halves,
    Plain,
    across_stages,
    alike,
    crossed,
    crossing,
    derivatives,
    gradients,
    gradients_and_steps,
    gradients_over_tensor,
    loss,
    planned_program,
    sent,
    split_tree,
    tree,
    two_steps_are_plain,
    two_steps_of_micro_shards,
)
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import E
from yafsdp_fn.communication import formats
from yafsdp_fn.communication.formats import Roots, Scaled, Wire, passed

TOLERANCE = 1e-12
"""What a format rounds otherwise is off by 1e-3 at least."""

INT8 = Scaled(torch.int8, 8)
CHANCE = dataclasses.replace(INT8, stochastic=True)
FORMATS: dict[str, Wire] = {
    "int8": Wire(INT8, INT8),
    "gathers": Wire(gather=INT8),
    "reductions": Wire(reduce=Scaled(torch.float8_e5m2, 16)),
    "mixed": Wire(Scaled(torch.float8_e4m3fn, 8), Halves()),
    "stochastic": Wire(CHANCE, CHANCE),
}


def on_a_rank(mesh: Any, name: str, kind: str, formats: str, parts: int) -> None:
    gradients_and_steps(mesh, name, Plain(tree(FORMATS[formats], kind)), parts, TOLERANCE)


@crossing(FORMATS)
def test_gradients_and_steps_are_those_of_the_plain_loop(
    pools: Pools, where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    crossed(pools, on_a_rank, where, kind, formats, parts, how)


@pytest.mark.parametrize(("where", "formats", "parts"), [("1 shard", "reductions", 1), ("2 shard", "stochastic", 3)])
def test_of_the_crossing_these_run_by_day(pools: Pools, where: str, formats: str, parts: int) -> None:
    """What is reduced alone passes at one rank, too; what is rounded by chance is that of the plain loop."""
    crossed(pools, on_a_rank, where, "plain", formats, parts, "slots")


# ---- with what else there is


def off(got: Any, expected: Any, what: str) -> None:
    compare(got, expected, TOLERANCE, what)


@on_ranks()
@pytest.mark.parametrize(("world", "formats"), [(1, "int8"), (2, "int8"), nightly(1, "stochastic"), (2, "stochastic")])
def test_outside_of_steps(mesh: Any, formats: str) -> None:
    """The pure path, evaluation and whole weights: blocks see what has passed, `ya.unshard` the weights themselves."""
    abstract = tree(FORMATS[formats])
    state, unformatted = (ya.init(each, TX, mesh=mesh, precision=EXACT) for each in (abstract, tree(Wire())))
    assert torch.equal(ya.unshard(state)["layers"]["up"], ya.unshard(unformatted)["layers"]["up"])
    value, _ = derivatives(mesh, Plain(abstract), state, 1e-8)
    compare(ya.eval_step(loss)(state, batch_of(mesh.get_rank()))["loss"], value, 1e-6, "evaluation")
    if mesh.size() == 1:  # elsewhere the roundings of several ranks add up
        up = ya.unshard(torch.func.grad(lambda p: loss(p, batch_of(0)).total)(state.params))["layers"]["up"]
        again = torch.stack([ya.formats.passed(FORMATS[formats].reduce, layer) for layer in up])
        compare(again, up, 1e-6, "a gradient that has passed through the format")


def reproduced(_: Any, formats: str) -> int:
    return two_steps_of_micro_shards(loss, tree(FORMATS[formats]), TX)


@pytest.mark.parametrize("formats", ["int8", "stochastic"])
def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: Pools, formats: str) -> None:
    alike(pools, (1, 2, 4), reproduced, formats)


@on_ranks()
@pytest.mark.parametrize(("world", "kind"), [(2, "marked"), nightly(4, "tied")])
def test_across_stages(_: Any, kind: str) -> None:
    plain = Plain(tree(FORMATS["gathers" if kind == "tied" else "int8"], kind))
    across_stages(plain, ya.schedules.zero3(), TOLERANCE)


def split_in_blocks(block: int) -> dict[str, Any]:
    """No format rounds the gradient of the gain: each rank of tensor has another part of it."""
    format = Scaled(torch.int8, block)
    return split_tree(E, 8, wire=Wire(format, format), gain=Wire(gather=format))


@on_ranks(2, 4)
def test_over_tensor(_: Any) -> None:
    """Split leaves have the blocks of whole ones, or are refused; their gradients on each rank of tensor alike."""
    for (_value, found), (_expected, grads) in gradients_over_tensor(split_in_blocks(4)):
        off(found["layers"], grads["layers"], "tensor")
    with pytest.raises(ValueError, match=r"layers.*down is split over tensor into runs of 4 elements, and int8/8"):
        ya.init(split_in_blocks(8), TX, mesh=ya.mesh(device="cpu", tensor=2))


@on_ranks(1, 3)
def test_whole_leaves_go_to_their_owners(mesh: Any) -> None:
    two_steps_are_plain(mesh, Plain(tree(FORMATS["int8"])), ya.optim.muon(0.02, dtype=F64))


@on_ranks(1, 2)
def test_adapters(mesh: Any) -> None:
    """A matrix keeps its format under an adapter, which has none."""
    abstract = ya.lora(tree(Wire(INT8)), 2, lambda path, _: path.endswith("up"))
    node = abstract["layers"].tree["up"]
    assert node.weight.tree.wire.gather == INT8
    assert node.a.wire == node.b.wire == Wire()
    gradients(mesh, "shard", Plain(abstract), {"zero3": ya.schedules.zero3()}, 1, TOLERANCE)


# ---- states: written by hand, skipped, saved


@on_ranks()
@pytest.mark.parametrize(
    ("world", "formats"), [(1, "int8"), (2, "int8"), (3, "int8"), (2, "stochastic"), nightly(3, "stochastic")]
)
def test_states(mesh: Any, tmp_path: Path, formats: str) -> None:
    abstract = tree(FORMATS[formats])
    plain = Plain(abstract)
    state = ya.init(abstract, TX, mesh=mesh, precision=EXACT)
    step = ya.train_step(loss, TX)
    batches = [batch_of(rank) for rank in range(mesh.size())]
    mine = batches[mesh.get_rank()]
    state, _ = step(state, mine)
    with torch.no_grad():  # between steps, on all ranks
        for leaf in state.params["layers"].leaves:
            leaf.mul_(2)
    _, grads = plain.value_and_grad(ya.unshard(state), batches)
    _, found = ya.value_and_grad(loss)(state.params, mine)
    off(plain.trained(found), plain.trained(grads), "written by hand")
    before = ya.checksum(state)
    ya.checkpoint.save(tmp_path / "own", state)
    unbroken, _ = step(state.copy(), mine)
    for wire in (FORMATS[formats], Wire(), Wire(Scaled(torch.int8, 64))):  # leaves begin elsewhere
        like = ya.init(tree(wire), TX, mesh=mesh, precision=EXACT, seed=1)
        loaded, _ = ya.checkpoint.load(tmp_path / "own", like)
        assert loaded.step == 1
        off(ya.unshard(loaded), ya.unshard(state), f"loaded into {wire}")
        own = wire == FORMATS[formats]
        if own:
            assert ya.checksum(loaded) == before
            _, found = ya.value_and_grad(loss)(loaded.params, mine)
            off(plain.trained(found), plain.trained(grads), "loaded")
        moved, _ = step(loaded, mine)
        assert moved.step == 2
        assert (ya.checksum(moved) == ya.checksum(unbroken)) == own
    same = copy.deepcopy(state)
    with torch.no_grad():
        same.params["head"].leaves[0].fill_(float("inf"))
    same, metrics = step(same, mine)
    assert metrics["skipped"] == 1, "gradients that are not finite stay so in a format"


# ---- what travels, and what is planned


@on_ranks(2, 3)
def test_what_travels_is_what_the_program_says(mesh: Any) -> None:
    state = ya.init(tree(FORMATS["mixed"], "marked"), TX, mesh=mesh)
    for counted, said in sent(loss, state, batch_of(mesh.get_rank()))[:2]:
        assert counted == said > 0


@on_ranks(2)
def test_a_plan_is_of_the_state(mesh: Any) -> None:
    """A trace without ranks is that of the state; its units say their formats, in JSON too."""
    abstract = tree(FORMATS["mixed"], "marked")
    program = planned_program(loss, abstract, ya.init(abstract, TX, mesh=mesh), TX)
    names = {(u.gathered_as and u.gathered_as.name, u.reduced_as and u.reduced_as.name) for u in program.trace.units}
    assert names == {(None, None), ("float8_e4m3fn/8", None), ("float8_e4m3fn/8", "halves")}
    elsewhere = program.trace.on((("shard", 6),))
    assert ya.planner.trace(loss, abstract, batch_of(0), mesh=elsewhere.mesh, device="cpu").units == elsewhere.units


# ---- what is refused


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Param.wire: expected a ya.Wire"):
        ya.Param((2, 3), wire="int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Param.wire.gather: expected a ya.formats.Format or None"):
        ya.Param((2, 3), wire=Wire(torch.int8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Scaled: dtype=torch.int4"):
        Scaled(torch.int4)
    with pytest.raises(ValueError, match=r"blocks of an element and a byte at least, got 0 elements in 4 bytes"):
        ya.Param((2, 3), wire=Wire(Scaled(block=0)))
    with pytest.raises(ValueError, match=r"PlainState: head.out travels in wire formats, gather=int8/8"):
        ya.PlainState.create(tree(FORMATS["gathers"]), TX)
    with pytest.raises(ValueError, match=r"with_wire: no leaf was chosen"):
        ya.params.with_wire({"w": ya.Param((2, 3))}, FORMATS["int8"])


@on_ranks(2)
def test_ranks_have_the_same_formats(mesh: Any) -> None:
    block = 8 * (1 + mesh.get_rank())
    with pytest.raises(ya.errors.RanksDisagree, match=r"on the wire gather=int8/8"):
        ya.init(tree(Wire(Scaled(block=block))), mesh=mesh)


# ---- formats


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits(dtype: torch.dtype) -> None:
    """Each block is off by half a step of its largest element; zeros, the tiniest and what is not finite stay."""
    format = Scaled(dtype, 16)
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-32, 32)[:, None]
    step = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[dtype]
    for source in (values, values.double(), values.bfloat16()):
        off = (passed(format, source, F64) - source).abs().amax(-1) / source.abs().amax(-1)
        assert 0 < float(off.max()) <= 1.01 * step
    assert torch.equal(passed(format, torch.zeros(16)), torch.zeros(16))
    assert passed(format, torch.full((16,), 1e-45)).abs().max() <= 1e-44
    for wrong in (float("inf"), float("-inf"), float("nan")):
        found = passed(format, torch.cat([torch.ones(8), torch.tensor([wrong]), torch.ones(23)]))
        assert not found[:16].isfinite().all()
        assert torch.equal(found[16:], torch.ones(16))
    assert torch.equal(passed(format, passed(format, values)), passed(format, values)) or dtype != torch.int8


BY_CHANCE = (
    *(Scaled(dtype, 16, stochastic=True) for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)),
    Roots(16, stochastic=True),
)


@pytest.mark.parametrize("format", BY_CHANCE, ids=lambda format: format.name)
def test_the_mean_of_what_is_rounded_stochastically_is_the_value(format: Any) -> None:
    """Over steps in which values change a little; rounded to nearest, small ones are off alike in each."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 16, generator=draw, dtype=F64) * torch.logspace(-3, 0, 16, dtype=F64)
    values = values.square() if isinstance(format, Roots) else values
    errors: dict[bool, list[Tensor]] = {True: [], False: []}
    for _ in range(1000):
        now = values * (1 + 0.01 * torch.randn(64, 16, generator=draw, dtype=F64))
        for stochastic, found in errors.items():
            found.append(passed(dataclasses.replace(format, stochastic=stochastic), now) - now)
    each = torch.stack(errors[True])
    nearest = torch.stack(errors[False])
    sure = each.std(0) > 1e-7 * values.abs().amax(-1, keepdim=True)  # the largest of a block is off by its scale alone
    deviations = (each.mean(0) / (each.std(0) / 1000**0.5))[sure]
    assert abs(float(deviations.mean())) < 0.2
    assert 0.9 < float(deviations.std()) < 1.1
    assert float(deviations.abs().max()) < 5
    assert 1.2 < float(each.norm() / nearest.norm()) < 1.6  # the square root of 2, where errors are uniform
    deviations = (nearest.mean(0) / (nearest.std(0) / 1000**0.5))[sure & (nearest.std(0) > 0)]
    assert float(deviations.abs().max()) > 10


@pytest.mark.parametrize("format", BY_CHANCE, ids=lambda format: format.name)
def test_noise_is_of_the_block_alone(format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies; blocks that differ a little have other noise; the largest noise takes no number too far."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randn(200, 16, generator=draw)
    order = torch.randperm(200, generator=draw)
    assert torch.equal(format.encode(blocks)[order], format.encode(blocks[order]))
    assert torch.equal(torch.cat([format.encode(row[None]) for row in blocks]), format.encode(blocks))
    numbers = 40 * torch.randn(2000, 16, generator=draw)
    noise = formats.noise(numbers)
    assert abs(float(noise.mean()) - 0.5) < 0.01
    assert abs(float(noise.var()) - 1 / 12) < 0.002
    assert 0 <= float(noise.min()) < 0.001
    assert 0.999 < float(noise.max()) < 1
    numbers[:, 5] += 2 / formats.FINE
    for other in (formats.noise(numbers), formats.noise(numbers, 1)):
        assert abs(float((noise - 0.5).mul(other - 0.5).mean())) < 0.002
        noise = other
    monkeypatch.setattr(formats, "noise", lambda numbers, _: torch.full_like(numbers, 1 - 2.0**-24))
    off = (passed(format, blocks) - blocks).abs()
    assert bool((off <= 0.3 * blocks.abs().amax(-1, keepdim=True)).all())


def test_moments_that_shrink_slowly() -> None:
    """Rounded to nearest they stay, beside one that does not shrink."""
    values = torch.rand(64, 16, generator=torch.Generator().manual_seed(0), dtype=F64) + 0.1
    values[:, 0] = 2
    for stochastic in (False, True):
        format = Roots(16, stochastic)
        now = first = passed(format, values)
        for updates in range(1000):
            now = passed(format.at(updates), torch.cat([now[:, :1], 0.999 * now[:, 1:]], 1))
        shrunk = float((now / first)[:, 1:].mean())
        assert abs(shrunk - 0.999**1000) < 0.02 if stochastic else shrunk == 1


def test_a_leaf_is_encoded_as_the_vector_that_it_is() -> None:
    leaf = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    flat = torch.cat([leaf.flatten(), torch.zeros(1)])
    assert torch.equal(passed(INT8, leaf).flatten(), passed(INT8, flat)[:15])
