# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start as users do: another Python, in a folder of its own, with the same Weft.

torch is imported in them already (tests/quick_python.py says how). A test of what an interpreter does by itself starts
sys.executable: of imports, of the process's number, of its session, of its end by a signal that cannot be handed on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import weft

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [str(ROOT / "tests" / "quick_python.py")]
WEFT = [*PYTHON, "-m", "weft"]
os.environ["TESTS_PYTHON"] = sys.executable


def torchrun(num_ranks: int) -> list[str]:
    """Return the command that starts what follows on so many ranks."""
    return [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def environment() -> dict[str, str]:
    """Return this process's environment, in which a program of another folder finds the same Weft."""
    path = [str(Path(weft.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    ranks = {"PYTHON_EXEC": PYTHON[0]}  # what torchrun starts ranks with
    return {**os.environ, **ranks, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_program(
    command: list[str], folder: Path, timeout_s: float = 240, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``, with ``more`` in its environment, and return what it printed.

    Raises: AssertionError if it does not end in time, with what it printed and where each of its processes was.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment() | {"PYTHONFAULTHANDLER": "1"} | (more or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            out, err = program.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # The youngest first: a launcher that sees its ranks end, ends them all.
            for pid in sorted([program.pid, *_descendants(program.pid)], reverse=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            out, err = program.communicate(timeout=30)
            raise AssertionError(f"{command} did not end in {timeout_s:.0f} s\n{out}\n{err}") from None
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, out, err)


# An import of torch takes seconds, which processes forked after it do not need.
_FORKS = """
import json, os, sys, traceback
import torch
code, environments = json.loads(sys.argv[1])
for name, given in environments.items():
    child = os.fork()
    if child == 0:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_CREAT | os.O_WRONLY, 0o600), number)
        os.environ.update(given)
        status = 0
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)
"""


def run_in_each(
    environments: dict[str, dict[str, str]], code: str, folder: Path, more: dict[str, str]
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run ``code`` in a Python of its own for each environment, and return what each printed. torch is there already.

    Raises: AssertionError if one does not run.
    """
    ran = run_program([*PYTHON, "-c", _FORKS, json.dumps([code, environments])], folder, more=more)
    statuses = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert set(statuses) == set(environments), ran.stderr
    return {
        name: subprocess.CompletedProcess(
            [code], status, *((folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        )
        for name, status in statuses.items()
    }


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        kind, _, program = Path(f"/proc/{pid}/comm").read_text().partition(" ")
    except FileNotFoundError:  # it has ended
        return []
    if kind == "for":  # quick_python.py, for this program
        children.append(program)
    return [each for child in map(int, children) for each in (child, *_descendants(child))]
