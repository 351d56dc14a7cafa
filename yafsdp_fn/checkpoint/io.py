"""`save` and `load`: a sharded state to a folder and back, on any number of ranks each time.

    folder = save("checkpoints", state, {"position": 1024})
    state, extra = load("checkpoints", state_like)              # state_like: init(...) of the same params and tx

Every rank calls both. The tensors go through torch.distributed.checkpoint (see `box`), everything else into the
manifest, which rank 0 writes and all ranks read. `saver` does the same beside the next steps.
"""

import dataclasses
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from yafsdp_fn import strict_json
from yafsdp_fn.checkpoint import content, folder, manifest, reader, sums
from yafsdp_fn.checkpoint.agree import AllRanks
from yafsdp_fn.checkpoint.box import parts
from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.checkpoint.manifest import Manifest
from yafsdp_fn.comm.micro_shards import circumstances
from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.schedules.buffers import Buffer
from yafsdp_fn.schedules.ops import Update
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.stages.cut import cut
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.state import ShardedState

Directory = str | os.PathLike[str]


class Job(NamedTuple):
    """What is to be written, and where. tensors: Boxes and tensors, by key, not written to until it is done; cut: which
    parts of them ranks have, in words"""

    root: Path
    tensors: dict[str, Tensor]
    manifest: Manifest
    keep_last: int | None
    keep_every: int | None
    cut: str

    def write(self, ranks: AllRanks) -> Path:
        """On every rank, to the same end: the folder, or CheckpointError."""
        root, step = self.root, self.manifest.step
        what = f"saving step {step} in {root}"
        target = ranks.first(lambda: folder.prepare(root, step), what)
        writer = FileSystemWriter(target, overwrite=False)
        ranks.through_dcp(lambda: dcp_save(self.tensors, storage_writer=writer, process_group=ranks.group), what)
        ranks.first(lambda: manifest.write(target, self.manifest), what)
        sums.write(target, ranks)
        return ranks.first(lambda: folder.publish(root, step, self.keep_last, self.keep_every), what)


def save(
    directory: Directory,
    state: ShardedState,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Writes `state` and `extra` into `directory`, a folder per step, and returns that folder.

    extra: anything JSON can hold, such as the position in the data; the same on all ranks
    keep_last: how many of the newest checkpoints stay; None: all
    keep_every: checkpoints of steps that it divides stay besides

    Complete or absent: a run killed while it saves leaves the checkpoints before it as they were. The state stays
    usable. Raises CheckpointError on every rank where one of them fails.
    """
    job = prepare(directory, state, extra, keep_last, keep_every)
    with state.memory.using(reads(state)):
        return job.write(AllRanks())


def prepare(
    directory: Directory,
    state: ShardedState,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_every: int | None,
) -> Job:
    """What `save` will write; its tensors are the state's own."""
    state = state.check()
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected a positive number, or None")
    try:
        text = json.dumps(dict(extra or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra: expected what JSON can hold: {error}") from error
    state.memory.comms.must_agree("what to save", {"step": str(state.step), "extra": text})
    tensors, described = _contents(state, params_only=False)
    program = None if state.program is None else state.program.to_json()
    comms = state.memory.comms
    here = circumstances(comms.device) if comms.deterministic else {}
    facts = Manifest(state.step, state.seed, state.mesh.size(), here, described, program, json.loads(text))
    return Job(Path(directory), tensors, facts, keep_last, keep_every, cut_of(state))


def cut_of(state: ShardedState) -> str:
    """Equal where each rank has the same part of a state."""
    return repr((state.memory.mesh_axes, state.memory.assignment))


def reads(state: ShardedState) -> list[Buffer]:
    """The buffers that a save reads."""
    return [(buffer, unit.id) for buffer in ("shard", "optimizer") for unit in state.memory.units]


def load(directory: Directory, like: ShardedState, *, step: int | None = None) -> tuple[ShardedState, dict[str, Any]]:
    """`(state, extra)` from the newest checkpoint in `directory` that is as it was written, or that of `step`.

    like: a state with the same parameters and optimizer, on this mesh, of any values; it is donated: its memory
        becomes the new state's. Dtypes, names and shapes must be those saved; the number of ranks need not.

    The state's `program` is that of the step that made it, where it fits `like`, else None: `train_step(loss, tx,
    schedule=state.program or schedule)` goes on with it, and so to the same bits.

    Every file is read once more than needed, to compare its digest. A checkpoint that is damaged is passed over, with
    a warning that names it; that of a given `step` is not. Nothing in a checkpoint is run.

    Raises CheckpointError where there is no checkpoint, or none that is whole, or it is of another state.
    """
    return _load(directory, like, step, params_only=False)


def load_params(directory: Directory, like: ShardedState, *, step: int | None = None) -> ShardedState:
    """`load` of the parameters and the step alone, for inference: `like` keeps its own optimizer state."""
    return _load(directory, like, step, params_only=True)[0]


def _load(
    directory: Directory, like: ShardedState, step: int | None, *, params_only: bool
) -> tuple[ShardedState, dict[str, Any]]:
    like, ranks = like.check(), AllRanks()
    source = _whole(directory, step, ranks)
    facts = ranks.first(lambda: manifest.read(source), f"reading {source}")
    tensors = wanted(like, facts, str(source), params_only=params_only)
    # what could be wrong is found before `like` is touched
    stored = ranks.each(lambda: _stored(source, tensors), f"reading {source}")[ranks.rank]
    return adopted(like, facts, lambda: _fill(tensors, stored), ranks, str(source)), facts.extra


def wanted(like: ShardedState, facts: Manifest, where: str, *, params_only: bool = False) -> dict[str, Tensor]:
    """The tensors of `like` that are to be filled. Raises CheckpointError where others were saved."""
    tensors, described = _contents(like, params_only=params_only)
    saved = {key: value for key, value in facts.tensors.items() if not params_only or key in described}
    content.check(saved, described, where)
    return tensors


def adopted(like: ShardedState, facts: Manifest, fill: Callable[[], None], ranks: AllRanks, where: str) -> ShardedState:
    """The state that was saved, over the memory of `like`, which `fill` writes to."""
    program, memory = _program(facts.program, where), like.memory
    _warn_of_other_circumstances(facts.circumstances, memory.comms, where)
    try:
        with memory.using(*Update(tuple(unit.id for unit in memory.units)).uses()):
            memory.begin_write()  # also for a failure: `like` is partly overwritten
            ranks.each(fill, f"reading {where}")
            memory.refresh(sorted(memory.held))
    finally:
        memory.end_write()
    if program is not None and not _fits(program, memory):
        program = None
    state = dataclasses.replace(like, step=facts.step, seed=facts.seed, program=program)
    return state.over(memory, like.opt_state)


def _warn_of_other_circumstances(saved: Mapping[str, str], comms: Ranks, where: str) -> None:
    if not comms.deterministic or not saved:
        return
    here = circumstances(comms.device)
    there = {name: saved.get(name) for name in here if saved.get(name) != here[name]}
    if there:
        now = {name: here[name] for name in there}
        text = f"{where} was saved with {there}, here it is {now}: bits will not be those of the unbroken run"
        warnings.warn(text, stacklevel=5)


def _whole(directory: Directory, step: int | None, ranks: AllRanks) -> Path:
    """The folder to load: its files are as they were written."""
    found = ranks.first(lambda: folder.candidates(directory, step), f"looking for a checkpoint in {directory}")
    faults: list[str] = []
    for source in found:
        try:
            sums.verify(source, ranks)
        except sums.Damaged as error:
            if len(found) == 1:
                raise
            faults.append(str(error))
            continue
        for fault in faults:
            warnings.warn(f"{fault}: passed over for {source.name}", stacklevel=4)
        return source
    raise sums.Damaged(f"{directory}: none of {len(found)} checkpoints is whole: {'; '.join(faults)}")


def _stored(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, reader.Stored]:
    """Where each of `tensors` lies in `source`."""
    found = reader.scan(source)
    for key, tensor in tensors.items():
        want = tensor.dtype, tuple(tensor.shape)
        have = (found[key].dtype, found[key].shape) if key in found else None
        if have != want:
            raise CheckpointError(f"{source / reader.INDEX}: {key} is {have}, expected {want}")
    return found


def _fill(tensors: Mapping[str, Tensor], stored: Mapping[str, reader.Stored]) -> None:
    for key, tensor in tensors.items():
        for offsets, target in parts(tensor).items():
            stored[key].read_into(target.detach(), offsets)


def _program(text: str | None, where: str) -> Program | Pipeline | None:
    try:
        if text is None:
            return None
        data = strict_json.loads(text)
        staged = isinstance(data, dict) and "stages" in data
        return Pipeline.from_json(text) if staged else Program.from_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: its program: {error}") from error


def _fits(program: Program | Pipeline, memory: Memory) -> bool:
    """Whether it is of a state like that of `memory`, cut alike."""
    trace = program.trace
    if (trace.units, trace.mesh) != (memory.abstract().units, memory.mesh_axes):
        return False
    if not isinstance(program, Pipeline) or memory.assignment is None:
        return memory.comms.stages == 1
    try:
        return cut(trace._replace(split=None), memory.assignment).split == trace.split
    except ValueError:
        return False


def _contents(state: ShardedState, *, params_only: bool) -> tuple[dict[str, Tensor], dict[str, content.Description]]:
    more = {} if params_only else {"opt_state": state.opt_state}
    return content.tensors(OrderedDict(params=state.params) | more)  # leaves of a dict would be sorted by key
