"""`save` and `load`: a sharded state to a folder and back, on any number of ranks each time.

    folder = save("checkpoints", state, {"position": 1024})
    state, extra = load("checkpoints", state_like)              # state_like: init(...) of the same params and tx

Every rank calls both. The tensors go through torch.distributed.checkpoint (see `box`), everything else into the
manifest, which rank 0 writes and all ranks read.
"""

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from yafsdp_fn.checkpoint import content, folder
from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.schedules.ops import Update
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.state import ShardedState

T = TypeVar("T")
Directory = str | os.PathLike[str]


def save(
    directory: Directory, state: ShardedState, extra: Mapping[str, Any] | None = None, *, keep: int | None = None
) -> Path:
    """Writes `state` and `extra` into `directory`, a folder per step, and returns that folder.

    extra: anything JSON can hold, such as the position in the data; the same on all ranks
    keep: how many of the newest checkpoints stay; None: all

    Complete or absent: a run killed while it saves leaves the checkpoints before it as they were. The state stays
    usable. Raises on every rank where one of them fails.
    """
    state, root = state.check(), Path(directory)
    state.memory.comms.must_agree("what to save", {"step": str(state.step)})
    tensors, described = _contents(state, params_only=False)
    with state.memory.using([(buffer, unit.id) for buffer in ("shard", "optimizer") for unit in state.memory.units]):
        _on_rank_0(lambda: folder.prepare(root, state.step))
        writer = FileSystemWriter(folder.partial(root, state.step), overwrite=False)
        _together(lambda: dcp_save(tensors, storage_writer=writer), f"saving step {state.step} in {root}")
    manifest = {
        "step": state.step,
        "seed": state.seed,
        "ranks": state.mesh.size(),
        "tensors": described,
        "program": None if state.program is None else state.program.to_json(),
        "extra": dict(extra or {}),
    }
    return Path(_on_rank_0(lambda: folder.commit(root, state.step, manifest, keep)))


def load(directory: Directory, like: ShardedState, *, step: int | None = None) -> tuple[ShardedState, dict[str, Any]]:
    """`(state, extra)` from the newest checkpoint in `directory`, or that of `step`.

    like: a state with the same parameters and optimizer, on this mesh, of any values; it is donated: its memory
        becomes the new state's. Dtypes, names and shapes must be those saved; the number of ranks need not.

    The state's `program` is that of the step that made it, where it fits `like`, else None: `train_step(loss, tx,
    schedule=state.program or schedule)` goes on with it, and so to the same bits.

    Raises CheckpointError where there is no checkpoint, or it is incomplete, or it is of another state.
    """
    return _load(directory, like, step, params_only=False)


def load_params(directory: Directory, like: ShardedState, *, step: int | None = None) -> ShardedState:
    """`load` of the parameters and the step alone, for inference: `like` keeps its own optimizer state."""
    return _load(directory, like, step, params_only=True)[0]


def _load(
    directory: Directory, like: ShardedState, step: int | None, *, params_only: bool
) -> tuple[ShardedState, dict[str, Any]]:
    like = like.check()
    source = Path(_on_rank_0(lambda: folder.find(directory, step)))
    manifest = _on_rank_0(lambda: folder.read_manifest(source))
    tensors, described = _contents(like, params_only=params_only)
    saved = {key: value for key, value in manifest["tensors"].items() if not params_only or key in described}
    content.check(saved, described, str(source))
    memory = like.memory
    try:
        with memory.using(*Update(tuple(unit.id for unit in memory.units)).uses()):
            memory.begin_write()  # also for a failure: `like` is partly overwritten
            _together(lambda: dcp_load(tensors, storage_reader=FileSystemReader(source)), f"reading {source}")
            memory.refresh(list(memory.of_unit))
    finally:
        memory.end_write()
    text = manifest.get("program")
    program = None if text is None else Program.from_json(text)
    if program is not None and (program.trace.units, program.trace.mesh) != (memory.units, memory.mesh_axes):
        program = None
    state = dataclasses.replace(like, step=manifest["step"], seed=manifest["seed"], program=program)
    return state.over(memory, like.opt_state), manifest["extra"]


def _contents(state: ShardedState, *, params_only: bool) -> tuple[dict[str, Tensor], dict[str, content.Description]]:
    more = {} if params_only else {"opt_state": state.opt_state}
    return content.tensors(OrderedDict(params=state.params) | more)  # leaves of a dict would be sorted by key


def _together(work: Callable[[], Any], what: str) -> None:
    """Runs a collective of torch.distributed.checkpoint; its failure on any rank raises on all, with the cause."""
    try:
        with torch.no_grad():
            work()
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
        raise CheckpointError(f"{what} failed: {causes}") from error


def _on_rank_0(work: Callable[[], T]) -> T:
    """`work()` of rank 0, on every rank: one of them looks at the disk, so that all of them see the same."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (CheckpointError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
