"""The collectives of gloo ranks in two ways: by messages of the library's own, or as the backend has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.gloo import GlooGroup


@contextlib.contextmanager
def exchanging(on: bool) -> Iterator[None]:
    """With `on`, ranks exchange messages, as usual; else gloo's own collectives serve."""
    own = {name: getattr(RankGroup, name) for name in ("all_gathers", "reduce_scatters", "all_to_all")}
    with contextlib.nullcontext() if on else patch.multiple(GlooGroup, **own):
        yield
