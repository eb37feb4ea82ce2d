# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: run a function on n forked children of a process that has torch imported already.

    def swap(rank: Rank, value: int) -> int:
        values = [None] * rank.size
        torch.distributed.all_gather_object(values, value + rank.rank, group=rank.group)
        return values[-1]

    assert run_ranks(3, swap, 10) == [12, 12, 12]

A fork takes milliseconds where a fresh process needs seconds to import torch. Every run has a deadline; when
a rank fails, dies or stays silent, ``RankError`` names it and shows its traceback or stack. Ranks of one pool share
a job secret of their own, unless WEFT_JOB_SECRET is set.
Threads: call from a process whose other threads hold no locks; the children run torch with one thread each.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed

from weft import _core
from weft.errors import Error
from weft.runtime.endings import OwnedFolder, end_with_parent, signals_held

_GRACE_S = 5.0  # for the other ranks to report once one has failed


class RankError(Error):
    """One or more ranks failed, died or passed the deadline; the message has each one's story.

    ``ranks`` names them, the first to fail first. ``refusal`` is what all of them raised as a weft.Error, or None
    where they did not agree.
    """

    def __init__(self, message: str, ranks: list[int], refusal: str | None = None) -> None:
        super().__init__(message, "system")
        self.ranks = ranks
        self.refusal = refusal

    def one_line(self) -> str:
        """Return the refusal that all ranks share, as their user made one mistake; else every story."""
        return self.refusal or str(self)


@dataclass
class Rank:
    """The argument of a function that runs on every rank.

    rank, size: this process among all of the run.
    group: a gloo process group of all ranks, also torch's default group; None when run without one.
    folder: an empty folder that the ranks of this run share.
    kept: whatever the function wants to find again at the pool's next run.
    """

    rank: int
    size: int
    group: Any
    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)
    meetings: int = 0

    def meet(self, deadline_s: float = 60.0) -> None:
        """Return when every rank of the run has come here. A rank that has returned may end at once: no other rank
        needs it then.

        Any other call that ranks make together may still need a rank that has returned from it.
        Raises: TimeoutError that names the ranks that did not come.
        """
        self.meetings += 1
        marks = [self.folder / f".met-{self.meetings}-{rank}" for rank in range(self.size)]
        marks[self.rank].touch()
        until = time.monotonic() + deadline_s
        while absent := [rank for rank, mark in enumerate(marks) if not mark.exists()]:
            if time.monotonic() > until:
                raise TimeoutError(f"rank {self.rank}: meet, waited {deadline_s:g} s for ranks {absent}")
            time.sleep(0.002)


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    with_group: bool = True,
    with_gpus: bool = True,
    deadline_s: float = 120.0,
    lost: Collection[int] = (),
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``num_ranks`` processes; return its results in rank order.

    Args:
        function: any callable; results are pickled.
        with_group: make a gloo group of the ranks; False leaves torch.distributed alone.
        with_gpus: False hides GPUs from the ranks, so that a test means the same on every machine.
        deadline_s: seconds for the whole run.
        lost: ranks that are meant to die or stop; their result is None and they are killed at the end.
    Raises: RankError.
    """
    pool = RankPool(
        num_ranks, with_group=with_group, with_gpus=with_gpus, deadline_s=deadline_s, first=(function, args)
    )
    with pool:
        return pool.results(lost)


def run_as_rank(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Run ``function(rank, *args)`` on this rank of torchrun's job; return (rank's number, its result).

    Collective. The rank has a gloo group and no folder of its own. Raises: what the function raises.
    """
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    me = Rank(torch.distributed.get_rank(), torch.distributed.get_world_size(), group, Path())
    result = function(me, *args)
    torch.distributed.barrier()  # a gloo thread that still holds the last tensor would abort the process as it ends
    _leave(me)
    return me.rank, result


def run_job(
    function: Callable[..., Any], *args: Any, num_ranks: Callable[[], int], deadline_s: float = 120.0
) -> Any:
    """Run ``function(rank, *args)`` on every rank of a job: torchrun's, if it started this process, or own ones.

    Args: num_ranks: how many own ranks to start; it is called only then, and may refuse options that do not fit.
    Returns: rank 0's result; None on the other ranks of torchrun, which have nothing to report.
    Raises: what the function or num_ranks raises.
    """
    if torch.distributed.is_torchelastic_launched():
        rank, result = run_as_rank(function, *args)
        return None if rank else result
    return run_ranks(num_ranks(), function, *args, deadline_s=deadline_s)[0]


class RankPool:
    """Ranks that stay alive between runs, so that one run costs no fork and objects outlive it.

    with RankPool(4) as pool:
        for shape in shapes:
            pool.run(check_dispatch, shape)      # check_dispatch is a module-level function

    Args: see run_ranks. After a failed run the next one starts fresh ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        with_group: bool = True,
        with_gpus: bool = True,
        deadline_s: float = 120.0,
        first: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._options = {"with_group": with_group, "with_gpus": with_gpus, "deadline_s": deadline_s}
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._start(first)

    def _start(self, first: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        self._owned = OwnedFolder("weft-ranks-")
        self._folder = self._owned.path
        try:
            self._fork(first)
        except BaseException:  # a signal that ends the command, too
            self.close(grace_s=0)
            raise

    def _fork(self, first: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        context = multiprocessing.get_context("fork")
        secret = secrets.token_hex(32)
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_serve,
                args=(Rank(rank, self.num_ranks, None, self._folder), theirs, list(self._connections)),
                kwargs={"parent": os.getpid(), "secret": secret, "first": first, **self._options},
                daemon=True,
            )
            with signals_held():
                process.start()
                self._processes.append(process)
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any, lost: Collection[int] = ()) -> list[Any]:
        """Run a picklable ``function(rank, *args)`` on every rank; return its results in rank order."""
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(job)
        return self.results(lost)

    def pid(self, rank: int) -> int:
        """Return the process id of ``rank``."""
        return int(self._processes[rank].pid)

    def results(self, lost: Collection[int] = ()) -> list[Any]:
        """Wait for the run under way; return its results in rank order. Raises: RankError."""
        results: list[Any] = [None] * self.num_ranks
        failures: dict[int, str] = {}
        refusals: set[str | None] = set()
        pending = {self._connections[r]: r for r in range(self.num_ranks) if r not in lost}
        until = time.monotonic() + self._deadline_s
        while pending and time.monotonic() < until:
            for connection in wait(list(pending), timeout=max(until - time.monotonic(), 0)):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                ok, value = self._receive(rank, connection)
                if ok:
                    results[rank] = value
                else:
                    failures[rank], refusal = value
                    refusals.add(refusal)
                    until = min(until, time.monotonic() + _GRACE_S)
        for rank in pending.values():
            failures[rank] = "no answer; it was at\n" + self._stack(rank)
            refusals.add(None)
        for rank in lost:
            self._processes[rank].kill()
        if failures:
            self.close(grace_s=0)
            stories = [f"rank {rank} of {self.num_ranks}: {story}" for rank, story in failures.items()]
            shared = refusals.pop() if len(refusals) == 1 else None
            raise RankError("\n\n".join(stories), list(failures), shared)
        return results

    def kill(self) -> None:
        """End every rank at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Let every rank end, for ``grace_s`` seconds, and remove the shared folder; idempotent."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0))
        self.kill()
        self._processes, self._connections = [], []
        self._owned.remove()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=_GRACE_S if error is None else 0)

    def _receive(self, rank: int, connection: Connection) -> tuple[bool, Any]:
        try:
            ok, value = pickle.loads(connection.recv_bytes())
            return bool(ok), value
        except EOFError:
            self._processes[rank].join(_GRACE_S)
            return False, (f"died with exit code {self._processes[rank].exitcode}", None)

    def _stack(self, rank: int) -> str:
        try:
            os.kill(self.pid(rank), signal.SIGUSR2)
            time.sleep(0.3)
            return _stack_file(self._folder, rank).read_text()
        except OSError as error:
            return f"unknown ({error})"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f".stack-{rank}"


def _serve(
    me: Rank,
    connection: Connection,
    inherited: list[Connection],
    parent: int,
    secret: str,
    with_group: bool,
    with_gpus: bool,
    deadline_s: float,
    first: tuple[Callable[..., Any], tuple[Any, ...]] | None,
) -> None:
    """Body of one rank: run the first job, then what arrives, until the parent closes the connection."""
    end_with_parent(parent)
    gc.freeze()  # torch's and the parent's objects stay: looking at them copies their pages, 0.1 s of each rank
    if os.environ.get("WEFT_JOB_SECRET", "auto") == "auto":
        os.environ["WEFT_JOB_SECRET"] = secret  # for what the rank starts
    _core.use_job_secret(secret)
    for parents_end in inherited:  # else no rank would see the parent close its own
        parents_end.close()
    torch.set_num_threads(1)
    if not with_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stack_file = open(_stack_file(me.folder, me.rank), "w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=True)
    try:
        if with_group:
            me.group = _gloo_group(me, deadline_s)
        if first is not None:
            connection.send_bytes(pickle.dumps((True, first[0](me, *first[1]))))
        while True:
            function, args = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps((True, function(me, *args))))
    except EOFError:
        _leave(me)
    except BaseException as error:
        refusal = str(error) if isinstance(error, Error) else None
        connection.send_bytes(pickle.dumps((False, ("raised\n" + traceback.format_exc(), refusal))))


def _gloo_group(me: Rank, deadline_s: float) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{me.folder}/.store",
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=deadline_s),
    )
    return torch.distributed.group.WORLD


def _leave(me: Rank) -> None:
    """Drop what the rank kept, then its group, so that finalizers run while peers still listen."""
    me.kept.clear()
    gc.collect()
    if me.group is not None:
        me.group = None
        torch.distributed.destroy_process_group()
