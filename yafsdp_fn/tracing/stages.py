"""Traces a step across stages, and cuts it: on fake tensors, since no rank could know alone what travels."""

from yafsdp_fn.program.cut import cut
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import INDEPENDENT, Arguments
from yafsdp_fn.runtime.graph_walks import foreign
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.programs import Programs
from yafsdp_fn.runtime.recording import LossWatch
from yafsdp_fn.runtime.stage_io import Crossing
from yafsdp_fn.tracing.tracer import Tracer, traced
from yafsdp_fn.util.torch_private import memory_key


def crossing_of(arguments: Arguments, memory: StateMemory, programs: Programs) -> Crossing:
    """Traces the step on fake tensors, and cuts it. Raises, on all ranks alike, for a loss that cannot be cut."""
    with LossWatch():
        found = traced(arguments, memory, every=not programs.trains)
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
    return Crossing(whole, found.results, found.out, found.total, found.made)


def _check(found: Tracer) -> None:
    """Raises, on all ranks alike, for a loss that no cut into stages can run."""
    if found.untracked:
        raise RuntimeError(
            f"{found.untracked[0]}: a visit under no_grad inside of a step across stages, whose program has none. Take "
            "what it gives from an evaluation before the step (ya.eval_step), or detach its outputs instead"
        )
    if not found.beside.written.isdisjoint(map(memory_key, found.leaves)):
        raise errors.leaf_written()
    if others := foreign(found.read):
        raise errors.parameter_of_a_module(others[0])
    if not set(map(id, found.read)).isdisjoint(map(id, found.leaves)):
        raise RuntimeError(
            "the loss reads sharded leaves beside its visits (a regulariser, say): each stage has only its own, and "
            "the sum would lack the others'. Visit them (ya.apply, ya.scan)"
        )
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
