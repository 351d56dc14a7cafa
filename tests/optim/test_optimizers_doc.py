"""What docs/optimizers.md shows runs, and trains shards as it trains plain trees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import yafsdp_fn as ya
from tests.harness.oracle import check_steps
from tests.harness.pool import on_ranks
from tests.harness.small import batches, loss, model
from tests.optim.trees import plain_state

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@on_ranks(1, 2)
def test_the_code_trains(mesh: Any) -> None:
    assert len(BLOCKS) == 5
    names = dict[str, Any]()
    for block in BLOCKS:
        exec(block, names)
        tx = names["tx"]
        state = ya.init(model(), tx, mesh=mesh, precision=ya.Precision(*[torch.float64] * 3))
        expected = plain_state(model(), tx)
        step = ya.train_step(loss, tx, schedule=ya.schedules.zero3(update=True))
        check_steps((step, state), (ya.train_step(loss, tx), expected), batches(mesh, 3), 1e-9, block)
