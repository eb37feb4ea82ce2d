# SPDX-License-Identifier: Apache-2.0
"""``weft chaos``: what it calls wrong, that a seed is a round, and that one round of each ending ends right."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest
from programs import WEFT, environment

from weft.chaos import command
from weft.chaos.adversary import KINDS, TRANSPORTS, Fault
from weft.chaos.judge import (
    HANG,
    LATE,
    LEAK,
    WRONG_BLAME,
    WRONG_ERROR,
    WRONG_RESULT,
    Footprint,
    Outcome,
    judge,
)
from weft.chaos.operations import ENGINE, MAPPED, OPERATIONS, PORTS, Place
from weft.chaos.rounds import Result, Round, draw_round, run_round
from weft.runtime.tables import make_console

LOST = 1


def verdicts(kind: str, *outcomes: Outcome) -> list[str]:
    return [problem.kind for problem in judge(Fault(kind, LOST, 3), {one.rank: one for one in outcomes})]


def lost(rank: int, message: str, found_s: float = 0.1) -> Outcome:
    return Outcome(rank, "peer_lost", message=message, found_s=found_s)


def test_a_dead_rank_is_to_be_named_by_all_and_before_the_deadline() -> None:
    named = "rank 0, collective x: rank 1 (pid 7) was killed by signal 9"
    assert verdicts("kill", lost(0, named), Outcome(2)) == []
    assert verdicts("kill", lost(0, "rank 0, waited 9 s for rank 2")) == [WRONG_BLAME]
    assert verdicts("kill", lost(0, named, found_s=60)) == [LATE]
    waited = "rank 0, bootstrap.all_gather, waited 30 s for rank 1: rank 1"
    assert verdicts("kill", lost(0, f"{waited} (pid 7 on x) is running", found_s=60)) == [LATE]
    assert verdicts("kill", lost(0, f"{waited} has not come", found_s=60)) == []


def test_who_was_stopped_may_hear_that_it_was_given_up() -> None:
    message = f"rank {LOST} (pid 7 on vm) (this rank) was given up by the others: it is lost: no sign of life for 4 s"
    assert verdicts("stop", lost(LOST, message)) == []
    assert verdicts("stop", lost(0, message.replace(f"rank {LOST}", "rank 0"))) == [WRONG_BLAME]


def test_blames_are_followed_to_a_rank_that_stands_still() -> None:
    assert verdicts("stop", lost(0, "rank 0, waited for rank 2"), lost(2, "rank 2, waited for rank 1")) == []
    in_a_circle = lost(0, "rank 0, waited for rank 2"), lost(2, "rank 2, waited for rank 0")
    assert verdicts("stop", *in_a_circle) == [WRONG_BLAME, WRONG_BLAME]


@pytest.mark.parametrize("kind", ["none", "late", "pause", "clock", "reorder", "disk"])
def test_where_nobody_has_to_fail_nobody_may(kind: str) -> None:
    assert verdicts(kind, lost(0, "rank 0, waited for rank 1")) == [WRONG_ERROR]
    assert verdicts(kind, Outcome(0, "refused", message="invalid: x: got 1, allowed: 2")) == [WRONG_ERROR]
    assert verdicts(kind, Outcome(0, "wrong"), Outcome(1, "crashed")) == [WRONG_RESULT, WRONG_ERROR]
    assert verdicts(kind, Outcome(0, leaks=["1 x socket:[N]"])) == [LEAK]


def test_a_refusal_says_what_the_matter_is() -> None:
    assert verdicts("disks", Outcome(0, "refused", message="capacity: /x: No space left on device")) == []
    assert verdicts("disks", Outcome(0, "refused", message="system: ld returned 1")) == [WRONG_ERROR]


def test_a_seed_and_a_number_are_a_round() -> None:
    for transport in TRANSPORTS:
        assert draw_round(3, 5, transport, {}) == draw_round(3, 5, transport, {})
        kinds = {draw_round(3, number, transport, {}).fault.kind for number in range(200)}
        assert kinds == {name for name, kind in KINDS.items() if transport in kind.where}
        drawn = {call for number in range(200) for call in draw_round(3, number, transport, {}).calls}
        needs = {MAPPED, PORTS} if transport == "mapped" else {PORTS, ENGINE}
        assert drawn >= {name for name, operation in OPERATIONS.items() if operation.needs in needs}


def one_round(transport: str, fault: Fault, calls: list[str], ranks: int, folder: Path) -> Result:
    needs = ENGINE if set(calls) <= {"write", "message", "engine_barrier"} else PORTS
    return run_round(
        Round(1, 1, transport, ranks, int(transport != "mapped"), needs, tuple(calls), fault), folder
    )


@pytest.mark.parametrize(
    ("transport", "fault", "calls"),
    [
        ("mapped", Fault("kill", LOST, 2, 0.01, 9), ["all_reduce", "high_throughput", "low_latency"]),
        ("mapped", Fault("pause", LOST, 1, 0.001, 0.2), ["elastic", "pipeline", "broadcast"]),
        ("fabric:shm", Fault("exit", LOST, 2), ["write", "message"]),
        ("loopback", Fault("reorder", LOST, 1, 0, 0.5, 9), ["all_to_all_uneven", "reduce"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_a_round_ends_as_it_has_to(transport: str, fault: Fault, calls: list[str], tmp_path: Path) -> None:
    last = "engine_barrier" if calls[0] == "write" else "barrier"
    result = one_round(transport, fault, [*calls, *calls, last], 3, tmp_path)
    assert result.problems == []
    assert result.struck and result.calls > 0


def test_a_wrong_result_and_a_crash_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(place: Place, chance: random.Random) -> None:
        assert place.rank != 1, "one element is wrong"

    def crash(place: Place, chance: random.Random) -> None:
        import os

        os.kill(os.getpid(), 9)

    for run, kind in ((lie, WRONG_RESULT), (crash, WRONG_ERROR)):
        monkeypatch.setitem(OPERATIONS, "barrier", type(OPERATIONS["barrier"])("barrier", PORTS, 1, run))
        folder = tmp_path / kind
        folder.mkdir()
        result = one_round("mapped", Fault("none", 0, 0), ["barrier"], 2, folder)
        assert kind in [problem.kind for problem in result.problems]


def test_the_head_of_a_crashed_ranks_stack_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(place: Place, chance: random.Random) -> None:
        import os

        os.write(2, b"the innermost frame" + b"." * 20_000 + b"the outermost frame")
        os.kill(os.getpid(), 9)

    monkeypatch.setitem(OPERATIONS, "barrier", type(OPERATIONS["barrier"])("barrier", PORTS, 1, crash))
    said = one_round("mapped", Fault("none", 0, 0), ["barrier"], 2, tmp_path).said
    assert all("the innermost frame" in words and "the outermost frame" in words for words in said), said
    assert said and all(len(words) < 10_000 for words in said)


def test_what_a_driver_keeps_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def start_driver() -> list[object]:
        if not kept:
            kept.extend([*os.pipe(), *os.pipe()])
        return []

    monkeypatch.setattr("weft._core.gpus", start_driver)
    before = Footprint.first()
    start_driver()
    assert len(kept) == 4
    assert before.leaks(1)[1] == []
    more = os.pipe()
    monkeypatch.setattr("weft.chaos.judge._LET_GO_S", 0.5)
    assert before.leaks(1)[1] == ["2 x pipe:[N]"]
    for descriptor in (*kept, *more):
        os.close(descriptor)


def test_what_is_let_go_of_a_little_later_is_no_leak() -> None:
    before = Footprint.first()
    pipe = os.pipe()
    later = threading.Timer(0.5, lambda: [os.close(descriptor) for descriptor in pipe])
    later.start()
    assert before.leaks(1)[1] == []
    later.join()


def test_a_hang_is_noticed_with_every_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(place: Place, chance: random.Random) -> None:
        import time

        time.sleep(60)

    monkeypatch.setattr("weft.chaos.rounds.DEADLINE_S", 15.0)  # by then ranks do hang
    monkeypatch.setitem(OPERATIONS, "barrier", type(OPERATIONS["barrier"])("barrier", PORTS, 1, hang))
    (problem,) = one_round("mapped", Fault("none", 0, 0), ["barrier"], 2, tmp_path).problems
    assert problem.kind == HANG
    assert problem.text.count("in hang") == 2


def test_the_command_counts_and_repeats_one_round(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [*WEFT, "chaos", "--seed", "4", "--round", "2", "--transport", "loopback"]
    command += ["--fault", "late", "--json", str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["seeds"] == [4] and document["problems"] == []
    once = document["transports"]["loopback"]
    assert once["rounds"] == 1 and once["calls"] > 0
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    document = json.loads(file.read_text())
    assert document["seeds"] == [4, 4] and len(document["commands"]) == 2
    twice = document["transports"]["loopback"]
    assert twice["rounds"] == 2 and twice["calls"] == 2 * once["calls"] and twice["faults"] == {"late": 2}
    wrong = subprocess.run(
        [*WEFT, "chaos", "--minutes", "0"], env=environment(), capture_output=True, text=True
    )
    assert wrong.returncode == 1 and "allowed: a number above 0" in wrong.stderr


def test_the_last_lines_say_what_was_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    stack = "rank 1, call 3 write: Traceback:\n  somewhere\nKeyError: 7"
    command.print_wrong(
        make_console(wide=True),
        [{"round": "round 9: mapped", "kind": "wrong error", "text": stack, "again": "weft chaos --seed 1"}],
    )
    assert "wrong error: rank 1, call 3 write: Traceback: ... KeyError: 7" in capsys.readouterr().out
