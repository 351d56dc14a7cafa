"""A pipeline: a step that is cut into stages, with a program for each of them."""

import hashlib
import json
from typing import Any, NamedTuple

from yafsdp_fn import strict_json
from yafsdp_fn.schedules import serialised
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.trace import Trace


class Pipeline(NamedTuple):
    """What a schedule of a split step returns.

    trace: the whole step, with its `split`; stages: the program of each stage, whose trace is its part of the step
    """

    trace: Trace
    stages: tuple[Program, ...]

    @property
    def has_updates(self) -> bool:
        """Whether the optimizer's step is part of the programs."""
        return any(program.has_updates for program in self.stages)

    def __str__(self) -> str:
        return "\n\n".join(f"stage {number}: {program}" for number, program in enumerate(self.stages))

    def words(self) -> list[str]:
        """A line for each op of each stage."""
        return [f"stage {at}: {line}" for at, program in enumerate(self.stages) for line in program.words()]

    def fingerprint(self) -> str:
        """A hash of what ranks must agree on: that of every stage."""
        return hashlib.sha256("".join(program.fingerprint() for program in self.stages).encode()).hexdigest()

    def to_json(self) -> str:
        """The whole pipeline as JSON."""
        data = {"trace": self.trace._asdict(), "stages": [serialised.as_data(*program) for program in self.stages]}
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> "Pipeline":
        """The pipeline that `to_json` wrote. Raises ValueError where `text` is not one."""
        try:
            data: Any = strict_json.loads(text)
            if not isinstance(data, dict) or data.keys() != {"trace", "stages"} or not isinstance(data["stages"], list):
                raise ValueError("expected an object of a trace and a list of stages")
            trace = serialised.checked({"trace": data["trace"], "ops": []})[0]
            return Pipeline(trace, tuple(Program(*serialised.checked(stage)) for stage in data["stages"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a pipeline in JSON: {error}") from error
