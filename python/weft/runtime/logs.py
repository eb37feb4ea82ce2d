# SPDX-License-Identifier: Apache-2.0
"""Weft's lines in Python's ``logging``: one logger, ``weft``, with a child for each part that says something.

Where the program has handlers, every line is a record for them, those of the extension as ``weft.core``. Where it has
none, lines go to standard error, in one piece each, as several ranks write there. The level is WEFT_LOG's; its default
leaves that of Python's lines to the program.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import Any

_LEVELS = {"error": logging.ERROR, "info": logging.INFO, "debug": logging.DEBUG}
_CORE_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)  # by LogLevel
_weft = logging.getLogger("weft")
_core_lines = logging.getLogger("weft.core")
_is_routed = False


class _Lines(logging.Handler):
    """Writes what the extension would; nothing where the program has handlers of its own, which get every record."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            lines = "\n".join(map(printable, record.getMessage().split("\n")))
            sys.stderr.write(f"weft {record.levelname.lower()}: {lines}\n")


def printable(words: str) -> str:
    """Return words that somebody else may have chosen as a terminal may show them: control characters escaped."""
    if words.isprintable():
        return words
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in words)


def follow(level: str) -> None:
    """Log from ``level`` on, a value of WEFT_LOG; its default leaves the level to the program."""
    if level in _LEVELS:
        _weft.setLevel(_LEVELS[level])
    if not any(isinstance(handler, _Lines) for handler in _weft.handlers):
        _weft.addHandler(_Lines())


def route(core: Any) -> None:
    """Make records of the extension's lines, if the program has handlers by now. Otherwise they stay lines."""
    global _is_routed
    own = [handler for handler in _weft.handlers if not isinstance(handler, _Lines)]
    if _is_routed or not (own or logging.getLogger().handlers):
        return
    _is_routed = True
    core.log_to_queue()
    # A thread of its own: the thread that logs in the extension may hold locks, or be unknown to Python.
    thread = threading.Thread(target=_carry, args=(core,), name="weft-log", daemon=True)
    thread.start()
    owner = core.OwnerProcess()

    def end() -> None:
        if not owner.is_this:  # a forked child, which has no such thread
            return
        core.log_to_stderr()
        thread.join(timeout=1)

    atexit.register(end)


def _carry(core: Any) -> None:
    while lines := core.take_log_lines():
        for level, line in lines:
            _core_lines.log(_CORE_LEVELS[level], line)
