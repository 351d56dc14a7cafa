"""Damaged programs and damaged executions of states in formats: none that is wrong is accepted.

    programs      an op changed, dropped, moved or added, or another format in the trace: it is refused, or its steps
                  are the plain loop's. All that a program can have wrong of a format: a slot that is stale, or another
                  unit's, a gradient that is added twice or not, a trace with another format or a smaller region
    executions    a fault in one call of the engine, which decodes with another block's scale, twice, or not, leaves an
                  encoded shard as it was, or takes another vector: what comes out is not the plain loop's

The plain loop is the oracle of both: it knows no rules, slots or regions. At night run DAMAGED of each, by day a few.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.formats import EXACT, Loop, Plain, adamw, loss, schedules_for, tree
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import batch_of
from tests.harness.pool import Pools
from tests.proof.mutants import mutant
from tests.proof.verdicts import refusal
from tests.steps import test_leaf_dtypes as own_dtypes
from tests.steps.test_states_in_formats import FORMATS as MOMENTS
from tests.steps.test_states_in_formats import TOLERANCE
from tests.steps.test_wire_formats import FORMATS as WIRES
from yafsdp_fn.communication.formats import Format, Wire
from yafsdp_fn.program.trace import Encoding
from yafsdp_fn.runtime import memory
from yafsdp_fn.schedules import Program

RECOMPUTED = "zero3, recomputed"
DAMAGED = int(os.environ.get("DAMAGED", "5000"))
STEPS = 3
ALIKE = 20
"""Numbers that damage one case: its program is built once, and its plain loop runs once."""

# ---- a training run, and what must come of it

SCHEDULES: dict[str, dict[str, Any]] = {
    mesh: schedules_for(types.SimpleNamespace(mesh_dim_names=axes)) | {"inside": ya.schedules.zero3(update=True)}
    for mesh, axes in (("shard", ()), ("nodes", ("local",)))
}


class Case(NamedTuple):
    kind: str
    wire: Wire
    moments: Format | None
    parts: int
    mesh: str
    schedule: str

    @staticmethod
    def drawn(rng: Random, *, once: bool) -> Case:
        """once: each gradient is reduced once, however a program is changed, and so rounded once"""
        kind = rng.choice(("plain", "marked", "tied"))
        parts = rng.choice((1, 3))
        mesh = rng.choice(("shard", "nodes"))
        wire = rng.choice((Wire(), *WIRES.values()))
        moments = rng.choice((None, *(format for format, _ in MOMENTS.values())))
        if once and (parts > 1 or kind == "marked"):
            wire = wire._replace(reduce=None)
        return Case(kind, wire, moments, parts, mesh, rng.choice(list(SCHEDULES[mesh])))

    def state(self) -> Any:
        return ya.init(tree(self.wire, self.kind), adamw(self.moments), mesh=made(self.mesh), precision=EXACT)

    def step(self, program: Program | None = None) -> Any:
        schedule = program or SCHEDULES[self.mesh][self.schedule]
        return ya.train_step(loss, adamw(self.moments), schedule=schedule, microbatches=self.parts)


def after(mesh: Any, step: Any, state: Any, numbers: range) -> Any:
    for number in numbers:
        state, _ = step(state, batch_of(mesh.get_rank(), seed=number))
    return state


@functools.lru_cache(maxsize=100)
def expected(case: Case, ranks: int) -> Loop:
    """The plain loop after all steps."""
    loop = Loop(Plain(tree(case.wire, case.kind)), ya.unshard(case.state()), case.moments)
    for number in range(STEPS):
        batches = [batch_of(rank, seed=number) for rank in range(ranks)]
        loop.step(batches, case.parts, case.schedule == "zero1", 2 if case.mesh == "nodes" and ranks == 4 else 1)
    return loop


def is_exact(mesh: Any, case: Case, state: Any) -> bool:
    params = ya.unshard(state)
    loop = expected(case, mesh.size())
    try:
        loop.compare(params, TOLERANCE, "")
    except AssertionError:
        return False
    return True


# ---- programs


@functools.lru_cache(maxsize=100)
def lowered(mesh: Any, case: Case) -> Program:
    program: Program = case.step().lower(case.state(), batch_of(mesh.get_rank()))
    return program


def other_formats(program: Program, rng: Random) -> Program:
    """The program with a unit that travels otherwise, or in a region of another size."""
    units = list(program.trace.units)
    at = rng.randrange(len(units))
    other = rng.choice(units)
    unit = units[at]
    changes: list[dict[str, Any]] = [
        {"gathered_as": other.gathered_as},
        {"reduced_as": other.reduced_as},
        {"gathered_as": Encoding("int8/8", 8, 12, unit.gather_wire // 2)},
        {"gather_bytes": unit.gather_bytes - 8},
        {"state_block": 2 * unit.state_block},
    ]
    if unit.gathered_as is not None:
        changes += [{"gathered_as": unit.gathered_as._replace(**{f: 8})} for f in ("block", "block_bytes", "nbytes")]
    units[at] = unit._replace(**rng.choice(changes))
    return program.with_trace(program.trace._replace(units=tuple(units)))


def damaged_programs(mesh: Any, numbers: range) -> Counter[str]:
    """What becomes of programs with a change, or with several of which `verify` accepts all but the last."""
    found: Counter[str] = Counter()
    for number in numbers:
        case = Case.drawn(Random(f"program {number // ALIKE}, {mesh.size()} ranks"), once=True)
        rng = Random(f"change {number}")
        rule = ""
        program = right = lowered(mesh, case)
        while program == right or (not rule and rng.random() < 0.3):
            program = other_formats(program, rng) if rng.random() < 0.1 else mutant(program, rng)
            rule = refusal(program)
        if rule:
            found["refused"] += 1
            continue
        try:
            state = after(mesh, case.step(program), case.state(), range(STEPS))
        except ValueError as error:
            assert "the program does not fit: it is of other units" in str(error), error
            found["does not fit the state"] += 1
            continue
        assert is_exact(mesh, case, state), f"{number}, {case}: accepted, though wrong:\n{right.diff(program)}"
        found["accepted, exact"] += 1
    return found


def some(*daily: tuple[int, int], each: int = 100) -> list[Any]:
    """Ranks, and numbers of what they damage. daily: how much by day"""
    ranks = (1, 2, 1, 1, 2, 1, 4, 1, 2, 1)
    pieces = [range(at, min(at + each, DAMAGED)) for at in range(0, DAMAGED, each)]
    by_night = [nightly(ranks[at % len(ranks)], piece) for at, piece in enumerate(pieces)]
    return [*((world, range(number)) for world, number in daily), *by_night]


@pytest.mark.parametrize(("world", "numbers"), some((1, 40), (2, 20)))
def test_no_wrong_program_is_accepted(pools: Pools, world: int, numbers: range) -> None:
    found = pools[world].run(damaged_programs, numbers)
    print(f"\ndamaged programs: {dict(found[0])}")
    assert found == [found[0]] * world
    assert found[0]["accepted, exact"]
    assert found[0]["refused"]


# ---- executions


class Fault:
    """One call of a function is damaged: number `at`, or the first one behind it where damage changes something.

    how: the kind of damage; over: there is none any more; struck: where, in words
    """

    def __init__(self, rng: Random, how: str, at: int) -> None:
        self.rng, self.how, self.left, self.over, self.struck = rng, how, at, False, ""

    def here(self) -> bool:
        self.left -= 1
        return self.left < 0

    def strikes(self, what: str, got: Tensor, right: Tensor) -> bool:
        """Whether elements, but zeros as padding has, are off by as much as a format rounds."""
        off = (got.double() - right.double()).abs().where(right != 0, 0)
        if bool((off > 1e-3 * right.double().abs().max()).any()) or not off.isfinite().all():
            self.over, self.struck = True, f"{what}, {self.how}"
        return self.over


def damaged_rows(fault: Fault, rows: Tensor) -> None:
    """Bytes of blocks [B, block_bytes]."""
    one, other = (fault.rng.randrange(len(rows)) for _ in range(2))
    if fault.how == "scale of another block":
        rows[one, :4] = rows[other, :4]
    elif fault.how == "another block":
        rows[one] = rows[other]
    elif fault.how == "wrong region":
        rows.copy_(rows.roll(1, 0))
    elif fault.how == "region too small":
        rows[len(rows) // 2 :] = 0


ROWS = ("scale of another block", "another block", "wrong region", "region too small")


def coding(real: Any, fault: Fault, format: Format, given: Tensor, out: Tensor) -> None:
    """Encodes, or decodes, `given` into `out`: damaged is what is encoded, before or behind."""
    before = out.clone()
    decodes = given.dtype == torch.uint8
    real(format, given, out)
    if not fault.here():
        return
    right = out.clone()
    if fault.how == "left out":
        out.copy_(before)
    elif fault.how == "twice":
        real(format, given, out)
    elif decodes:
        encoded = given.clone()
        damaged_rows(fault, encoded.view(-1, format.block_bytes))
        real(format, encoded, out)
    else:
        damaged_rows(fault, out.view(-1, format.block_bytes))
    each = (out, right) if decodes else [decoded(format, nbytes) for nbytes in (out, right)]
    if not fault.strikes("decoding" if decodes else "encoding", *each):
        out.copy_(right)


def decoded(format: Format, encoded: Tensor) -> Tensor:
    return format.decode(encoded.reshape(-1, format.block_bytes).clone(), torch.float64)


def decoding_parts(
    real: Any, fault: Fault, format: Format, encoded: Tensor, ranks: int, dtype: torch.dtype
) -> Iterator[Any]:
    given = encoded.clone()
    if fault.here():
        rows = given.view(-1, format.block_bytes)
        damaged_rows(fault, rows)
        # sums of ranks: what is only added in another order is no fault
        sums = [decoded(format, nbytes).view(ranks, -1).sum(0) for nbytes in (rows, encoded)]
        if not fault.strikes("adding up", *sums):
            given.copy_(encoded)
    yield from real(format, given, ranks, dtype)


def gathering(
    real: Any, fault: Fault, comms: Any, fulls: Sequence[Tensor], shards: Sequence[Tensor], **how: Any
) -> None:
    before = [full.clone() for full in fulls]
    real(comms, fulls, shards, **how)
    if not fault.here():
        return
    at = fault.rng.randrange(len(fulls))
    full = fulls[at]
    right = fulls[at].clone()
    if fault.how == "left out":
        full.copy_(before[at])
    else:
        other = fulls[at - 1] if len(fulls) > 1 else full.roll(full.numel() // 2)
        size = min(full.nbytes, other.nbytes)
        full.view(torch.uint8)[:size].copy_(other.view(torch.uint8)[:size])
    if not fault.strikes("gathering", full, right):
        full.copy_(right)


def reducing(
    real: Any,
    fault: Fault,
    comms: Any,
    shards: Sequence[Tensor],
    fulls: Any,
    adds: Sequence[bool],
    *rest: Any,
    **more: Any,
) -> None:
    before = [shard.clone() for shard in shards]
    real(comms, shards, fulls, adds, *rest, **more)
    if not fault.here():
        return
    at = fault.rng.randrange(len(shards))
    shard = shards[at]
    right = shards[at].clone()
    sum = shard - before[at] if adds[at] else right
    if fault.how == "twice":
        shard.add_(sum)
    elif fault.how == "on what is stale":
        shard.copy_(sum if adds[at] else sum + before[at])
    else:
        other = shards[at - 1] if len(shards) > 1 else shard.flip(0)
        size = min(shard.numel(), other.numel())
        shard[:size].copy_(other[:size])
    if not fault.strikes("reducing", shard, right):
        shard.copy_(right)


class Site(NamedTuple):
    """A function of a module, as another one calls it, and kinds of damage of a call. called: whether a case does"""

    user: str
    module: str
    name: str
    damaged: Callable[..., Any]
    ways: tuple[str, ...]
    called: Callable[[Case], object]


OF_FORMATS = (
    Site("runtime.memory", "formats", "encode", coding, ("left out", *ROWS), lambda case: case.wire.gather),
    Site("runtime.works", "formats", "decode", coding, ("left out", "twice", *ROWS), lambda case: case.wire.gather),
    Site(
        "communication.sums", "formats", "encode", coding, ("left out", "twice", *ROWS), lambda case: case.wire.reduce
    ),
    Site("communication.sums", "formats", "decoded_parts", decoding_parts, ROWS, lambda case: case.wire.reduce),
    Site("optim.in_format", "formats", "encode", coding, ("left out", *ROWS), lambda case: case.moments),
    Site("optim.in_format", "formats", "decode", coding, ("left out", *ROWS), lambda case: case.moments),
)
OF_VECTORS = (
    Site("runtime.works", "flat", "gather_into", gathering, ("left out", "another"), lambda case: True),
    Site("runtime.works", "flat", "reduce_into", reducing, ("twice", "on what is stale", "another"), lambda case: True),
)


@contextlib.contextmanager
def planted(mesh: Any, rng: Random, sites: Sequence[Site]) -> Iterator[Fault]:
    """A fault in one of these functions, on one rank. Steps keep what they have prepared: it is over at the end.

    Memory is filled where it is allocated. A slot often lies where a run of the same case before it had one: what is
    left out there has the right values but for some that the allocator wrote, maybe in rows that no token reads.
    """
    site = rng.choice(sites)
    fault = Fault(rng, rng.choice(site.ways), rng.randrange(8))
    fault.over = rng.randrange(mesh.size()) != mesh.get_rank()
    user = importlib.import_module(f"yafsdp_fn.{site.user}")
    module = getattr(user, site.module)
    real = getattr(module, site.name)

    def call(*args: Any, **more: Any) -> Any:
        return real(*args, **more) if fault.over else site.damaged(real, fault, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user, site.module, types.SimpleNamespace(**{**vars(module), site.name: call}))
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(1).isnan()
            yield fault
        finally:
            torch.use_deterministic_algorithms(False)
    fault.over = True


Outcome = tuple[str, bool]
"""Where a fault has struck on this rank, if it has, and whether what came out is exact."""


def damaged_executions(mesh: Any, numbers: range) -> list[Outcome]:
    """The last step is not damaged: it reads all that was damaged before."""
    found = []
    for number in numbers:
        case = Case.drawn(Random(f"execution {number // ALIKE}, {mesh.size()} ranks"), once=False)
        if case.schedule == RECOMPUTED and mesh.size() > 1:  # a rank that sees it alone lets the others wait
            case = case._replace(schedule="zero2")
        sites = [site for site in (*OF_FORMATS, *OF_VECTORS) if site.called(case)]
        step = case.step()
        try:
            with planted(mesh, Random(f"fault {number}"), sites) as fault, pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory, "COMPARED", 0)  # of working copies: it sees some faults, on one rank alone
                state = after(mesh, step, case.state(), range(STEPS - 1))
            exact = is_exact(mesh, case, after(mesh, step, state, range(STEPS - 1, STEPS)))
        except RuntimeError as error:
            expect_told_by_recomputation(error, case.schedule)
            exact = False
        found.append((fault.struck and f"{fault.struck}: {number}, {case}", exact))
    return found


def expect_told_by_recomputation(error: RuntimeError, schedule: str) -> None:
    assert schedule == RECOMPUTED
    assert "the block returned other values than in its forward" in str(error)


def damaged_dtypes(mesh: Any, numbers: range) -> list[Outcome]:
    """The same of leaves in dtypes of their own, which are gathered beside others."""
    found = []
    for number in numbers:
        rng = Random(f"dtypes {number}")
        kind = rng.choice(("plain", "marked", "tied"))
        parts = rng.choice((1, 3))
        schedule = rng.choice(own_dtypes.NAMES)
        copy = number % 2 == 0
        if schedule == RECOMPUTED and mesh.size() > 1:  # as above
            schedule = "zero2"
        case = f"{kind}, {parts}, {schedule}"
        exact = True
        with planted(mesh, rng, OF_VECTORS) as fault:
            try:
                own_dtypes.exact(mesh, "shard", kind, parts, schedule, copy)
            except AssertionError:
                exact = False
            except RuntimeError as error:
                expect_told_by_recomputation(error, schedule)
                exact = False
        found.append((fault.struck and f"{fault.struck}: {number}, {case}", exact))
    return found


def all_seen(of_ranks: Sequence[Sequence[Outcome]]) -> None:
    """Each fault is seen on all ranks, and what none has struck is exact."""
    struck: Counter[str] = Counter()
    for outcomes in zip(*of_ranks, strict=True):
        where = "".join(where for where, _ in outcomes)
        assert all(exact != bool(where) for _, exact in outcomes), where or "wrong without a fault"
        struck[where.partition(":")[0]] += 1
    print(f"\nfaults: {dict(struck)}")
    assert len(struck) > 1


@pytest.mark.parametrize(("world", "numbers"), some((1, 8), (2, 10)))
def test_every_fault_is_seen(pools: Pools, world: int, numbers: range) -> None:
    all_seen(pools[world].run(damaged_executions, numbers))


@pytest.mark.parametrize(("world", "numbers"), [(2, range(6)), nightly(1, range(100)), nightly(3, range(100))])
def test_every_fault_of_a_dtype_is_seen(pools: Pools, world: int, numbers: range) -> None:
    all_seen(pools[world].run(damaged_dtypes, numbers))
