"""`save` and `load`: a sharded state to a folder and back, on any number of ranks each time.

    folder = save("checkpoints", state, {"position": 1024})
    state, extra = load("checkpoints", state_like)              # state_like: init(...) of the same params and tx

Every rank calls both. Each rank writes its parts of the tensors into a file, rank 0 everything else into the manifest,
and all ranks read what they need. `saver` does the same beside the next steps.
"""

import dataclasses
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.checkpoint import content, folder
from yafsdp_fn.checkpoint import tensors as files
from yafsdp_fn.checkpoint.content import Content, Manifest
from yafsdp_fn.checkpoint.folder import AllRanks, CheckpointError, Directory, owned, ranks_of
from yafsdp_fn.checkpoint.tensors import CheckpointTensor, part_name
from yafsdp_fn.communication.micro_shards import circumstances
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.pipelines.cut import cut
from yafsdp_fn.program.ops import Buffer, Update
from yafsdp_fn.program.program import Program
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.state import ShardedState, must_be_sharded


class Job(NamedTuple):
    """A checkpoint to write. parts: those that this rank could write, by name, unchanged until they are written"""

    root: Path
    parts: dict[str, Tensor]
    manifest: Manifest
    keep_last: int | None
    keep_every: int | None

    def write(self, ranks: AllRanks) -> Path:
        """Writes it on every rank, with one outcome: the folder, or CheckpointError."""
        root = self.root
        step = self.manifest.step
        what = f"saving step {step} in {root}"
        with owned(root, ranks, what):
            target = ranks.first(lambda: folder.prepare(root, step), what)
            mine = self._share(ranks, what)
            ranks.each(lambda: files.write(target, ranks.rank, mine), what)
            ranks.first(lambda: content.write(target, self.manifest), what)
            folder.write(target, ranks)
            return ranks.first(lambda: folder.publish(root, step, self.keep_last, self.keep_every), what)

    def _share(self, ranks: AllRanks, what: str) -> dict[str, Tensor]:
        """Returns the parts that this rank writes: of those that several ranks have, replicas say, one of them."""
        holders: dict[str, list[int]] = {}
        for rank, names in enumerate(ranks.each(lambda: list(self.parts), what)):
            for name in names:
                holders.setdefault(name, []).append(rank)
        turns = {name: who[number % len(who)] for number, (name, who) in enumerate(holders.items())}
        return {name: part for name, part in self.parts.items() if turns[name] == ranks.rank}


def save(
    directory: Directory,
    state: ShardedState,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Writes `state` and `extra` into `directory`, a folder per step, and returns that folder.

    extra: a dict of what JSON can hold, such as the position in the data; the same on all ranks. Tuples come back as
        lists
    keep_last: how many of the newest checkpoints stay; None: all
    keep_every: checkpoints of steps that it divides stay too

    It is complete or absent: a run killed while it saves keeps its earlier checkpoints. The state stays usable. Raises
    CheckpointError on every rank if one of them fails.

    >>> ya.checkpoint.save(folder, state, {"position": 17}, keep_last=3).name
    'step-00000000'
    """
    job = prepare(directory, state, extra, keep_last, keep_every)
    with state.memory.using(reads(state)):
        return job.write(ranks_of(state.mesh))


def prepare(
    directory: Directory,
    state: ShardedState,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_every: int | None,
) -> Job:
    """Returns the job that `save` will write; its tensors are the state's own."""
    state = must_be_sharded(state, "checkpoint.save takes a folder and a ShardedState").check()
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}: expected a positive number, or None")
    kept: Any = extra or {}
    try:
        text = json.dumps(dict(kept))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"extra: expected what JSON can hold: {error}; of a tensor or an array its .tolist()"
        ) from error
    for accessor in optree.tree_accessors(kept, none_is_leaf=True):
        for key in (entry.entry for entry in accessor if issubclass(entry.type, dict)):
            if not isinstance(key, str):
                raise TypeError(f"extra: the key {key!r} would come back as text; expected keys that are strings")
    must_be_one("checkpoint.save", handles(state.params))
    comms = state.memory.comms
    comms.must_agree("what to save", {"step": str(state.step), "extra": text})
    contents = _contents(state, params_only=False)
    described = {each.key: each.description for each in contents}
    program = None if state.program is None else state.program.to_json()
    here = circumstances(comms) if comms.deterministic else {}
    facts = Manifest(state.step, int(state.seed), state.mesh.size(), here, described, program, json.loads(text))
    found: dict[str, Tensor] = {}
    for each in contents:
        for at, part in each.parts(saved=True).items():
            if part.numel():
                # an optimizer's count, say, has no buffer that the next step would wait for
                found[part_name(each.key, at)] = part.clone() if each.units is None else part
    return Job(Path(directory), found, facts, keep_last, keep_every)


def reads(state: ShardedState) -> list[Buffer]:
    """Returns the buffers that a save reads."""
    return [(buffer, unit.id) for buffer in ("shard", "optimizer") for unit in state.memory.units]


@contextmanager
def writing(memory: StateMemory) -> Iterator[None]:
    """Overwrites a state: waits for all that uses its buffers. It is another state then, also after a failure: partly
    overwritten."""
    try:
        with memory.using(*Update(tuple(unit.id for unit in memory.units)).uses()):
            memory.begin_write()
            yield
    finally:
        memory.end_write()


def load(
    directory: Directory, like: ShardedState | None = None, *, step: int | None = None, donate: bool = False
) -> tuple[ShardedState, dict[str, Any]]:
    """Returns `(state, extra)` from the newest undamaged checkpoint in `directory`, or from that of `step`.

    like: a state with the same parameters and optimizer, on this mesh, of any values; it stays as it is. Dtypes, names
        and shapes must be those saved; the number of ranks need not. Raises TypeError without it.
    donate: the memory of `like` becomes the new state's, which has no room beside it, say

    The state's `program` is that of the step that made it, if it fits `like`, else None: `train_step(loss, tx,
    schedule=state.program or schedule)` goes on with it, and so to the same bits.

    Every file is read one extra time, to compare its digest. A damaged checkpoint is skipped with a warning that names
    it, unless `step` asks for it. Nothing in a checkpoint is executed.

    Raises CheckpointError if no checkpoint is there, none is whole, or it is of another state.

    >>> _ = ya.checkpoint.save(folder, state, {"position": 17})
    >>> state, extra = ya.checkpoint.load(folder, like=ya.init(params, tx, mesh=mesh, seed=1))
    >>> extra
    {'position': 17}
    """
    return _load(directory, like, step, donate, params_only=False)


def load_params(
    directory: Directory, like: ShardedState | None = None, *, step: int | None = None, donate: bool = False
) -> ShardedState:
    """Loads parameters and step only, all of them, for inference: the optimizer state is that of `like`.

    like, donate: as for `load`

    >>> _ = ya.checkpoint.save(folder, state)
    >>> teacher = ya.checkpoint.load_params(folder, like=ya.init(params, mesh=mesh, seed=1))   # without an optimizer
    >>> torch.equal(ya.global_norm(teacher.params), ya.global_norm(state.params))
    True
    """
    return _load(directory, like, step, donate, params_only=True)[0]


def _load(
    directory: Directory, like: ShardedState | None, step: int | None, donate: bool, *, params_only: bool
) -> tuple[ShardedState, dict[str, Any]]:
    """Loads into a copy of `like`, or into `like` itself, if it is donated."""
    if not isinstance(like, ShardedState):
        raise TypeError(
            "like= is missing, or no state: a checkpoint is read into a state of this mesh, such as like=ya.init("
            "params, tx, mesh=mesh), or, for load_params, like=ya.init(params, mesh=mesh)"
        )
    like = like.check() if donate else like.copy()
    ranks = ranks_of(like.mesh)
    source = _whole(directory, step, ranks)
    where = str(source)
    reading = f"reading {source}"
    facts = content.parsed(source, ranks.first(lambda: content.read(source), reading))
    # errors are found before `like` is touched
    wanted = _contents(like, params_only=params_only)
    saved = {key: of for key, of in facts.tensors.items() if not params_only or not key.startswith("opt_state")}
    contents = content.found_in(saved, wanted, where)
    stored = ranks.each(lambda: _stored(source, contents), reading)[ranks.rank]
    memory = like.memory
    program = _program(facts.program, memory, where)
    _warn_of_other_circumstances(facts.circumstances, memory.comms, where)

    def fill() -> None:
        for each in contents:
            each.fill(lambda key, target, offsets: stored[key].read_into(target, offsets))

    with writing(memory):
        ranks.each(fill, reading)
        memory.refresh(sorted(memory.held))
    state = dataclasses.replace(like, step=facts.step, seed=facts.seed, program=program)
    return state.over(memory, like.opt_state), facts.extra


def _warn_of_other_circumstances(saved: Mapping[str, str], comms: Ranks, where: str) -> None:
    """Warns where a deterministic mesh cannot go on to the bits of the unbroken run."""
    if not comms.deterministic or not saved:
        return
    here = circumstances(comms)
    differ = [name for name in {**here, **saved} if saved.get(name) != here.get(name)]
    if differ:
        there, now = ({name: facts.get(name) for name in differ} for facts in (saved, here))
        text = f"{where} was saved with {there}, here it is {now}: bits will not be those of the unbroken run"
        warnings.warn(text, stacklevel=4)


def _whole(directory: Directory, step: int | None, ranks: AllRanks) -> Path:
    """Returns the folder to load: its files match their digests."""
    found = ranks.first(lambda: folder.candidates(directory, step), f"looking for a checkpoint in {directory}")
    faults: list[str] = []
    for source in found:
        try:
            folder.verify(source, ranks)
        except folder.Damaged as error:
            if len(found) == 1:
                raise
            faults.append(str(error))
            continue
        for fault in faults:
            warnings.warn(f"{fault}: passed over for {source.name}", stacklevel=4)
        return source
    raise folder.Damaged(f"{directory}: none of {len(found)} checkpoints is whole: {'; '.join(faults)}")


def _stored(source: Path, contents: Iterable[Content]) -> dict[str, CheckpointTensor]:
    """Finds in `source` all that `contents` are read from, whole. Of a unit without elements nothing was written."""
    found = files.scan(source)
    for each in contents:
        for key, shape in each.reads().items():
            found.setdefault(key, CheckpointTensor(key, ())).check(each.tensor.dtype, shape)
    return found


def _program(text: str | None, memory: StateMemory, where: str) -> Program | None:
    """Reads the program that was saved; None if it is of a state unlike that of `memory`, or cut otherwise."""
    if text is None:
        return None
    try:
        program = Program.from_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: its program: {error}") from error
    trace = program.trace
    split = None
    if (trace.units, trace.mesh) != (memory.abstract().units, memory.mesh_axes):
        return None
    if trace.split is not None and memory.assignment is not None:
        with suppress(ValueError):  # it cannot be cut so
            split = cut(trace._replace(split=None), memory.assignment).split
    if split != trace.split or (split is None and memory.comms.stages > 1):
        return None
    return program


def _contents(state: ShardedState, *, params_only: bool) -> list[Content]:
    more = {} if params_only else {"opt_state": state.opt_state}
    return content.contents(OrderedDict(params=state.params) | more)  # leaves of a dict would be sorted by key
