"""Finds the program of a step across stages, once for each set of shapes of a batch: traces the step and cuts it.

The trace is on fake tensors, since no rank could know alone what travels.
"""

from collections.abc import Hashable
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.params.sharded import handles_and_leaves, is_sharded
from yafsdp_fn.pipelines.cut import cut
from yafsdp_fn.pipelines.stage_io import Crossing
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import INDEPENDENT, Arguments
from yafsdp_fn.runtime.batch import argument_name
from yafsdp_fn.runtime.consistency import digest
from yafsdp_fn.runtime.graph_walks import foreign
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.programs import Programs, Verified
from yafsdp_fn.runtime.recording import LossWatch
from yafsdp_fn.tracing.tracer import Tracer, traced
from yafsdp_fn.util.torch_private import memory_key


def program_of(arguments: Arguments, memory: StateMemory, programs: Programs) -> Verified:
    """Returns the program to run, and learns it before the first run on a batch of such shapes."""
    if arguments.plain:  # a stage would have the gradient of its part alone
        raise ValueError("a gradient of plain tensors on a mesh with stages: put them into the state")
    batch = shapes(arguments.rest)
    known = programs.known
    key = (memory.key, arguments.microbatches, batch)
    if key in known:
        found = known[key] = known.pop(key)  # the last to run
        return found
    must_be_same(arguments.rest, memory.comms)
    crossing = crossing_of(arguments, memory, programs)
    found = programs.build(crossing.trace, memory.comms.stage, crossing)
    return programs.remember(found, memory, batch)


def shapes(tree: Any) -> Hashable:
    """The shapes and dtypes of a batch's tensors: a step is cut anew for other ones."""
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in optree.tree_leaves(tree))


def crossing_of(arguments: Arguments, memory: StateMemory, programs: Programs) -> Crossing:
    """Traces the step on fake tensors, and cuts it. Raises, on all ranks alike, for a loss that cannot be cut."""
    with LossWatch({}):
        found = traced(arguments, memory, every=not programs.trains)
        if kept := found.beside.kept.values():  # what its next calls read there is that stage's
            found = traced(arguments, memory, every=not programs.trains, kept=kept)
    if found.beside.by_value:
        raise RuntimeError(
            f"{found.beside.by_value[0]} beside the visits, of what one has made: how many random numbers it draws "
            "depends on values, which other stages do not have. Draw them inside of a visit (ya.apply)"
        )
    if programs.trains:
        _check(found)
    trace = programs.complete(found.trace, memory.abstract())
    if not programs.trains:
        trace = _forward_only(trace)
    assert memory.assignment is not None, "a mesh with stages"
    whole = cut(trace._replace(mesh=memory.mesh_axes), memory.assignment)
    return Crossing(whole, found)


def _check(found: Tracer) -> None:
    """Raises, on all ranks alike, for a loss that no cut into stages can run."""
    if found.untracked:
        raise errors.untracked(found.untracked[0])
    if not found.beside.written.isdisjoint(map(memory_key, found.leaves)):
        raise errors.leaf_written()
    if others := foreign(found.read):
        raise errors.parameter_of_a_module(others[0])
    if not set(map(id, found.read)).isdisjoint(map(id, found.leaves)):
        raise RuntimeError(errors.READ_BESIDE_VISITS)
    if rewritten := found.rewritten():
        raise RuntimeError(
            f"{rewritten[0]}: an argument is written in place after the visit took it; another stage would take "
            "what is there in the end. Work on a copy"
        )
    if not found.total.requires_grad:
        raise ValueError(INDEPENDENT)


def _forward_only(trace: Trace) -> Trace:
    """The trace of an evaluation: nothing is trained, and no gradient comes back."""
    visits = []
    for visit in trace.visits:
        arguments = tuple(argument._replace(grad_bytes=0) for argument in visit.cost.arguments)
        visits.append(visit._replace(trained=(), cost=visit.cost._replace(arguments=arguments)))
    order = tuple(compute for compute in trace.order if compute.kind == "forward")
    return trace._replace(visits=tuple(visits), order=order)


# ---- All stages of a pipeline compute on one batch, each its own visits: ranks at one place in their stages must be
# given the same rows. Compared before the first step with a batch of new shapes.

WHAT = "the batch, on which all stages compute"
NEW = "comparing a batch of new shapes"


def must_be_same(rest: Any, comms: Communicators) -> None:
    """Raises RanksDisagree on every rank where shapes differ between any two, or values between stages.

    rest: the arguments of the function, positional and keyword, but for parameters
    """
    outlines: dict[str, str] = {}
    digests: dict[str, int] = {}
    for at, leaf in handles_and_leaves(rest):
        if isinstance(leaf, Tensor):
            outlines[argument_name(at)] = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
            digests[argument_name(at)] = digest(leaf)
        elif not is_sharded(leaf):
            constant = isinstance(leaf, bool | int | float | str)
            outlines[argument_name(at)] = repr(leaf) if constant else type(leaf).__name__
    comms.must_agree(WHAT, outlines, NEW)
    if not digests:
        return
    # values: rank by rank, against those of stage 0
    mine = torch.tensor(list(digests.values()), dtype=torch.int64, device="cpu")
    every = comms.numbers_of_all(mine, NEW).view(comms.stages, -1, len(mine))
    for stage, rank, number in (every != every[0]).nonzero()[:1].tolist():
        other = stage * every.shape[1] + rank
        raise RanksDisagree(
            f"ranks disagree on {WHAT}; {list(digests)[number]} has other values on rank {rank} (stage 0) than on rank "
            f"{other} (stage {stage}). Read the same batch on all stages, as ya.shard_batch splits it"
        )
