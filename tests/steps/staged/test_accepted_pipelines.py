"""Whatever `verify` accepts of a pipeline, stages execute exactly, and to its end: random pipelines in place of the
builder's, of losses in which stages hold units in odd ways.

    pipeline = order(sharding)(trace)
    changed = pipeline after three random changes that `verify` accepts
    three steps of each: the same metrics and parameters

Units are visited on both sides of a border, a stage may train nothing, or nothing but what no visit uses, and updates
come with a norm or without. A case is drawn from its world size and number, alike on every rank: `-k "3-1]"` runs
number 1 of three ranks again. SCHEDULE_MUTANTS=all has ten times as many. A stage that waits for ever raises when the
timeout of the pool is over.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any, NamedTuple

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, compare, joined
from tests.harness.pool import Pools
from tests.harness.problems import Batch, E, V, block, embed, layer, masked_loss, param
from tests.proof.changed import any_change
from tests.steps.staged.models import F64
from yafsdp_fn import schedules as s
from yafsdp_fn.program.measured import Cost

EVERY = os.environ.get("SCHEDULE_MUTANTS") == "all"
CASES = {2: 4, 3: 2, 4: 3}
DAILY = {2: 1, 3: 0, 4: 0}  # of each world; all run nightly
CHANGES, TRIES = 3, 90
TOLERANCE = 1e-9
"""Relative to a tensor, in float64: pipelines may add in another order."""

ORDERS = {
    "gpipe": (s.gpipe, 1, "loop"),
    "1f1b": (s.one_f_one_b, 1, "loop"),
    "interleaved": (s.interleaved, 2, "loop"),
    "zero-bubble": (s.zero_bubble, 1, "loop"),
    "v": (s.v_shaped, 2, "v"),
}
SHARDINGS = {"zero1": s.zero1, "zero2": s.zero2, "zero3": s.zero3}
MEASURED = ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2))
UNMEASURED = ya.optim.adamw(1e-2, weight_decay=0.1)


class Case(NamedTuple):
    """uses: layers in the order of visits, between the embedding and the head; frozen: the stage that trains nothing;
    spare: the stage that has a unit which no visit uses; clips: updates wait for the norm"""

    stages: int
    order: str
    sharding: str
    remat: str
    microbatches: int
    uses: tuple[int, ...]
    tied: bool
    frozen: int | None
    spare: int | None
    update: bool
    clips: bool

    @staticmethod
    def drawn(world: int, rng: random.Random) -> Case:
        stages = rng.choice([2, 4]) if world == 4 else world
        order = rng.choice(list(ORDERS))
        count = rng.randrange(max(1, stages * ORDERS[order][1] - 2), 2 * stages + 2)
        uses = [rng.randrange(k // 2 + 1) for k in range(count)]  # some twice in a row, some again later
        stage = rng.randrange(stages)
        frozen = rng.choice([None, 0, stage])
        spare = rng.choice([None, stage, 0 if frozen is None else frozen])
        names = list(SHARDINGS), ("none", "all", "first:1")
        return Case(
            stages,
            order,
            *(rng.choice(of) for of in names),
            rng.choice([1, 2, 3]),
            tuple(sorted(uses) if rng.random() < 0.6 else uses),
            rng.random() < 0.5,
            frozen,
            spare,
            rng.random() < 0.8,
            rng.random() < 0.3,
        )

    @property
    def tx(self) -> Any:
        return MEASURED if self.clips else UNMEASURED

    def params(self) -> dict[str, Any]:
        layers = {f"b{k}": layer() for k in sorted(set(self.uses))}
        return {"a": param(V, E), **layers, "c": param(V, E), "d": param(5, 3)}

    def loss(self, params: Any, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params["a"], batch["tokens"])
        skip = x.sin()
        for k in self.uses:
            x, _ = ya.apply(lambda w, x, skip: block(x + 0.1 * skip, w), params[f"b{k}"], x, skip)
        table = params["a" if self.tied else "c"]
        return ya.apply(lambda w, x, targets: masked_loss(ya.linear(x, w), targets), table, x, batch["targets"])

    def assigned(self, batch: Batch) -> tuple[dict[str, Any], ya.schedules.Assignment]:
        """Parameters, those of one stage frozen, and where they are: as many visits in each segment."""
        params = self.params()
        trace = ya.planner.trace(self.loss, params, batch, precision=F64)
        trace = trace._replace(visits=tuple(v._replace(cost=Cost()) for v in trace.visits))
        _, per_stage, shape = ORDERS[self.order]
        found = ya.schedules.assign(trace, self.stages, per_stage=per_stage, shape=shape)
        units = list(found.units)
        if self.spare is not None:
            units[-1] = (found.homes.index(self.spare),)
        visited = {name: segments for name, segments in zip(params, found.units, strict=True) if segments}
        frozen = {name for name, of in visited.items() if self.frozen in {found.homes[segment] for segment in of}}
        if len(frozen) < len(visited):  # else there is nothing to train
            params |= {name: ya.frozen(params[name]) for name in frozen}
        return params, ya.schedules.Assignment(tuple(units), found.homes)

    def lived(self, schedule: Any) -> tuple[Any, Any]:
        """What is seen in three steps, and the pipeline that ran."""
        mesh = mesh_of(stage=self.stages)
        batches = [batch_of(rank, rows=2 * self.microbatches) for rank in range(mesh.size() // self.stages)]
        params, assignment = self.assigned(batch_of(0, rows=2))
        state = ya.init(params, self.tx, mesh=mesh, precision=F64, stages=assignment)
        options: Any = {"microbatches": self.microbatches, "skip_nonfinite": self.clips}
        step = ya.train_step(self.loss, self.tx, schedule=schedule, **options)
        seen = {}
        for number in range(3):
            state, seen[number] = step(state, ya.shard_batch(joined(batches), mesh))
        return (seen, ya.unshard(state)), step.program(state)

    def built(self) -> Any:
        sharding: Any = SHARDINGS[self.sharding]
        return ORDERS[self.order][0](sharding(remat=self.remat, update=self.update))


def changed(pipeline: s.Program, rng: random.Random) -> s.Program:
    """`pipeline` after up to CHANGES random changes that `verify` accepts."""
    accepted = 0
    for _ in range(TRIES):
        candidate = any_change(pipeline, rng)
        if candidate == pipeline:
            continue
        with contextlib.suppress(s.Refused):
            pipeline = s.verify(candidate)
            accepted = accepted + 1
            if accepted == CHANGES:
                break
    assert accepted, f"none of {TRIES} changes was accepted:\n{pipeline}"
    return pipeline


def check(mesh: Any, number: int) -> None:
    """One rank's part."""
    rng = random.Random(f"{mesh.size()}-{number}")
    case = Case.drawn(mesh.size(), rng)
    try:
        expected, pipeline = case.lived(case.built())
        box = [changed(pipeline, rng).to_json() if mesh.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(box)
        other = s.Program.from_json(box[0])
        found, ran = case.lived(other)
        assert ran == other
        compare(found, expected, TOLERANCE, "the changed pipeline")
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "number"),
    [
        (world, n) if EVERY or n < DAILY[world] else nightly(world, n)
        for world, count in CASES.items()
        for n in range(count * (10 if EVERY else 1))
    ],
)
def test_accepted_pipelines_are_exact_and_end(pools: Pools, world: int, number: int) -> None:
    pools[world].run(check, number, timeout=300)
