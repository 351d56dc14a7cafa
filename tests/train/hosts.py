"""Two hosts on this machine: network namespaces with a name each and one cable between them. For root on Linux."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Their names, which are those of their namespaces. Raises OSError or SubprocessError where there may be none."""
    mark = os.getpid()
    names = f"host-a-{mark}", f"host-b-{mark}"
    cable = [f"va{mark}", f"vb{mark}"]
    known = [Path("/etc/netns") / name for name in names]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for at, (name, end, folder) in enumerate(zip(names, cable, known, strict=True), 1):
            run("ip", "link", "set", end, "netns", name, "name", INTERFACE)
            run("ip", "-n", name, "addr", "add", f"10.213.7.{at}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                run("ip", "-n", name, "link", "set", device, "up")
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"10.213.7.{k} {other}" for k, other in enumerate(names, 1))]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            (folder / "nsswitch.conf").write_text("hosts: files\n")  # torch asks for names of addresses, and waits
        yield names
    finally:
        for name, folder in zip(names, known, strict=True):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                run("ip", "netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)


def on(host: str) -> str:
    """A shell's words before a command that is to run there."""
    return f"ip netns exec {host} unshare --uts sh -c 'hostname {host}; exec \"$@\"' sh"
