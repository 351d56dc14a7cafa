"""Every section fits a GPU of 80 GB by the planner's own word, and runs at its full depth on one of 141 GB."""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from benchmarks.cuda import emulated, gpu, memory
from benchmarks.cuda.command import SECTIONS, Section
from benchmarks.cuda.gpu import Setting
from yafsdp_fn.planner.plan import DoesNotFit

SMALL = 80 * 10**9
LARGE = 141 * 10**9


def on(total: int) -> Setting:
    """Nothing of it is in use."""
    return Setting("cuda", budget=gpu.budget(total, total))


def sizes(section: Section, setting: Setting) -> list[gpu.Fit]:
    """What a section would run, part by part."""
    name = section.call.rpartition(".")[2].partition(":")[0]
    if name == "memory":
        return [memory.fit(setting, case) for case in memory.CASES.values()]
    assert name == "emulated"
    found = emulated.fit(setting, gpu.published()[section.arguments[0]])
    assert found.peers == emulated.PEERS, "FSDP2 has all its settings"
    return [found.deepest]


@pytest.mark.sampled
@pytest.mark.parametrize("memory", [SMALL, LARGE])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_fits(name: str, memory: int) -> None:
    for fit in sizes(SECTIONS[name], on(memory)):
        assert fit.needs is not None
        assert fit.budget is not None
        assert 1 <= fit.layers <= fit.wanted
        assert fit.needs <= fit.budget < memory
        assert memory == SMALL or fit.layers == fit.wanted


def test_states_add_up_and_steps_take_turns() -> None:
    config = on(SMALL).config("llama2-7b", 2)
    one, two = (gpu.planned(config, 2048, ya.schedules.zero3(prefetch=n), ranks=8) for n in (1, 2))
    most = max(one.peak_bytes - one.held_bytes, two.peak_bytes - two.held_bytes)
    assert gpu.together([[one], [two]]) == one.held_bytes + two.held_bytes + most
    assert gpu.together([[one, two]]) == max(one.held_bytes, two.held_bytes) + most


def test_layers_are_cut_as_far_as_needed() -> None:
    def needs(layers: int) -> int:
        return 100 + 10 * layers

    assert gpu.layers(8, needs, None) == gpu.Fit(8, 8)
    for budget in range(110, 200, 3):
        found = gpu.layers(8, needs, budget)
        assert found.layers == min(8, (budget - 100) // 10)
        assert found.needs == needs(found.layers)
    with pytest.raises(DoesNotFit, match=r"one layer needs 0.0 GiB, and there are 0.0 GiB"):
        gpu.layers(8, needs, 109)


def test_the_network_is_scaled_without_a_peer_that_does_not_fit() -> None:
    row: Any = gpu.published()["llama2-70b/256"]
    found = emulated.fit(on(SMALL), row)
    assert found.depths == row.depths
    assert found.peers == ("fsdp2", "fsdp2-separate")
    assert emulated.fit(on(46 * 10**9), row).depths < row.depths
