"""Wheel and sdist are built, and the README's first code runs where the wheel alone is installed.

The environment is new and finds nothing of the repository. torch is not installed there again: a `.pth` file, behind
what is installed, points at the packages of the interpreter that runs the tests; so this does not look at dependencies
being complete, only at their names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.harness.readme import FIRST

ROOT = Path(__file__).resolve().parents[1]
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
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "yafsdp_fn").rglob("*.py")}
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert {name for name in names if ".dist-info/" not in name} == files
        (metadata,) = (packed.read(name) for name in names if name.endswith(".dist-info/METADATA"))
        assert any(name.endswith("licenses/LICENSE") for name in names)
    said = message_from_bytes(metadata)
    assert (said["Name"], said["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert said["License-Expression"] == PROJECT["license"]
    needed = {line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert len(needed) == len(PROJECT["dependencies"]) and any(line.startswith("torch>=") for line in needed)
    with tarfile.open(sdist) as packed_source:
        inside = {name.split("/", 1)[1] for name in packed_source.getnames()}
    assert files | {"README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "train/", "models/"))]


@pytest.mark.nightly
def test_the_first_code_of_the_readme_runs_on_the_wheel_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = built
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site / "torch_is_there.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "first.py").write_text(FIRST)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = {"cwd": tmp_path, "env": environment | {"CUDA_VISIBLE_DEVICES": ""}, "capture_output": True, "text": True}
    where = subprocess.run([python, "-c", "import yafsdp_fn; print(yafsdp_fn.__file__)"], **alone)  # type: ignore[call-overload]
    assert Path(where.stdout.strip()).is_relative_to(site), where.stderr
    ran = subprocess.run([python, "first.py"], **alone)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    losses = re.findall(r"^(\d) ranks: (\d+\.\d+)$", ran.stdout, re.M)
    assert [ranks for ranks, _ in losses] == ["1", "2"] and 4 < float(losses[0][1]) < 7
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=2e-4)
    assert "program of" in ran.stdout and "gather layers[7] -> slot" in ran.stdout
