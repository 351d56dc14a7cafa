"""The block that all contenders call: `models.llama`'s own, compiled once for everybody or not at all.

Shapes are static: a second sequence length compiles again, where torch would otherwise go over to symbolic sizes,
whose kernels are slower. Embedding and head run as they are, for everybody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from models import llama
from train.bench import contenders


@functools.cache
def block(config: llama.Config, compiled: bool) -> Callable[..., tuple[Tensor, None]]:
    """`llama.block`; the same object for every caller, so that nobody compiles what another has."""
    found: Callable[..., Any] = llama.block(config)
    return contenders.compiled(found) if compiled else found
