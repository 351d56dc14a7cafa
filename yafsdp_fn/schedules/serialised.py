"""Programs as JSON, and the hash that ranks compare."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from yafsdp_fn.schedules.measured import Cost, OptimizerMemory, Value
from yafsdp_fn.schedules.ops import OPS, Op
from yafsdp_fn.schedules.trace import Compute, Lent, Trace, UnitSpec, Visit


def fingerprint(trace: Trace, ops: Sequence[Op]) -> str:
    visits = [(visit.units, visit.trained) for visit in trace.visits]
    lent = [(of.unit, of.parts) for of in trace.lent]
    agreed = [trace.units, visits, trace.microbatches, trace.mesh, trace.update_when, lent, _ops(ops)]
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()


def to_json(trace: Trace, ops: Sequence[Op]) -> str:
    return json.dumps({"trace": trace._asdict(), "ops": _ops(ops)})


def from_json(text: str) -> tuple[Trace, tuple[Op, ...]]:
    """What `to_json` wrote. Raises ValueError where `text` is something else."""
    try:
        data = json.loads(text)
        trace = data["trace"]
        built = Trace(
            units=tuple(UnitSpec(*_tuples(unit)) for unit in trace["units"]),
            visits=tuple(_visit(*_tuples(visit)) for visit in trace["visits"]),
            order=tuple(Compute(*_tuples(compute)) for compute in trace["order"]),
            mesh=_tuples(trace["mesh"]),
            microbatches=trace["microbatches"],
            update_when=trace["update_when"],
            precision=_tuples(trace["precision"]),
            optimizer=OptimizerMemory(*_tuples(trace["optimizer"])),
            lent=tuple(Lent(*_tuples(lent)) for lent in trace.get("lent", ())),
        )
        return built, tuple(OPS[name](*_tuples(fields)) for name, *fields in data["ops"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a program in JSON: {type(error).__name__}: {error}") from error


def _ops(ops: Sequence[Op]) -> list[list[Any]]:
    return [[type(op).__name__.lower(), *op] for op in ops]


def _visit(number: int, name: str, units: Any, trained: Any, measured: Any) -> Visit:
    cost = Cost(*measured)
    takes, gives = (tuple(Value(*value) for value in values) for values in (cost.takes, cost.gives))
    return Visit(number, name, units, trained, cost._replace(takes=takes, gives=gives))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
