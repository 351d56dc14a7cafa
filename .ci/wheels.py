"""Packages as a folder of wheels, for a machine without a network whose own site-packages must stay as they are.

    python .ci/wheels.py DIR [--python 3.12]      # where there is a network: what a GPU machine with torch lacks

for wheel in folder:
    it is NCCL's: unpacked into a folder of its own     # beside torch's, which is older
    this machine has the package: its own is used       # a folder may hold torch; the machine's is the one with CUDA
    wheel is for another Python or system: passed over
    else: unpacked into `into`                          # a wheel is a zip of what site-packages would hold
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
LACKING = ("optree", "tyro", "docstring_parser", "typeguard")
"""What the library and the bench need beyond torch, numpy, einops, jaxtyping, rich and pytest."""
NCCL, NCCL_WHEEL = "nvidia-nccl-", "nvidia-nccl-cu13==2.30.7"
"""torch 2.11 brings 2.28, which refuses two ranks on a GPU; 2.30.3 and later take them."""
PLATFORMS = [f"manylinux{which}_x86_64" for which in ("_2_28", "_2_27", "_2_18", "_2_17", "2014")]


class Unusable(RuntimeError):
    """The folder is not one that packages can be taken from."""


def unpack(folder: Path, into: Path) -> dict[str, str]:
    """Unpacks what this machine lacks; package -> version, or why it was not taken.

    Raises Unusable for a folder without wheels, two wheels of one package that would do both, and a package of which no
    wheel is for this Python.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise Unusable(f"{folder}: there is no wheel in it")
    supported, usable, others = set(sys_tags()), dict[str, Path](), dict[str, Path]()
    found: dict[str, str] = {}
    own = {canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions() if each.metadata}
    for wheel in wheels:
        try:
            name, version, _, tags = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename as error:
            raise Unusable(f"{folder}: {error}") from None
        if name in own and not name.startswith(NCCL):
            found[name] = f"this machine's own {own[name]}"
        elif tags.isdisjoint(supported):
            others[name] = wheel
        elif name in usable:
            raise Unusable(f"{folder}: both {usable[name].name} and {wheel.name}; leave one of them there")
        else:
            usable[name], found[name] = wheel, str(version)
    if useless := [wheel.name for name, wheel in others.items() if name not in usable]:
        raise Unusable(f"{folder}: not for this Python and system: {', '.join(useless)}")
    for name, wheel in usable.items():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into / name if name.startswith(NCCL) else into)
    return found


# ---- making the folder


def make(folder: Path, python: str) -> None:
    """Downloads into `folder` what a machine with a GPU, torch and `python` lacks; NCCL with code of Hopper alone."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        pip += ["--platform", platform]
    constrained = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--dest", str(folder), *constrained, *LACKING], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "--dest", scratch, NCCL_WHEEL], check=True)
        (whole,) = Path(scratch).glob("*.whl")
        slim = slimmed(whole, folder)
        print(f"{slim.name}: {slim.stat().st_size >> 20} MiB of {whole.stat().st_size >> 20}")
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder} is {total >> 20} MiB: make gpu-check WHEELS={folder}")


LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
FATBIN, ELF, SM_90 = 0xBA55ED50, 2, 90
# A fatbin of several GPUs' code: magic, version, bytes of the header, bytes of the entries; then entries, each of a
# kind, bytes of its own header and of its payload, and at byte 28 the architecture.
FATBIN_HEADER, ENTRY_HEADER, ARCHITECTURE_AT = "<IHHQ", "<HHIQ", 28


def slimmed(wheel: Path, folder: Path) -> Path:
    """Writes a wheel of NCCL with the machine code of Hopper alone into `folder`: 216 MB become 14.

    Payloads for other GPUs, and those that only a linker reads, become zeros, which compress; every header stays.
    """
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(LIBRARY, scratch))
        data = bytearray(path.read_bytes())
        places = _sections(path)
        _clear(data, *places["__nv_relfatbin"], keep=None)
        _clear(data, *places[".nv_fatbin"], keep=SM_90)
        path.write_bytes(data)
        subprocess.run(["strip", "-g", path], check=True)
        out = folder / wheel.name
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as slim:
            slim.write(path, LIBRARY)
            for name in archive.namelist():
                if name.endswith(("dist-info/METADATA", "dist-info/WHEEL")):
                    slim.writestr(name, archive.read(name))
    return out


def _sections(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each section of a library."""
    found = {}
    said = subprocess.run(["readelf", "--section-headers", "--wide", path], capture_output=True, text=True, check=True)
    for line in said.stdout.splitlines():
        words = line.replace("[ ", "[").split()
        if len(words) > 6 and words[0].startswith("[") and words[0] != "[Nr]":
            found[words[1]] = int(words[4], 16), int(words[5], 16)
    return found


def _clear(data: bytearray, start: int, size: int, keep: int | None) -> None:
    """Overwrites the payloads of the fatbins there with zeros, but for machine code of the architecture `keep`."""
    at, end = start, start + size
    while at < end:
        magic, _, header, entries = struct.unpack_from(FATBIN_HEADER, data, at)
        if magic != FATBIN:  # between two of them
            at += 8
            continue
        entry, at = at + header, at + header + entries
        while entry < at:
            kind, _, own_header, payload = struct.unpack_from(ENTRY_HEADER, data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            begin = entry + own_header
            if kind != ELF or architecture != keep:
                data[begin : begin + payload] = bytes(payload)
            entry = begin + payload


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="wheels.py")
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--python", default="3.12", help="the Python of the machine with the GPU")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder, options.python)
