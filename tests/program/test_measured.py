"""What was measured of a step is for predictions: the engine, the proof and the builders do without."""

from pathlib import Path

import pytest

import yafsdp_fn

LIBRARY = Path(yafsdp_fn.__file__).parent


@pytest.mark.parametrize("folder", ["proof", "runtime", "schedules", "optim", "communication", "extras", "checkpoint"])
def test_no_other_room_names_a_cost(folder: str) -> None:
    assert not [path for path in (LIBRARY / folder).rglob("*.py") if "program.measured" in path.read_text()]
