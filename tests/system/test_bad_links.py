# SPDX-License-Identifier: Apache-2.0
"""Machines whose cables lose, double, delay and reorder frames: calls are as right over them as over good ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from test_machines import EVERY_CALL, FOREVER, _printed, _start, _wait_for_marks

from weft.testing import machines
from weft.testing.bad_link import BadLink, Direction, fates
from weft.testing.machines import Machines

BAD = BadLink(seed=7, delay_ms=0.5, jitter_ms=1.0, reorder=0.02, overtake_ms=3.0, duplicate=0.02, loss=0.005)
PATIENT = {"WEFT_PEER_DEAD_S": "15", "WEFT_HEARTBEAT_S": "0.5"}

needs_taps = pytest.mark.skipif(
    bool(machines.why_not(BAD)), reason=f"no machines with bad links: {machines.why_not(BAD)}"
)


def test_fates_repeat_with_the_seed_and_have_their_shares() -> None:
    first, again = (list(islice(fates(BAD, 0), 20_000)) for _ in range(2))
    assert first == again
    assert first != list(islice(fates(BAD, 1), 20_000))
    assert first != list(islice(fates(BadLink(**{**vars(BAD), "seed": 8}), 0), 20_000))
    assert 50 <= sum(not fate.copies for fate in first) <= 200
    assert 250 <= sum(len(fate.copies) == 2 for fate in first) <= 600
    assert 250 <= sum(fate.is_overtaken for fate in first) <= 600
    on_time = [fate.copies[0] for fate in first if fate.copies and not fate.is_overtaken]
    assert min(on_time) >= 0.0005 and max(on_time) <= 0.0015


def test_jitter_alone_keeps_the_order_and_a_rate_its_limit() -> None:
    late = Direction(BadLink(jitter_ms=50), 0)
    leaves = [late.take(turn * 1e-3, 1000)[0] for turn in range(500)]
    assert leaves == sorted(leaves) and leaves[-1] > 0.499
    narrow = Direction(BadLink(rate_mbit=8, queue_ms=10.5), 0)  # a byte takes a microsecond
    taken = [narrow.take(0.0, 1000) for _ in range(20)]
    assert [round(at[0] * 1e3) for at in taken if at] == list(range(1, 12))
    assert narrow.report.crowded_out == 9
    cut = Direction(BadLink(cut_every_s=10, cut_s=1), 0)
    assert [bool(cut.take(at, 100)) for at in (0.5, 1.5, 9.5, 10.5)] == [False, True, True, False]


# One machine sends numbers, the other prints those that come. A sender that is 50 ahead of what it knows to have come
# waits, so that no queue overflows on a busy machine; a number or an answer that is lost costs it a short wait.
NUMBERED = """
import socket, sys, time
here, there = sys.argv[1:3]
way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
way.bind((here, 4000))
def wait(seconds):
    way.settimeout(seconds)
    try:
        return way.recv(2000)
    except TimeoutError:
        return b""
if here > there:
    came, until = [], time.monotonic() + 100
    way.sendto(b"0", (there, 4000))
    while (got := wait(1)) != b"end" and time.monotonic() < until:
        if got:
            came.append(int(got[:8]))
        if not came or came[-1] % 10 == 0:
            way.sendto(b"%d" % max(came, default=0), (there, 4000))
    print(*came)
else:
    known = int(wait(100))
    for number in range(1, 3001):
        way.sendto(b"%08d" % number + bytes(800), (there, 4000))
        while known < number - 50:
            known = max(known, int(wait(0.5) or number))
    for _ in range(50):
        time.sleep(0.02)
        way.sendto(b"end", (there, 4000))
"""


@needs_taps
def test_datagrams_are_lost_doubled_and_overtaken() -> None:
    with Machines(2, BadLink(**{**vars(BAD), "loss": 0.02})) as made:
        ways = [[made.address(at), made.address(1 - at)] for at in range(2)]
        commands = [[sys.executable, "-S", "-c", NUMBERED, *way] for way in ways]
        workers = [made.start(at, command, stdout=-1, stderr=-2) for at, command in enumerate(commands)]
        came = [int(number) for number in _printed(workers)[1].split()]
    once = set(came)
    assert 2700 <= len(once) < 3000, len(once)  # two cables lose 1 in 50 each
    assert len(came) > len(once)
    assert any(later < sooner for sooner, later in pairwise(came))
    assert len(made.link_reports) == 2
    for report in made.link_reports:
        assert report.frames > 2000 and min(report.lost, report.doubled, report.overtaken) > 0, report


@needs_taps
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (4, 1)])
def test_every_call_is_right_over_bad_links(
    count: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(EVERY_CALL.replace("300_001", "70_001"))
    monkeypatch.setattr("test_machines.QUIET", {**_quiet(), **PATIENT})
    with Machines(count, BAD) as made:
        printed = _printed(_start(made, ranks, program))
    for rank in range(count * ranks):
        assert f"right {rank}" in printed[rank], printed
    lost = [report.lost for report in made.link_reports]
    assert len(lost) == count and sum(lost) > 0, made.link_reports


@needs_taps
def test_calls_go_on_over_a_narrow_link_that_is_cut_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FOREVER.replace("100_000", "5000"))
    monkeypatch.setattr("test_machines.QUIET", {**_quiet(), **PATIENT})
    narrow = BadLink(seed=2, delay_ms=1, rate_mbit=200, cut_every_s=4, cut_s=0.5)
    with Machines(2, narrow) as made:
        workers = _start(made, 1, program, str(tmp_path))
        _wait_for_marks(tmp_path, [1, 1], workers)
        time.sleep(9)
        assert all(worker.poll() is None for worker in workers)
        (tmp_path / "stop").touch()
        time.sleep(3)
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
        printed = _printed(workers)
    assert "lost" not in "".join(printed), printed
    assert sum(report.cut for report in made.link_reports) > 0, json.dumps(str(made.link_reports))


def _quiet() -> dict[str, str]:
    import test_machines

    return dict(test_machines.QUIET)
