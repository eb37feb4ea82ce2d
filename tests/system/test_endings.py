# SPDX-License-Identifier: Apache-2.0
"""However a command ends, its ranks end with it and nothing of it is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import environment

from weft.runtime.endings import OwnedFolder

PATIENCE_S = 60.0  # of a machine under load; a command takes a fraction of a second


def eventually(is_true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def session_of(leader: int) -> list[int]:
    """Return the live processes of the session that ``leader`` began, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the command, which may hold spaces: state, parent, group, session.
            state, _, _, session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(entry.name))
    return found


def begin(arguments: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Return a command whose ranks are at work, with its files and temporary files in ``tmp_path``."""
    (tmp_path / "tmp").mkdir()
    started = subprocess.Popen(
        [sys.executable, "-m", "weft", *arguments.split()],
        cwd=tmp_path,
        env=environment() | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which nohup would have ignored
    )
    # Each rank opens a file of this name. An import of torch may start other processes, before signals are handled.
    eventually(lambda: list((tmp_path / "tmp").glob("weft-ranks-*/.stack-*")), f"{arguments} makes no ranks")
    return started


DEMO = "demo --ranks 2 --steps 1000000 --device cpu --out ."
# Every other command that works for long; what serves or watches has one process.
LONG = (
    "bench moe --device cpu --ranks 2 --iterations 1000000",
    "bench collective --device cpu --ranks 2 --calls all_reduce -b 1M -e 1M -n 1000000 --no-baseline",
    "chaos --minutes 60 --transport mapped",
    "chaos --minutes 60 --transport fabric:tcp",
    "tune --device cpu --ranks 2",
)
PROMISED_S = 2.0
needs_ranks = pytest.mark.skipif(
    importlib.util.find_spec("weft.testing") is None, reason="needs weft.testing, which this build is without"
)


@needs_ranks
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name
)
def test_a_signal_ends_a_command_and_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    training = begin(DEMO, tmp_path)
    os.kill(training.pid, number)
    status = training.wait(PATIENCE_S)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    eventually(lambda: not session_of(training.pid), "ranks go on without their parent")
    if number != signal.SIGKILL:
        assert list((tmp_path / "tmp").glob("weft-*")) == []


@needs_ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("arguments", [DEMO, *LONG])
def test_every_long_command_ends_in_time(
    arguments: str, number: signal.Signals, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--thorough"):
        pytest.skip("the time that it takes is measured on an idle machine, with --thorough")
    started = begin(arguments, tmp_path)
    time.sleep(3)  # until its ranks are at work
    assert started.poll() is None
    began = time.monotonic()
    os.kill(started.pid, number)
    assert started.wait(PATIENCE_S) == 128 + number
    eventually(lambda: not session_of(started.pid), "ranks go on without their parent")
    took_s = time.monotonic() - began
    assert list((tmp_path / "tmp").glob("weft-*")) == []
    assert took_s < PROMISED_S


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = OwnedFolder("weft-test-")
    (mine.path / "kept").touch()
    dead = tmp_path / "weft-test-dead"
    dead.mkdir()
    (dead / ".owner").touch()
    foreign = tmp_path / "weft-test-foreign"
    foreign.mkdir()
    other = OwnedFolder("weft-test-")
    assert (mine.path / "kept").exists() and other.path.exists() and foreign.exists()
    assert not dead.exists()
    for folder in (mine, other):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    program = (
        "import os, signal; from weft.runtime.endings import ended_by_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with ended_by_signals(): os.kill(os.getpid(), signal.SIGHUP); print('goes on')"
    )
    ran = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert ran.stdout == "goes on\n", ran.stderr
