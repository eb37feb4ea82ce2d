# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start are forks of a process that has torch, and no test can tell (tests/quick_python.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import PYTHON, environment, run_program, torchrun

TELLS = """
import json, os, sys
print(json.dumps({
    "torch": "torch" in sys.modules, "weft": "weft.errors" in sys.modules, "arguments": sys.argv[1:],
    "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("A_VARIABLE"), "umask": os.umask(0),
    "files": sorted(os.listdir("/proc/self/fd")), "path": sys.path[0], "input": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "session": os.getsid(0) == os.getsid(os.getppid()),
}))
"""


def told(python: list[str], folder: Path, starts: list[str]) -> dict[str, object]:
    ran = subprocess.run(
        [*python, *starts, "one", "-m"],
        cwd=folder,
        env=environment() | {"A_VARIABLE": "a value"},
        input="an input",
        capture_output=True,
        text=True,
        timeout=240,
        umask=0o27,
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("kind", ["-c", "-m", "a file"])
def test_a_program_finds_what_it_finds_in_an_interpreter_of_its_own(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    starts = {"-c": ["-c", TELLS], "-m": ["-u", "-m", "tells"], "a file": ["tells.py"]}[kind]
    forked, own = (told(python, tmp_path, starts) for python in (PYTHON, [sys.executable]))
    assert forked.pop("torch") and not own.pop("torch")
    assert not forked.pop("session") and own.pop("session")
    forked.pop("weft"), own.pop("weft")  # of an installed Weft, an entry point that torch loads
    assert forked == own


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import atexit; atexit.register(print, 'at exit', file=__import__('sys').stderr)", 0, "at exit\n"),
        ("def f(): 1 / 0\nf()", 1, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os; os.abort()", -6, None),
        ("import does_not_exist", 1, None),
        ("this is no Python", 1, None),
    ],
)
def test_it_ends_as_in_an_interpreter_of_its_own(
    code: str, status: int, said: str | None, tmp_path: Path
) -> None:
    forked, own = (run_program([*python, "-c", code], tmp_path) for python in (PYTHON, [sys.executable]))
    assert forked.returncode == own.returncode == status
    if said is None:
        assert own.stderr.splitlines()[-1] in forked.stderr.splitlines()
    else:
        assert forked.stderr == own.stderr == said


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"took {number}"))
print(os.getpid(), flush=True)
time.sleep(200)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*PYTHON, "-c", WAITS], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        program = int(started.stdout.readline())
        assert program != started.pid
        started.send_signal(number)
        assert started.stderr.read() == ("took 15\n" if number == signal.SIGTERM else "")
        assert started.wait(60) == (1 if number == signal.SIGTERM else -9)
    until = time.monotonic() + 60
    while Path(f"/proc/{program}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_does_not_end_in_time_says_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ndef here():\n    time.sleep(200)\nhere()\n")
    with pytest.raises(AssertionError, match=r"did not end in 6 s[^$]*waits.py\", line 3 in here"):
        run_program([*torchrun(2), "waits.py"], tmp_path, timeout_s=6)


def test_what_needs_an_interpreter_of_its_own_gets_one(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules)"
    for options, more in (
        (["-B"], {}),
        ([], {"PYTHONHASHSEED": "7"}),
        ([], {"LD_LIBRARY_PATH": "/nowhere"}),
        ([], {"TESTS_ZYGOTE": ""}),
    ):
        ran = run_program([*PYTHON, *options, "-c", code], tmp_path, more=more)
        assert ran.stdout == "False\n", (options, more, ran.stderr)
    reader, writer = os.pipe()
    ran_with_file = subprocess.run(
        [*PYTHON, "-c", code], env=environment(), pass_fds=[writer], capture_output=True, text=True
    )
    assert ran_with_file.stdout == "False\n"
    os.close(reader), os.close(writer)
