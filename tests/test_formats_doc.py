"""docs/formats.md: its formats run, and are what the page says."""

from __future__ import annotations

import dataclasses
import runpy
from typing import Any
from xml.etree import ElementTree

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.pages import ROOT, doc
from tests.harness.pool import on_ranks
from tests.harness.small import batch, loss, model, one_rank

BLOCKS = [text.split("```")[0] for text in doc("formats").split("```python\n")]


def page(block: int, **names: Any) -> dict[str, Any]:
    space = {"ya": ya, "torch": torch, **names}
    exec(BLOCKS[block].replace("ranks=256", "ranks=2"), space)  # fewer meshes to search
    return space


def own_format() -> Any:
    return page(-1)["MXFP8"]()


def by_chance() -> Any:
    return page(next(at for at, block in enumerate(BLOCKS) if "formats.noise(" in block))["Halves"]()


def test_a_format_of_ones_own() -> None:
    format = own_format()
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(50, 32, generator=draw) * 2.0 ** torch.arange(-25, 25)[:, None]
    off = (ya.formats.passed(format, values) - values).abs().amax(-1) / values.abs().amax(-1)
    assert 2**-5 < float(off.max()) <= 2**-3  # the largest of a block may be 511, and the largest number is 448
    exact = torch.tensor([1.0, -0.5, 448.0, 0.0, *[0.25] * 28])
    assert torch.equal(ya.formats.passed(format, exact), exact)
    for wrong in (float("inf"), float("nan")):
        found = ya.formats.passed(format, torch.cat([torch.ones(31), torch.tensor([wrong]), torch.ones(32)]))
        assert not found[:32].isfinite().any()
        assert torch.equal(found[32:], torch.ones(32))
    lines = [line for line in BLOCKS[-1].splitlines() if line.strip()]
    assert len(lines) <= 30


def test_a_format_of_ones_own_that_rounds_stochastically() -> None:
    draw = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        values = sign * (
            1 + 0.375 * 2**-7 + 5e-4 * torch.randn(1000, 64, generator=draw)
        )  # in steps: 0.38, off by 0.06
        found = ya.formats.passed(by_chance(), values)
        assert set(found.unique().tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert abs(float((found - values).mean())) < 2**-7 * 0.01
    for wrong in (float("inf"), float("-inf"), float("nan")):
        assert not ya.formats.passed(by_chance(), torch.full((64,), wrong)).isfinite().any()


@on_ranks(1, 2)
def test_the_page_on_ranks(mesh: Any) -> None:
    """The page's first lines make a state whose weights pass through the format; so does one with the reader's own."""
    tx = ya.optim.adamw(1e-2)
    state = page(1, params=model(), tx=tx, mesh=mesh)["state"]
    assert {unit.gathered_as.name for unit in state.memory.units if unit.gathered_as} == {"int8/64"}
    for format in (ya.formats.Scaled(torch.int8, block=64), own_format(), by_chance()):
        light = ya.params.with_wire(model(), ya.Wire(gather=format))
        state = ya.init(light, tx, mesh=mesh)

        # by hand: matrices pass through the format, vectors do not
        whole = ya.unshard(state)
        for name in ("up", "down"):
            whole.layers[name] = torch.stack([ya.formats.passed(format, row) for row in whole.layers[name]])
        mean = loss(whole, batch())

        # and by the state
        value, _ = ya.value_and_grad(loss)(state.params, batch())
        assert abs(float(value - mean.total / mean.weight)) < 1e-5
        assert optree.tree_leaves(ya.train_step(loss, tx)(state, batch())[1]["loss"].isfinite())[0]


def test_what_pays_is_searched_for_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    number = next(at for at, block in enumerate(BLOCKS) if "search_formats" in block)
    tx = ya.optim.adamw(1e-2)
    state = ya.init(model(), tx, mesh=one_rank())
    names = {"loss": loss, "params": model(), "batch": batch(), "tx": tx, "state": state}
    found = page(number, int8=ya.formats.Scaled(torch.int8, block=64), **names)["found"]
    assert len(found.choices) == 6
    assert list(found.errors) == ["int8/64", "roots/64"]
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_the_table_and_the_picture_are_made_by_a_command() -> None:
    made = runpy.run_path(str(ROOT / "docs/formats_saved.py"))
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=2)
    rows = made["predicted"](config, 16, "a100-80g", 64)
    assert [row.name for row in rows][:3] == ["whole", "gathers in int8", "both ways in int8"]
    lines = made["table"]({"a step": rows}).splitlines()
    assert lines[0].startswith("| a step |")
    assert len(lines) == 2 + len(rows)
    assert "| whole | 0.0" in lines[2]
    drawn = ElementTree.fromstring(made["picture"]({"a step": rows}))
    said = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {row.name for row in rows[1:]} <= set(said)
    assert "a step" in said
    shown = (ROOT / "docs/images/formats.svg").read_text()
    page = doc("formats")
    for title in made["STEPS"]:  # the picture of the page has its numbers
        of_step = page.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[3:]
        saved = [row.split(" | ")[2] for row in of_step]
        assert len(saved) == len(made["CHOICES"]) - 1
        assert all(f">{ms}<" in shown for ms in saved)
