"""`PeerMemory`: copies of a state in the memory of the hosts, each rank's also on another host, for a fast restart.

    with PeerMemory("/dev/shm/NAME") as memory:
        state, extra = memory.load(like) or checkpoint.load("checkpoints", like)
        for ...:
            memory.save(state, {"position": position})      # every few steps; the step waits for a copy

`/dev/shm` is a file system in memory, so its files outlive the processes. A rank writes its own part and sends it to
the next rank on another host, which writes it too: a replaced host finds its parts there. On a single host each part
exists once, which survives processes, not the host. A host's memory holds the parts of its ranks twice, own and
others', and twice that while the next save is under way.

The idea is that of Gemini (Wang et al., SOSP 2023): recovery from peers' memory, 13 times as fast as from remote
storage.
"""

import ctypes
import hashlib
import mmap
import os
import re
import socket
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.checkpoint import io
from yafsdp_fn.checkpoint.content import Manifest, from_json, held, to_json
from yafsdp_fn.checkpoint.folder import AllRanks, CheckpointError
from yafsdp_fn.checkpoint.saver import Saver
from yafsdp_fn.dist.store import new_group
from yafsdp_fn.runtime.state import ShardedState
from yafsdp_fn.util.disk import made, opened, private_folder, remove, room
from yafsdp_fn.util.torch_private import default_group, timeout_of

_NAME = re.compile(r"step-(\d{8,18})\.part-(\d{1,9})-of-(\d{1,9})")


class Part(NamedTuple):
    """One rank's part of a step: `rank` of `ranks`."""

    step: int
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.part-{self.rank}-of-{self.ranks}"


class PeerMemory(Saver):
    """Saves into `folder` in the memory of each host, one save at a time. Every rank makes it, saves and loads
    alike.

    >>> peers = ya.checkpoint.PeerMemory(folder)               # /dev/shm/..., of each host
    >>> peers.save(state, {"position": 17})
    >>> state, extra = peers.load(like=ya.init(params, tx, mesh=mesh, seed=1))
    >>> extra
    {'position': 17}
    """

    def __init__(self, folder: io.Directory) -> None:
        super().__init__(folder)
        timeout = timeout_of(default_group(), torch.device("cpu"))
        self._group = new_group(None, timeout, "gloo", "copies")
        self._root, ranks = Path(folder), AllRanks(self._group)

        def host() -> tuple[str, str]:
            private_folder(self._root)
            return socket.gethostname(), str(self._root.resolve())

        hosts, count = ranks.each(host, f"making {folder}"), ranks.count
        apart = [sum(hosts[r] != hosts[(r + by) % count] for r in range(count)) for by in range(count)]
        self._by = apart.index(max(apart))  # distance to a rank on another host, for as many ranks as possible

    def load(self, like: ShardedState) -> tuple[ShardedState, dict[str, Any]] | None:
        """Returns `(state, extra)` of the newest step whose parts are all undamaged on some host, or None.

        like: as for `checkpoint.load` with `donate=True`. The mesh and its stages must be those that saved; copies of
            others are not found
        """
        self.wait()
        like, ranks = like.check(), AllRanks(self._group)
        where = f"the copies in {self._root}"
        held = ranks.each(lambda: self._whole(ranks, io.cut_of(like)), f"looking at {where}")
        steps = {part.step for parts in held for part in parts}
        found = [step for step in steps if all(_holder(part, held) is not None for part in _all(step, ranks.count))]
        if not found:
            return None
        own = Part(max(found), ranks.rank, ranks.count)
        path = self._root / own.name
        holders = {part: _holder(part, held) for part in _all(own.step, ranks.count)}
        moves = [(part, who, part.rank) for part, who in holders.items() if who is not None and who != part.rank]
        self._send(ranks, moves, {part: held[who][part] for part, who, _ in moves}, f"sending {where}")
        facts, _, at = ranks.each(lambda: _facts(path), f"reading {where}")[ranks.rank]
        tensors, _ = io.wanted(like, facts, str(path))
        return io.adopted(like, facts, lambda: _fill(tensors, path, at), ranks, str(path)), facts.extra

    def _meet(self, mesh: DeviceMesh) -> None:
        """Does nothing: all ranks are in the group, since any on another host may keep a part."""

    def _store(self, job: io.Job, ranks: AllRanks) -> Path:
        own = Part(job.manifest.step, ranks.rank, ranks.count)
        parts = _all(own.step, ranks.count)
        what = f"keeping step {own.step} in {self._root}"
        sizes = dict(zip(parts, ranks.each(lambda: _write(self._root / own.name, job), what), strict=True))
        if self._by:
            self._send(ranks, [(part, part.rank, (part.rank + self._by) % ranks.count) for part in parts], sizes, what)

        def drop() -> None:  # all of the new step is there: earlier ones may go
            for part, path in _parts(self._root):
                if part.ranks != own.ranks or (part.rank in self._mine(ranks) and part.step != own.step):
                    remove(path)

        ranks.each(drop, what)
        return self._root / own.name

    def _mine(self, ranks: AllRanks) -> tuple[int, int]:
        """Returns the ranks whose parts this one keeps: itself, and the rank before."""
        return ranks.rank, (ranks.rank - self._by) % ranks.count

    def _whole(self, ranks: AllRanks, cut: str) -> dict[Part, int]:
        """Returns this rank's undamaged files of a state that was cut like this, with their bytes."""
        mine = [
            found
            for found in _parts(self._root)
            if found[0].ranks == ranks.count and found[0].rank in self._mine(ranks)
        ]
        sizes = {part: _size_if_whole(part, path, cut) for part, path in mine}
        return {part: size for part, size in sizes.items() if size}

    def _send(
        self, ranks: AllRanks, moves: Sequence[tuple[Part, int, int]], sizes: Mapping[Part, int], what: str
    ) -> None:
        """Copies parts, each `(part, from this rank, to this one)`, into the folders of others."""
        here = [part for part, _, to in moves if to == ranks.rank]
        room: dict[Part, Tensor] = {}

        def make() -> None:
            for part in here:
                room[part] = _room(self._aside(part), sizes[part])

        ranks.each(make, what)  # a host without room raises before anybody sends

        def move() -> None:
            under_way: list[tuple[Tensor, Any]] = []
            for part, source, to in moves:
                if source == ranks.rank:
                    data = _mapped(self._root / part.name)
                    under_way.append((data, dist.isend(data, to, group=ranks.group)))
            for part, source, to in moves:
                if to == ranks.rank:
                    dist.recv(room[part], source, group=ranks.group)
                    _publish(self._aside(part), self._root / part.name)
            for _, work in under_way:  # keeps `data` alive until it is sent
                work.wait()

        ranks.each(move, what)

    def _aside(self, part: Part) -> Path:
        return self._root / f"{part.name}.partial"


def _all(step: int, count: int) -> list[Part]:
    return [Part(step, rank, count) for rank in range(count)]


def _holder(part: Part, held: Sequence[Mapping[Part, int]]) -> int | None:
    """Returns the rank that provides a part: its own rank if that has it."""
    if part in held[part.rank]:
        return part.rank
    return next((rank for rank, parts in enumerate(held) if part in parts), None)


def _parts(root: Path) -> list[tuple[Part, Path]]:
    found = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return [(Part(*map(int, match.groups())), path) for match, path in found if match]


# A part's file: 8 bytes, the length of the manifest; the manifest; the same of the cut; the bytes of its tensors;
# the digest of all that.


def _write(path: Path, job: io.Job) -> int:
    """Writes a part, and returns its bytes."""
    texts = (to_json(job.manifest).encode(), job.cut.encode())
    heads = [part for text in texts for part in (len(text).to_bytes(8, "little"), text)]
    partial = path.with_name(f"{path.name}.partial")
    digest = hashlib.sha256()
    with made(partial) as stream:
        for data in (*heads, *map(_data, job.tensors.values())):
            stream.write(data)
            digest.update(data)
        stream.write(digest.digest())
        size = stream.tell()
    _publish(partial, path)
    return size


def _publish(partial: Path, path: Path) -> None:
    if path.is_dir():
        remove(path)
    partial.rename(path)


def _facts(path: Path) -> tuple[Manifest, str, int]:
    """Returns the manifest, how the state was cut, and the offset of the tensors."""
    with opened(path) as stream:
        text, cut = (_text(stream, path) for _ in range(2))
        return from_json(text, str(path)), cut, stream.tell()


def _text(stream: BufferedReader, path: Path) -> str:
    size = int.from_bytes(stream.read(8), "little")
    if size > os.fstat(stream.fileno()).st_size:
        raise CheckpointError(f"{path}: it ends inside of what it says of itself")
    return stream.read(size).decode()


def _fill(tensors: Mapping[str, Tensor], path: Path, at: int) -> None:
    with opened(path) as stream:
        stream.seek(at)
        for key, tensor in tensors.items():
            target = held(tensor)
            data = bytearray(target.numel() * target.element_size())
            if stream.readinto(data) != len(data):
                raise CheckpointError(f"{path}: it ends inside of {key}")
            if data:
                target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))


def _size_if_whole(part: Part, path: Path, cut: str) -> int:
    """Returns a file's bytes, or 0 unless it is an undamaged copy of this part of a state cut like this."""
    digest = hashlib.sha256()
    try:
        with opened(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size = len(data)
            end = max(0, size - digest.digest_size)
            with memoryview(data) as view, view[:end] as content:
                digest.update(content)
            whole = data[end:] == digest.digest()
        facts, was_cut, _ = _facts(path)
    except (OSError, ValueError, CheckpointError):
        return 0
    return size if whole and (facts.step, was_cut) == (part.step, cut) else 0


def _mapped(path: Path) -> Tensor:
    """Maps the bytes of a file, which are read on access."""
    with opened(path) as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _room(path: Path, size: int) -> Tensor:
    """Returns the mapped memory of a new file."""
    with made(path) as stream:
        return torch.frombuffer(room(stream, size), dtype=torch.uint8)


def _data(tensor: Tensor) -> Any:
    """Returns the bytes of a tensor on the host, not copied."""
    flat = held(tensor).detach().contiguous().view(-1)
    kind = ctypes.c_char * (flat.numel() * flat.element_size())
    return kind.from_address(flat.data_ptr()) if flat.numel() else b""
