# SPDX-License-Identifier: Apache-2.0
"""``weft top`` on looks that are made up: jobs are told apart, and each has tables and waits of its own."""

from __future__ import annotations

import time
from typing import Any

from weft.runtime import top
from weft.runtime.tables import make_console


def a_look(pid: int, rank: int, keys: list[int], calls: int = 3, command: str = "train.py") -> top.Look:
    now = time.monotonic_ns()
    groups: list[dict[str, Any]] = [
        {
            "key": key,
            "is_open": True,
            "rank": rank,
            "size": 2,
            "device": "cpu",
            "operation": "all_reduce",
            "calls": calls,
            "began_ns": now - 5_000_000_000,
            "ended_ns": now - 6_000_000_000 if calls == 3 else now,
        }
        for key in keys
    ]
    return top.Look(pid, 0, command, {"groups": groups, "operations": [], "peers": []}, now)


def test_processes_that_call_together_are_a_job_directly_or_through_others() -> None:
    looks = [
        a_look(10, 0, [1]),
        a_look(20, 0, [7]),
        a_look(11, 1, [1, 2]),
        a_look(12, 1, [2]),
        a_look(21, 1, [7]),
    ]
    assert [[one.pid for one in job] for job in top.jobs(looks)] == [[10, 11, 12], [20, 21]]


def test_processes_without_such_calls_are_with_those_of_their_command() -> None:
    looks = [
        a_look(5, 0, [], command="server"),
        a_look(6, 0, [], command="client"),
        a_look(7, 0, [], command="server"),
    ]
    assert [[one.pid for one in job] for job in top.jobs(looks)] == [[5, 7], [6]]


def test_each_job_says_who_waits_in_it() -> None:
    looks = [
        a_look(10, 0, [1]),
        a_look(11, 1, [1], calls=2),
        a_look(20, 0, [7], calls=2),
        a_look(21, 1, [7], calls=2),
    ]
    parts = [str(getattr(part, "plain", "")) for part in top._screen(looks, looks, make_console())]
    titles = [
        at for at, text in enumerate(parts) if text.startswith("Job: train.py, 2 of 2 ranks on this host")
    ]
    assert len(titles) == 2
    first, second = parts[: titles[1]], parts[titles[1] :]
    assert any("rank 0 is in all_reduce, call 3" in text and "process 11" in text for text in first)
    assert "Nobody waits for long." in second
