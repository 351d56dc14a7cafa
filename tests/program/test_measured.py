"""What was measured of a step is for predictions: the engine, the proof and the builders do without."""

from pathlib import Path

import pytest

import yafsdp_fn

LIBRARY = Path(yafsdp_fn.__file__).parent
MEASURING = {"tracer.py", "measuring.py", "operation_costs.py", "optimizer_memory.py"}
"""Files of the engine that measure."""


@pytest.mark.parametrize("folder", ["proof", "runtime", "schedules", "optim", "communication", "extras", "checkpoint"])
def test_no_other_room_names_a_cost(folder: str) -> None:
    naming = {path.name for path in (LIBRARY / folder).rglob("*.py") if "program.measured" in path.read_text()}
    assert naming <= MEASURING
