# SPDX-License-Identifier: Apache-2.0
"""Children that are forked in the middle of a program: what they report, and whether they end by themselves."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 180.0
# How a child ends. "ends": as every Python program does, with exit handlers and all destructors.
WAYS = ("calls", "collects", "ends", "exits")


def refusals(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Make calls, and return what each said: "" of one that was not refused."""
    said = {}
    for name, call in calls.items():
        said[name] = ""
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def fork(
    way: str, calls: Callable[[], dict[str, Callable[[], Any]]], let_go: Callable[[], None]
) -> dict[str, str]:
    """Fork a child that does what ``way`` says, wait for it, and return what the calls said that it made.

    calls: made by a child that "calls". let_go: drops the program's objects, for one that "collects" them.
    Raises: AssertionError where it does not end in time, or not well.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        said: dict[str, str] = {}
        if way == "calls":
            said = refusals(calls())
        if way == "collects":
            let_go()
            gc.collect()
        os.write(writer, json.dumps(said).encode())
        os.close(writer)
        if way == "ends":
            sys.exit(0)
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + DEADLINE_S
    ended = 0
    while ended == 0 and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if ended == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGABRT)  # which says where it was
        os.waitpid(child, 0)
    assert ended, f"a child that {way} did not end"
    with os.fdopen(reader) as report:
        text = report.read()
    assert os.waitstatus_to_exitcode(status) == 0, (way, os.waitstatus_to_exitcode(status))
    return dict(json.loads(text))


def check_refused(said: dict[str, str]) -> None:
    """Check that each call was refused by name. Raises: AssertionError with those that were not."""
    words = f" of process {os.getpid()}, from which this process ("
    wrong = {name: text for name, text in said.items() if not text.startswith("Error: ") or words not in text}
    assert said and not wrong, wrong
