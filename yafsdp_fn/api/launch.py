"""ya.launch: runs a function on so many ranks of this machine, each a fork of this process, and returns their results.

    started = [fork(function, RANK=rank, WORLD_SIZE=ranks) for rank in range(ranks)]
    return [each.result() for each in started]       # the first that raises ends the others

A fork has the function whether or not it has a name: one of a script needs no `if __name__ == "__main__"`, and one of a
notebook's cell no file. This process serves the store at which ranks meet, so a rank may end as soon as it is done.
Only `launch` and what runs in the fork know torch; starting, watching and ending processes needs the standard library.
"""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple, Never, TypeVar

import torch
import torch.distributed as dist

from yafsdp_fn.communication.store import rendezvous_store
from yafsdp_fn.util import local_ranks
from yafsdp_fn.util.torch_private import cuda_is_lost, forget_groups

Result = TypeVar("Result")
Call = Callable[[], Any]

GRACE = 2.0
"""Seconds that other ranks may go on after one has failed: they notice as soon as it has ended, and may say more."""
LOOK = 0.2
"""Seconds between two looks at processes that neither say nor answer anything, and at Ctrl-C."""
END = "\0the rank has ended\0"
"""The end of what a rank prints: processes that it has started may hold its pipe open, and print more."""

CUDA_IS_LOST = (
    "ya.launch: this process has asked CUDA for something already (a tensor, ya.mesh(), torch.cuda.is_available()), "
    "and a fork of it cannot use CUDA. Call ya.launch before that: in a notebook restart the kernel, and do on ranks "
    "what needs a GPU. Or write the function into a script, and start it by torchrun"
)


# ---- The verb, and its errors.


class RankFailed(RuntimeError):
    """A rank of `ya.launch` raised, or its process was ended; the message has its traceback. rank: its number"""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[1])


class Answer(NamedTuple):
    """The end of a rank, at a time. result: as `torch.save` writes it; None where the rank failed

    error: the name of the exception, "" where the process was ended; text: the traceback, or how it was ended
    """

    at: float
    result: bytes | None
    error: str = ""
    text: str = ""


def launch(function: Callable[..., Result], /, *args: Any, ranks: int, **others: Never) -> list[Result]:
    """Calls `function(*args)` on `ranks` ranks of this machine, and returns what each returned, by rank.

        losses = ya.launch(train, ranks=2)           # def train(): mesh = ya.mesh(); ...; return float(loss)

    Each rank is a fork of this process, with torchrun's environment: `ya.mesh()` in it makes the process group, of gloo
    on a CPU and of NCCL where there are GPUs, one for each rank. It has a copy of all that is here, computes with one
    thread (pools of threads do not outlive a fork), and what it prints appears here, line by line. Results come back as
    `torch.save` writes them, tensors to the CPU.

    In a process that torchrun has started, which is a rank already, it calls the function there, and returns the same
    list on every rank: a script that ends with `ya.launch(...)` can be started either way. `ranks` is then the number
    that torchrun was given, over all machines.

    Raises RankFailed where a rank raised or was killed, with the traceback of the one that was first; the others are
    ended two seconds later. RuntimeError where this process is a rank of another launcher, or torchrun has started
    another number, or where there is no fork (Windows); ValueError for numbers of ranks that cannot be. Ranks raise
    where CUDA has been used here.

    >>> ya.launch(lambda: ya.mesh(device="cpu").size(), ranks=2)
    [2, 2]
    """
    for name in others:
        raise TypeError(
            f"launch({name}=...): its only keyword is ranks=, of forks of this process; those of the function go into "
            "it: ya.launch(functools.partial(train, lr=1e-3), ranks=2)"
        )
    if not callable(function):
        raise TypeError(f"launch: expected a function, got {type(function).__name__}")
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"launch(ranks={ranks!r}): expected the number of ranks to start, 1 or more")
    call = partial(function, *args)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _loaded(_as_rank(call, ranks))
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError("ya.launch forks this process, which this system cannot do: start a script by torchrun")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started: list[_Rank] = []
    try:
        _run_to_the_end(call, [_environment(rank, ranks, store.port) for rank in range(ranks)], started)
        _finish([printed for each in started for printed in each.prints])
    finally:
        for each in started:
            each.close()
    answers = [each.answer for each in started]
    if any(answer is None or answer.result is None for answer in answers):
        raise _failure(answers)
    return _loaded([answer.result or b"" for answer in answers if answer is not None])


def _as_rank(call: Call, ranks: int) -> list[bytes]:
    """Returns the function's saved result of each rank that torchrun has started, this one among them."""
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ["WORLD_SIZE"])
    here = f"this process is rank {rank} of {world}"
    # forks of `launch` have a store that outlives them, too, but no run of torchrun
    if not dist.is_torchelastic_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError(
            f"ya.launch starts ranks, and {here} itself: call it once, or the function alone. If no launcher has "
            "started it, RANK and WORLD_SIZE are left over in the environment: unset them"
        )
    if ranks != world:
        raise RuntimeError(f"launch(ranks={ranks}): {here} that torchrun has started: expected ranks={world}")
    buffer = io.BytesIO()
    torch.save(call(), buffer)
    store = rendezvous_store(timedelta(days=1))["store"]
    number = store.add(f"launches of rank {rank}", 1)
    keys = [f"launch {number}, rank {each}" for each in range(world)]
    store.set(keys[rank], buffer.getvalue())
    store.wait(keys, timedelta(days=1))  # torchrun ends this rank where another has failed
    return [store.get(key) for key in keys]


def _loaded(results: Sequence[bytes]) -> list[Any]:
    return [torch.load(io.BytesIO(result), map_location="cpu", weights_only=False) for result in results]


# ---- here: a rank's process, and what comes from it


class _Printed:
    """A pipe for what a rank prints into one of its files, and where to it is passed on. passed: set when the end has
    come"""

    def __init__(self, sink: Any) -> None:
        read, write = os.pipe()
        self.read = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.write, self._sink = open(write, "wb", buffering=0), sink  # noqa: SIM115
        self.passed = threading.Event()

    def pass_on(self) -> None:
        """Passes on lines. If the sink raises, nobody reads there any more, and it gets no further line; the pipe is
        read all the same, since the rank would wait for ever once it is full."""
        heard = True
        with self.read:
            for line in self.read:
                text, end, _ = line.partition(END)
                try:
                    if text and heard:
                        print(text, end="", file=self._sink, flush=True)
                except Exception:
                    heard = False
                if end:
                    self.passed.set()


class _Rank:
    """A rank: its process, the pipe of its answer, what it prints into its two files; and its answer, once it has come.

    before: those that are forked already; begins: a pipe with a byte for each rank, when all are forked
    """

    def __init__(self, call: Call, environment: dict[str, str], before: Sequence["_Rank"], begins: int) -> None:
        self._call, self._environment, self._begins = call, environment, begins
        self._bind = local_ranks.dies_with(os.getpid())
        self.pipe, self._answers = multiprocessing.Pipe(duplex=False)
        self.prints = _Printed(sys.stdout), _Printed(sys.stderr)
        self.answer: Answer | None = None
        # a rank that kept them could not be told that nobody reads what it or another one writes
        self._inherited: list[Any] = []
        for rank in (*before, self):
            self._inherited.append(rank.pipe)
            for printed in rank.prints:
                self._inherited += [printed.read, printed.write]
        self.process: Any = multiprocessing.get_context("fork").Process(target=self._run)
        with warnings.catch_warnings():  # Python warns of threads, whose locks a fork may need: none of these
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        self._answers.close()  # else the next fork would have it, and the end of this one would not be seen

    def poll(self) -> bool | None:
        """Returns whether it has failed, None while it runs."""
        self.answer = self.answer or self._look()
        return None if self.answer is None else self.answer.result is None

    def _look(self) -> Answer | None:
        alive = self.process.is_alive()  # asked first: what it has said before its end is in the pipe
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                answer: Answer = self.pipe.recv()
                return answer
            if alive:
                return None
        self.process.join()
        code = self.process.exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        memory = ", as by the system where memory is short" * (code == -signal.SIGKILL)
        return Answer(time.monotonic(), None, "", f"its process was ended by {how}{memory}")

    def close(self) -> None:
        """Closes this process's ends, but for those that threads read to their end."""
        self.pipe.close()
        for printed in self.prints:
            printed.write.close()

    def _run(self) -> None:
        """Runs the function, in the fork. Never returns, into what is the parent's."""
        status = 1
        try:
            self._bind()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, which ends its ranks
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for at, printed in enumerate(self.prints, start=1):
                os.dup2(printed.write.fileno(), at)
            for each in self._inherited:
                each.close()
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, "utf-8", "replace") for fd in (1, 2))
            os.environ.update(self._environment)
            atexit._clear()  # what the parent is to do when it ends
            kept = forget_groups()  # noqa: F841, until the end
            gc.freeze()  # garbage of the parent, freed here, may wait for its threads: so it was after an interrupt
            torch.set_num_threads(1)
            os.read(self._begins, 1)
            self._answers.send(_answer(self._call))
            status = 0
            atexit._run_exitfuncs()  # others see in the store that this rank has ended well
        finally:
            os._exit(status)


# ---- here: the run


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank, whose agent keeps the store, as this process does."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return local_ranks.environment(rank, ranks, port) | agent


@contextlib.contextmanager
def _no_interrupts() -> Iterator[Callable[[], None]]:
    """Only notes Ctrl-C while ranks run, and yields a function that lets it interrupt, for places where nothing is half
    done: one that comes while ranks are started, or a second one while they are ended, would leave some running."""
    before = signal.getsignal(signal.SIGINT)
    noted = list[Any]()

    def let_interrupt() -> None:
        if noted and callable(before):
            before(*noted.pop())

    if threading.current_thread() is not threading.main_thread() or not callable(before):  # it interrupts nothing here
        yield let_interrupt
        return
    signal.signal(signal.SIGINT, lambda *received: noted.append(received))
    try:
        yield let_interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    let_interrupt()


def _run_to_the_end(call: Call, environments: Sequence[dict[str, str]], started: list[_Rank]) -> None:
    """Starts a rank in each environment, and waits for the answers of all, or for those that come soon after one has
    failed. All have ended then."""
    with _no_interrupts() as let_interrupt:

        def pause() -> None:
            connection.wait([each.pipe for each in started if each.answer is None], LOOK)
            let_interrupt()

        # ranks begin when all are forked: as soon as one connects to this process' store, a thread of it may hold locks
        # of the C library (the resolver's), and whoever is forked then waits for them for ever
        begins, begin = os.pipe()
        try:
            for environment in environments:
                started.append(_Rank(call, environment, started, begins))
                let_interrupt()
            os.write(begin, bytes(len(started)))
            for printed in (printed for each in started for printed in each.prints):
                threading.Thread(target=printed.pass_on, daemon=True).start()
            local_ranks.wait(started, GRACE, pause=pause)
        finally:
            os.close(begins)
            os.close(begin)
            for each in started:
                each.process.kill()
            for each in started:
                each.process.join()


def _finish(prints: Sequence[_Printed]) -> None:
    """Waits until all that ended ranks have printed is passed on."""
    for printed in prints:
        printed.write.write(f"{END}\n".encode())
    for printed in prints:
        printed.passed.wait()


def _failure(answers: Sequence[Answer | None]) -> RankFailed:
    """The error for the rank that failed first: a killed one before others, since these miss it sooner than it is seen
    here, and one that lost the others last. answers: None of those that were ended"""
    failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None and answer.result is None}

    def order(rank: int) -> tuple[int, float]:
        error = failed[rank].error
        late = 2 if error == "CommunicationError" else 1
        return late if error else 0, failed[rank].at

    first, *others = sorted(failed, key=order)
    _, _, error, text = failed[first]
    how = f"raised {error}" if error else "was lost"
    head = [f"rank {first} of {len(answers)} {how}"]
    for rank in others:
        how = f"then {failed[rank].error or 'was lost, too'}"
        if failed[rank][2:] == (error, text):
            how = "the same"
        head.append(f"rank {rank} {how}")
    head += [f"rank {rank} was ended" for rank, answer in enumerate(answers) if answer is None]
    return RankFailed(first, f"{'; '.join(head)}\n{text}")


# ---- in the fork


def _answer(call: Call) -> Answer:
    if cuda_is_lost():
        return Answer(time.monotonic(), None, "RuntimeError", CUDA_IS_LOST)
    try:
        result = call()
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this one
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Answer(time.monotonic(), None, type(error).__name__, text.rstrip())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer)
    except Exception as error:
        text = f"its result, a {type(result).__name__}, cannot be sent here ({error}): return tensors, numbers and text"
        return Answer(time.monotonic(), None, type(error).__name__, text)
    return Answer(time.monotonic(), buffer.getvalue())
