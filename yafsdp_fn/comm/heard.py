"""What the ranks of a mesh have said of themselves in the store, and who has fallen silent: read where one waits."""

import json
import time
from typing import Any

from yafsdp_fn.comm.places import Post, table

SILENCE_BEATS, SILENCE_S = 4, 0.8
"""How long a rank says nothing before it is silent: beats, but at least seconds, since busy machines are late."""

READS = 64
"""Ranks that are read in a beat: where there are more, a rank that waits reads less often."""

ENDS = -1
"""The beat of a rank that has ended and said so."""


class Heard:
    """By one rank, from when it began to listen. store: with a post at `rank 3`, and programs by fingerprint

    posts, silent: by rank; what it has said last, and for how many seconds nothing
    """

    def __init__(self, store: Any, world: int, beat: float) -> None:
        self._store, self._world = store, world
        self._period = beat * max(1.0, world / READS)
        self._patience = max(SILENCE_S, SILENCE_BEATS * beat, 1.5 * self._period)
        self._since, self._read_at = time.monotonic(), 0.0
        self._seen: dict[int, tuple[Post, float]] = {}
        self._programs: dict[str, list[str]] = {}
        self.posts: dict[int, Post] = {}
        self.silent: dict[int, float] = {}

    def read(self, now_or_never: bool) -> str:
        """The table; "" before it is known, or where it is as before. Raises RuntimeError of the store."""
        now = time.monotonic()
        if now - self._read_at < 0.9 * self._period and not now_or_never:
            return ""
        self._read_at = now
        for rank in range(self._world):
            if (text := self._get(f"rank {rank}")) is not None:
                post = Post(*json.loads(text))
                if rank not in self._seen or self._seen[rank][0].beat != post.beat:
                    self._seen[rank] = post, now
        nothing = Post(0, "has said nothing yet", now - self._since)
        self.posts = {rank: self._seen[rank][0] if rank in self._seen else nothing for rank in range(self._world)}
        for program in {post.program for post in self.posts.values()} - {"", *self._programs}:
            if (text := self._get(program)) is not None:
                self._programs[program] = json.loads(text)
        ages = {rank: now - at for rank, (post, at) in self._seen.items() if post.beat != ENDS}
        self.silent = {rank: age for rank, age in ages.items() if age > self._patience}
        if not now_or_never and now - self._since <= self._patience:
            return ""  # who is silent is not known yet
        return table(self.posts, self.silent, self._programs)

    def _get(self, key: str) -> bytes | None:
        """A store waits for keys that are not there."""
        found: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return found
