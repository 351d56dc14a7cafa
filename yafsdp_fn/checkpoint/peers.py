"""`PeerMemory`: copies of a state in the memory of the hosts, each rank's also on another host, for a fast restart.

    with PeerMemory("/dev/shm/NAME") as memory:
        state, extra = memory.load(like) or checkpoint.load("checkpoints", like)
        for ...:
            memory.save(state, {"position": position})      # every few steps; the step waits for a copy

`/dev/shm` is a file system in memory, so that what lies there outlives the processes. A rank writes its own part and
sends it to the rank after it that is on another host, which writes it, too: a host that is replaced finds its parts
there. On a single host each part is there once: that survives processes, not the host. A host's memory takes the parts
of its ranks two times, own and others', and twice that while the next save is on its way.

Gemini (Wang et al., SOSP 2023) is the idea: recovery from peers' memory, 13 times as fast as from remote storage.
"""

import ctypes
import hashlib
import mmap
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.checkpoint import io, manifest
from yafsdp_fn.checkpoint.agree import AllRanks
from yafsdp_fn.checkpoint.box import held
from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.checkpoint.manifest import Manifest
from yafsdp_fn.checkpoint.saver import Saver
from yafsdp_fn.state import ShardedState

_NAME = re.compile(r"step-(\d{8,18})\.part-(\d{1,9})-of-(\d{1,9})")


class Part(NamedTuple):
    """What one rank holds of a step: `rank` of `ranks`."""

    step: int
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.part-{self.rank}-of-{self.ranks}"


class PeerMemory(Saver):
    """Saves into `folder` of each host, in its memory, one at a time. Every rank makes it, saves and loads alike."""

    def __init__(self, folder: io.Directory) -> None:
        super().__init__(folder)
        self._root, ranks = Path(folder), AllRanks(self._group)

        def host() -> tuple[str, str]:
            self._root.mkdir(parents=True, exist_ok=True)
            return socket.gethostname(), str(self._root.resolve())

        hosts, count, rank = ranks.each(host, f"making {folder}"), ranks.count, ranks.rank
        apart = [sum(hosts[r] != hosts[(r + by) % count] for r in range(count)) for by in range(count)]
        by = apart.index(max(apart))  # to the nearest rank that is on another host, for as many as can be
        self._to, self._from = (rank + by) % count, (rank - by) % count

    def load(self, like: ShardedState) -> tuple[ShardedState, dict[str, Any]] | None:
        """`(state, extra)` of the newest step of which every rank's part is whole on some host, or None.

        like: as for `checkpoint.load`. The mesh and its stages must be those that saved; of others nothing is found.
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

        def fetch() -> None:
            for part in _all(own.step, ranks.count):
                holder = _holder(part, held)
                assert holder is not None
                if holder != part.rank == ranks.rank:
                    _receive(path, holder, ranks)
                elif holder == ranks.rank != part.rank:
                    _wait(_send(self._root / part.name, part.rank, ranks))

        ranks.each(fetch, f"sending {where}")
        facts, _, at = ranks.each(lambda: _facts(path), f"reading {where}")[ranks.rank]
        tensors = io.wanted(like, facts, str(path))
        return io.adopted(like, facts, lambda: _fill(tensors, path, at), ranks, str(path)), facts.extra

    def _store(self, job: io.Job, ranks: AllRanks) -> Path:
        own = Part(job.manifest.step, ranks.rank, ranks.count)
        theirs = own._replace(rank=self._from)
        what = f"keeping step {own.step} in {self._root}"
        ranks.each(lambda: _write(self._root / own.name, job), what)
        if self._to != ranks.rank:
            ranks.each(lambda: self._exchange(own, theirs, ranks), what)
        for part, path in _parts(self._root):  # all of the new step is there: earlier ones may go
            if part.ranks != own.ranks or (part.rank in (own.rank, theirs.rank) and part.step != own.step):
                path.unlink(missing_ok=True)
        return self._root / own.name

    def _whole(self, ranks: AllRanks, cut: str) -> set[Part]:
        """What this rank has written here, as it was written, of a state that was cut like this."""
        mine = (ranks.rank, self._from)
        return {
            part
            for part, path in _parts(self._root)
            if part.ranks == ranks.count and part.rank in mine and _is_whole(path) and _facts(path)[1] == cut
        }

    def _exchange(self, own: Part, theirs: Part, ranks: AllRanks) -> None:
        """Sends the own part on, and writes that of the rank before."""
        sent = _send(self._root / own.name, self._to, ranks)
        _receive(self._root / theirs.name, self._from, ranks)
        _wait(sent)


def _all(step: int, count: int) -> list[Part]:
    return [Part(step, rank, count) for rank in range(count)]


def _holder(part: Part, held: Sequence[set[Part]]) -> int | None:
    """The rank that is to give it: the one whose it is, where it has it."""
    if part in held[part.rank]:
        return part.rank
    return next((rank for rank, parts in enumerate(held) if part in parts), None)


def _parts(root: Path) -> list[tuple[Part, Path]]:
    found = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return [(Part(*map(int, match.groups())), path) for match, path in found if match]


# A part's file: 8 bytes, the length of the manifest; the manifest; the same of the cut; the bytes of its tensors;
# the digest of all that.


def _write(path: Path, job: io.Job) -> None:
    texts = (manifest.to_json(job.manifest).encode(), job.cut.encode())
    heads = [part for text in texts for part in (len(text).to_bytes(8, "little"), text)]
    partial = path.with_name(f"{path.name}.partial")
    digest = hashlib.sha256()
    with partial.open("wb") as stream:
        for data in (*heads, *map(_data, job.tensors.values())):
            stream.write(data)
            digest.update(data)
        stream.write(digest.digest())
    partial.rename(path)


def _facts(path: Path) -> tuple[Manifest, str, int]:
    """The manifest, how the state was cut, and where the tensors begin."""
    with path.open("rb") as stream:
        text, cut = (stream.read(int.from_bytes(stream.read(8), "little")).decode() for _ in range(2))
        return manifest.from_json(text, str(path)), cut, stream.tell()


def _fill(tensors: Mapping[str, Tensor], path: Path, at: int) -> None:
    with path.open("rb") as stream:
        stream.seek(at)
        for key, tensor in tensors.items():
            target = held(tensor)
            data = bytearray(target.numel() * target.element_size())
            if stream.readinto(data) != len(data):
                raise CheckpointError(f"{path}: it ends inside of {key}")
            if data:
                target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))


def _is_whole(path: Path) -> bool:
    digest = hashlib.sha256()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = max(0, len(data) - digest.digest_size)
        with memoryview(data) as view, view[:end] as content:
            digest.update(content)
        return data[end:] == digest.digest()


def _send(path: Path, to: int, ranks: AllRanks) -> list[Any]:
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return [(tensor, dist.isend(tensor, to, group=ranks.group)) for tensor in (torch.tensor([data.numel()]), data)]


def _wait(sent: list[Any]) -> None:
    for _, work in sent:  # what is sent lives until it is
        work.wait()


def _receive(path: Path, source: int, ranks: AllRanks) -> None:
    size, partial = torch.zeros(1, dtype=torch.int64), path.with_name(f"{path.name}.partial")
    dist.recv(size, source, group=ranks.group)
    partial.unlink(missing_ok=True)
    data = torch.from_file(str(partial), shared=True, size=int(size), dtype=torch.uint8)  # no memory but the file's
    dist.recv(data, source, group=ranks.group)
    partial.rename(path)


def _data(tensor: Tensor) -> Any:
    """The bytes of a tensor on the host, not copied."""
    flat = held(tensor).detach().contiguous().view(-1)
    kind = ctypes.c_char * (flat.numel() * flat.element_size())
    return kind.from_address(flat.data_ptr()) if flat.numel() else b""
