# SPDX-License-Identifier: Apache-2.0
"""Runs several tests at once: pytest --workers 3, which is what tools/run-tests asks for on two cores.

Many tests wait: for a deadline, for a dead peer, for a program to start. Other tests run meanwhile. One process
collects all tests and imports torch. It forks a worker for each test file, because fixtures belong to a file. So tests
are collected once, torch is imported once, and a file starts with a process that no other file has used: torch's
gradients fail in ranks that are forked from a process that has used torch's threads. Workers send their reports to the
first process, which counts and prints. Marks:
    pytest.mark.group(NAME)   tests of a file with one name have a worker of their own
    pytest.mark.alone         tests look at the whole machine: they run at the end, with no others beside them
A test that ends its worker has failed; a new worker runs the rest of the file. --cpu 20 lists the files that took the
most CPU time. The time of the processes that they started, and of programs (zygote.py), is in it.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import traceback
from collections import Counter, deque
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.runtime.endings import end_with_parent

Share = list[int]  # tests that one worker runs, by their places among all


class Workers:
    """The plugin of the first process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.cpu_s: Counter[str] = Counter()  # of each file, without programs of the zygote

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests, in place of pytest's own loop."""
        if session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # of which file a test is: two at a time would take turns
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all workers
        gc.collect()
        gc.freeze()  # what is here now stays: looking at it again in every process would copy its pages
        try:
            self._run_all(session)
        finally:
            gc.unfreeze()  # modules say at the end what they have not seen go
        return True

    def _run_all(self, session: pytest.Session) -> None:
        shares: dict[tuple[Any, ...], Share] = {}
        for place, item in enumerate(session.items):
            shares.setdefault(_share_of(item), []).append(place)
        together = [share for (runs_last, *_), share in shares.items() if not runs_last]
        self._run(session, together, self._count)
        self._run(session, [share for (runs_last, *_), share in shares.items() if runs_last], 1)

    def _run(self, session: pytest.Session, shares: list[Share], count: int) -> None:
        # What takes long begins early: faults, which wait for deadlines, then by the number of tests.
        def length(share: Share) -> tuple[bool, int]:
            return "fault" in session.items[share[0]].path.parts, len(share)

        queue = deque(sorted(shares, key=length, reverse=True))
        busy: list[Worker] = []
        try:
            while queue or busy:
                while queue and len(busy) < count:
                    busy.append(Worker(session, queue.popleft()))
                wait([file for worker in busy for file in (worker.connection, worker.process)])
                for worker in list(busy):
                    if worker.has_ended():
                        busy.remove(worker)
                        self.cpu_s[worker.file] += worker.cpu_s
                        if worker.left:
                            queue.appendleft(worker.left)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in busy:
                worker.end()


def _share_of(item: pytest.Item) -> tuple[Any, ...]:
    group = item.get_closest_marker("group")
    return item.get_closest_marker("alone") is not None, item.path, group.args if group else None


class Worker:
    """A process that runs a share, as the first process sees it."""

    def __init__(self, session: pytest.Session, share: Share) -> None:
        self.left = list(share)  # the test that runs, and those behind it
        self.file = session.items[share[0]].nodeid.partition("::")[0]
        self.cpu_s = 0.0  # of this process and those that it has waited for, once it has ended
        self._session = session
        self.connection, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                end_with_parent(parent)
                _work(session, theirs, share)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        theirs.close()
        self.process = os.pidfd_open(self._pid)  # ranks that it leaves behind may hold the connection open

    def has_ended(self) -> bool:
        """Take what it has said. A test that ended it is reported as failed, and is not among those left."""
        ended = bool(wait([self.process], timeout=0))
        try:
            while self.connection.poll():
                self._take(*self.connection.recv())
        except (EOFError, ConnectionResetError):
            ended = True
        if ended:
            status = self.end()
            if self.left:
                self._report_death(status)
        return ended

    def _take(self, kind: str, what: Any) -> None:
        hook = self._session.config.hook
        if kind == "finished":
            self._finish(what)
            return
        report = hook.pytest_report_from_serializable(config=self._session.config, data=what)
        # pytest writes a report with a node as that of one of several workers.
        gateway = SimpleNamespace(id=f"process {self._pid}")
        report.node = SimpleNamespace(gateway=gateway, _workerinfocache=gateway.id)
        hook.pytest_runtest_logreport(report=report)

    def _finish(self, place: int) -> None:
        self.left.remove(place)
        item = self._session.items[place]
        self._session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _report_death(self, status: int) -> None:
        item = self._session.items[self.left[0]]
        story = f"it ended the process that ran it: {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", story, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._finish(self.left[0])

    def end(self) -> int:
        """Let the process end, at once if it has not run all its tests; return its status."""
        self.connection.close()
        os.close(self.process)
        if self.left:
            os.kill(self._pid, signal.SIGTERM)
        _, status, usage = os.wait4(self._pid, 0)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status)


class _Reporter:
    """What a worker hands to the first process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _work(session: pytest.Session, connection: Connection, share: Share) -> None:
    """Body of a worker."""
    config = session.config
    _write_elsewhere(config, Path(config.rootpath, "build", "test-workers.log"))
    config.pluginmanager.register(_Reporter(config, connection))
    for place, following in itertools.zip_longest(share, share[1:]):
        after = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=after)
        connection.send(("finished", place))


def _write_elsewhere(config: pytest.Config, log: Path) -> None:
    """Leave the terminal to the first process, and capture what tests print in files of this one."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    log.parent.mkdir(exist_ok=True)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    capture.start_global_capturing()
    capture.suspend_global_capture()
