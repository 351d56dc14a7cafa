"""Packages out of a folder of wheels, for a machine without a network whose own site-packages must stay as they are.

for wheel in folder:
    it is NCCL's: unpacked into a folder of its own     # beside torch's, which is older; two fit, one for each CUDA
    this machine has the package: its own is used       # a folder may hold torch; the machine's is the one with CUDA
    wheel is for another Python or system: passed over
    else: unpacked into `into`                          # a wheel is a zip of what site-packages would hold
"""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

NCCL = "nvidia-nccl-"


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
