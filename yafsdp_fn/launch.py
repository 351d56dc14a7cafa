"""ya.launch: runs a function on so many ranks of this machine, each a fork of this process, and returns their results.

    started = [fork(function, RANK=rank, WORLD_SIZE=ranks) for rank in range(ranks)]
    return [each.result() for each in started]       # the first that raises ends the others

A fork has the function whether or not it has a name: one of a script needs no `if __name__ == "__main__"`, and one of a
notebook's cell no file. This process serves the store at which ranks meet, so a rank may end as soon as it is done.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import IO, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from yafsdp_fn.util.torch_private import cuda_is_lost, end_with_parent, forget_groups

Result = TypeVar("Result")

GRACE = 2.0
"""Seconds that other ranks may go on after one has failed: they notice as soon as it has ended, and may say more."""
LOOK = 0.2
"""Seconds between two looks at processes that neither say nor answer anything."""

CUDA_IS_LOST = (
    "ya.launch: this process has asked CUDA for something already (a tensor, ya.mesh(), torch.cuda.is_available()), "
    "and a fork of it cannot use CUDA. Call ya.launch before that: in a notebook restart the kernel, and do on ranks "
    "what needs a GPU. Or write the function into a script, and start it by torchrun"
)


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


def launch(function: Callable[..., Result], /, *args: Any, ranks: int) -> list[Result]:
    """Calls `function(*args)` on `ranks` ranks of this machine, and returns what each returned, by rank.

        losses = ya.launch(train, ranks=2)           # def train(): mesh = ya.mesh(); ...; return float(loss)

    Each rank is a fork of this process, with torchrun's environment: `ya.mesh()` in it makes the process group, of gloo
    on a CPU and of NCCL where there are GPUs, one for each rank. It has a copy of all that is here, computes with one
    thread (pools of threads do not outlive a fork), and what it prints appears here, line by line. Results come back as
    `torch.save` writes them, tensors to the CPU.

    Raises RankFailed where a rank raised or was killed, with the traceback of the one that was first; the others are
    ended two seconds later. RuntimeError where this process is a rank itself, or runs where there is no fork (Windows);
    ValueError for numbers of ranks that cannot be. Ranks raise where CUDA has been used here.

    >>> ya.launch(lambda: ya.mesh(device="cpu").size(), ranks=2)
    [2, 2]
    """
    if not callable(function):
        raise TypeError(f"launch: expected a function, got {type(function).__name__}")
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"launch(ranks={ranks!r}): expected the number of ranks to start, 1 or more")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        here = f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"
        raise RuntimeError(f"ya.launch starts ranks, and this process is {here} itself: call it once")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError("ya.launch forks this process, which this system cannot do: start a script by torchrun")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            started.append(_start(function, args, _environment(rank, ranks, store.port)))
        readers = [threading.Thread(target=_pass_on, args=of, daemon=True) for each in started for of in each.prints]
        for reader in readers:
            reader.start()
        answers = _wait(started)
    finally:
        for each in started:
            each.process.kill()
            each.process.join()
            each.pipe.close()
    for reader in readers:
        reader.join(GRACE)  # a process that a rank has started may go on, and print
    if any(answer.result is None for answer in answers.values()):
        raise _failure(answers, ranks)
    results = [io.BytesIO(answers[rank].result or b"") for rank in range(ranks)]
    return [torch.load(result, map_location="cpu", weights_only=False) for result in results]


# ---- here: a rank's process, and what comes from it


class _Rank(NamedTuple):
    """A process, the pipe of its answer, and pairs of what it prints and where to."""

    process: Any
    pipe: Any
    prints: list[tuple[IO[str], Any]]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank, whose agent keeps the store, as this process does."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback and "GLOO_SOCKET_IFNAME" not in os.environ else {}),
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _start(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> _Rank:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    prints = [os.pipe(), os.pipe()]
    every = (function, args, environment, os.getpid(), theirs, [fd for _, fd in prints])
    process = multiprocessing.get_context("fork").Process(target=_run, args=every)
    with warnings.catch_warnings():  # Python warns of threads, whose locks a fork may need: none of these
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()  # else the next fork would have it, and the end of this one would not be seen
    for _, fd in prints:
        os.close(fd)
    sinks = zip(prints, (sys.stdout, sys.stderr), strict=True)
    return _Rank(process, ours, [(open(fd, errors="replace"), sink) for (fd, _), sink in sinks])


def _pass_on(said: IO[str], sink: Any) -> None:
    with said:
        for line in said:
            print(line, end="", file=sink, flush=True)


def _wait(started: Sequence[_Rank]) -> dict[int, Answer]:
    """Returns the answers by rank, of all, or of those that come soon after one has failed."""
    answers: dict[int, Answer] = {}
    until = float("inf")
    while len(answers) < len(started) and time.monotonic() < until:
        connection.wait([each.pipe for rank, each in enumerate(started) if rank not in answers], LOOK)
        for rank, each in enumerate(started):
            if rank not in answers and (answer := _look(each)) is not None:
                answers[rank] = answer
                until = until if answer.result is not None else min(until, time.monotonic() + GRACE)
    return answers


def _look(rank: _Rank) -> Answer | None:
    """Returns its answer, or None while it runs."""
    alive = rank.process.is_alive()  # asked first: what it has said before its end is in the pipe
    with contextlib.suppress(EOFError, OSError):
        if rank.pipe.poll():
            answer: Answer = rank.pipe.recv()
            return answer
        if alive:
            return None
    rank.process.join()
    code = rank.process.exitcode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    memory = ", as by the system where memory is short" * (code == -signal.SIGKILL)
    return Answer(time.monotonic(), None, "", f"its process was ended by {how}{memory}")


def _failure(answers: Mapping[int, Answer], ranks: int) -> RankFailed:
    """The error for the rank that failed first: a killed one before others, since these miss it sooner than it is seen
    here, and one that lost the others last."""

    def order(rank: int) -> tuple[int, float]:
        error = answers[rank].error
        return (0 if not error else 2 if error == "CommunicationError" else 1), answers[rank].at

    first, *others = sorted((rank for rank, answer in answers.items() if answer.result is None), key=order)
    _, _, error, text = answers[first]
    head = [f"rank {first} of {ranks} {f'raised {error}' if error else 'was lost'}"]
    for rank in others:
        alike = answers[rank][2:] == (error, text)
        head.append(f"rank {rank} {'the same' if alike else 'then ' + (answers[rank].error or 'was lost, too')}")
    head += [f"rank {rank} was ended" for rank in range(ranks) if rank not in answers]
    return RankFailed(first, f"{'; '.join(head)}\n{text}")


# ---- in the fork


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    parent: int,
    pipe: Any,
    prints: Sequence[int],
) -> None:
    """Runs the function as a rank. Never returns, into what is the parent's."""
    try:
        end_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, which ends its ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for at, fd in enumerate(prints, start=1):
            os.dup2(fd, at)
            os.close(fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, "utf-8", "replace") for fd in (1, 2))
        os.environ.update(environment)
        atexit._clear()  # what the parent is to do when it ends
        kept = forget_groups()  # noqa: F841, until the end
        torch.set_num_threads(1)
        pipe.send(_answer(function, args))
        atexit._run_exitfuncs()  # others see in the store that this rank has ended well
    finally:
        os._exit(0)


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> Answer:
    error: BaseException
    if cuda_is_lost():
        return Answer(time.monotonic(), None, "RuntimeError", CUDA_IS_LOST)
    try:
        result = function(*args)
    except BaseException as raised:
        frames = raised.__traceback__.tb_next if raised.__traceback__ else None  # without this one
        error, text = raised, "".join(traceback.format_exception(type(raised), raised, frames))
    else:
        try:
            torch.save(result, buffer := io.BytesIO())
            return Answer(time.monotonic(), buffer.getvalue())
        except Exception as raised:
            what = f"its result, a {type(result).__name__}, cannot be sent here"
            error, text = raised, f"{what} ({raised}): return tensors, numbers and text"
    finally:
        sys.stdout.flush(), sys.stderr.flush()
    return Answer(time.monotonic(), None, type(error).__name__, text.rstrip())
