"""Wheel and sdist are built, and the README's first code runs where the wheel alone is installed.

The environment is new, and finds nothing of the repository, and of the packages that are here only those that the wheel
asks for, and what these ask for: they are not installed again, but linked to.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.harness.pages import ROOT
from tests.harness.readme import FIRST
from tests.test_command import MODEL

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, by the project's own build backend."""
    pytest.importorskip("hatchling", reason="hatchling builds them: pip install hatchling")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.nightly
def test_wheel_and_sdist_hold_the_library_its_licence_and_its_name(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    kinds = (".py", ".pyi", ".typed")
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "yafsdp_fn").rglob("*") if file.suffix in kinds}
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert {name for name in names if ".dist-info/" not in name} == files
        (metadata,) = (packed.read(name) for name in names if name.endswith(".dist-info/METADATA"))
        assert any(name.endswith("licenses/LICENSE") for name in names)
    said = message_from_bytes(metadata)
    assert said["Name"] == PROJECT["name"]
    assert said["Version"] == PROJECT["version"]
    assert said["License-Expression"] == PROJECT["license"]
    needed = {line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert len(needed) == len(PROJECT["dependencies"])
    assert any(line.startswith("torch>=") for line in needed)
    with tarfile.open(sdist) as packed_source:
        inside = {name.split("/", 1)[1] for name in packed_source.getnames()}
    assert files | {"README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "train/", "models/"))]


def needed(asked: Iterable[str]) -> dict[str, Distribution]:
    """Returns the distributions here that these requirements ask for, and those that they ask for in turn, by name."""
    found: dict[str, Distribution] = {}
    wanted = [Requirement(line) for line in asked]
    while wanted:
        requirement = wanted.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = distribution(requirement.name)
        wanted += map(Requirement, found[requirement.name].requires or [])
    return found


CHECKPOINT = """
def save_and_load():
    state = ya.init(params, tx, mesh=ya.mesh(), seed=0)
    ya.checkpoint.save("checkpoints", state)
    return ya.checkpoint.load("checkpoints", like=state)[0].step

print("loaded:", ya.launch(save_and_load, ranks=2))
"""


@pytest.mark.nightly
def test_the_first_code_of_the_readme_runs_on_the_wheel_and_what_it_asks_for(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, _ = built
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    (metadata,) = site.glob("yafsdp_fn-*.dist-info")
    for needs in needed(Distribution.at(metadata).requires or []).values():
        for name in {file.parts[0] for file in needs.files or []} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(needs.locate_file(name)))
    (tmp_path / "first.py").write_text(FIRST + CHECKPOINT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = {"cwd": tmp_path, "env": environment | {"CUDA_VISIBLE_DEVICES": ""}, "capture_output": True, "text": True}
    look = "import importlib.util, yafsdp_fn; print(yafsdp_fn.__file__, importlib.util.find_spec('pytest'))"
    where, other = subprocess.run([python, "-c", look], **alone).stdout.split()
    assert Path(where).is_relative_to(site)
    assert other == "None"
    ran = subprocess.run([python, "first.py"], **alone)
    assert ran.returncode == 0, ran.stderr
    losses = re.findall(r"^(\d) ranks: (\d+\.\d+)$", ran.stdout, re.M)
    assert [ranks for ranks, _ in losses] == ["1", "2"]
    assert 4 < float(losses[0][1]) < 7
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=2e-4)
    assert "program of" in ran.stdout
    assert "gather layers[7] -> slot" in ran.stdout
    assert "loaded: [0, 0]" in ran.stdout and not ran.stderr, ran.stderr
    (tmp_path / "my_model.py").write_text(MODEL)
    plan = ["plan", "my_model:loss", "my_model:params", "my_model:batch", "--ranks", "16", "--cluster", "a100-80g"]
    told = subprocess.run([python.with_name("yafsdp"), *plan], **alone)
    assert told.returncode == 0 and "a step of 131,072 tokens on a100-80g" in told.stdout, told.stderr
