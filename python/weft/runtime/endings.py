# SPDX-License-Identifier: Apache-2.0
"""How commands end: at once, and without leaving processes or files behind.

    with ended_by_signals():            # SIGTERM and SIGHUP unwind the command, as Ctrl-C does
        folder = OwnedFolder("weft-ranks-")
    end_with_parent(os.getppid())       # in a child: a parent that dies, however, takes it along

A process that SIGKILL ends cleans nothing up. Its children die with it (``end_with_parent``), and its folders are
removed by whoever makes the next one: a folder without a living owner has no lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_LOCK = ".owner"
_PR_SET_PDEATHSIG = 1


class Ended(BaseException):
    """A signal asked the command to end. Not an Exception, so that only clean-up sees it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``Ended`` in the main thread; a second one ends the process as usual.

    A signal that is ignored, as under nohup, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Ended(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone handle signals
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let SIGTERM and SIGHUP come after this. Around a fork: functions that run at forks swallow exceptions.

    The child calls end_with_parent(), which lets them in again.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int) -> None:
    """End at SIGTERM and SIGHUP as usual, and when ``parent``, the process that made this one, has ended.

    Call it in a child that was just forked by a thread that lives as long as the parent.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


class OwnedFolder:
    """A temporary folder that goes with ``remove()``, or when its owner is dead and another one is made.

    Args:
        prefix: of its name; folders of one prefix are cleaned up together.
    """

    def __init__(self, prefix: str) -> None:
        _remove_orphans(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Children inherit the lock, so that it is held until the last of them has ended.
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_orphans(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, another program's, or just being made
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # its owner lives
            pass
        finally:
            os.close(lock)
