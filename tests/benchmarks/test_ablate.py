"""Which contenders an ablation times, and what it makes of their seconds."""

from __future__ import annotations

import json

import pytest

from benchmarks import ablate, steps
from benchmarks.ablate import Ablate, Variant
from benchmarks.command import main


@pytest.mark.parametrize(
    ("feature", "name", "in_full_set"),
    [
        ("update", "zero3-resident2-nolinear", True),
        ("resident2", "zero3-update-nolinear", True),
        ("resident4", "zero3-update-nolinear-resident4", False),  # another number, in place of the first
        ("compile", "zero3-resident2-update-nolinear-compile", False),
        ("nofused", "zero3-resident2-update-nolinear-nofused", True),  # the word takes the feature away
        ("nolinear", "zero3-resident2-update", False),
    ],
)
def test_one_feature_at_a_time(feature: str, name: str, in_full_set: bool) -> None:
    assert ablate.variant("zero3-resident2-update-nolinear", feature) == Variant(feature, name, in_full_set)


def test_the_usual_sets_can_be_ablated() -> None:
    for config in ablate.FULL:
        found = Ablate(config=config).variants
        assert len({each.name for each in found}) == len(ablate.FEATURES), config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"features": ()}, "--features : expected one or more"),
        ({"features": ("update", "update")}, "--features update update: expected one or more, each once"),
        ({"features": ("unrol2",)}, "zero3 does not take -unrol2 here"),
        ({"full": "zero4"}, "no builder 'zero4'"),
        ({"full": "ddp", "features": ("resident2",)}, "ddp does not take -resident2"),
    ],
)
def test_what_cannot_be_ablated_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Ablate(**options)


def test_groups_fit_into_memory_and_begin_with_the_full_set() -> None:
    chosen = Ablate(config="B", full="zero3", features=("update", "nolinear", "noexchange"))
    one = steps.held_bytes(chosen.bench(("zero3", "zero3-update")), "zero3")
    processes = 2 * steps.process_bytes(chosen.bench(("zero3", "zero3-update")))
    names = ["zero3-update", "zero3-nolinear", "zero3-noexchange"]
    assert list(ablate.groups(chosen, 4 * one + processes)) == [("zero3", *names)]
    assert list(ablate.groups(chosen, 3 * one + processes)) == [("zero3", *names[:2]), ("zero3", names[2])]
    defined = steps.planned(chosen.bench(("zero3", "zero3-nofused")), "zero3-nofused")
    assert 2 * defined.peak_bytes > 2 * one, "updates and new moments, for a moment"
    assert list(ablate.groups(chosen, 0)) == [("zero3", name) for name in names], "never fewer than two"


def test_what_a_feature_buys_is_a_share_of_the_step_without_it() -> None:
    less = ablate.row(Variant("update", "zero3", in_full_set=True), [2.0, 2.0], [1.0, 1.5])
    assert less["over_full"]["median"] == pytest.approx((2 + 4 / 3) / 2)
    assert less["buys_percent"]["median"] == pytest.approx((50 + 25) / 2)
    more = ablate.row(Variant("compile", "zero3-compile", in_full_set=False), [0.9, 1.0], [1.0, 1.0])
    assert more["buys_percent"]["median"] == pytest.approx(5.0)


def test_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", "tiny", "--features", "update", "unroll3", "--steps", "2", "--warmup", "2", "--ranks", "1"]
    assert main(["ablate", *argv, "--json"]) == 0, capfd.readouterr().err
    found = json.loads(capfd.readouterr().out)
    assert found["full"] == "zero3-update" and set(found["features"]) == {"update", "unroll3"}
    assert {each["name"] for each in found["features"].values()} == {"zero3", "zero3-update-unroll3"}
    assert found["features"]["update"]["in_full_set"] and not found["features"]["unroll3"]["in_full_set"]
    assert all(each["over_full"]["median"] > 0 for each in found["features"].values())
    assert found["command"] == f"python -m benchmarks ablate {' '.join(argv)} --json"
