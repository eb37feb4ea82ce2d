# SPDX-License-Identifier: Apache-2.0
"""Tests that run in several processes: each runs once, on its own, and what happens to it is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import weft
import workers

CONFTEST = """
import pytest
import workers

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: ...")
    config.addinivalue_line("markers", "group(name): ...")
    config.pluginmanager.register(workers.Workers(2))
"""
# Each test leaves a line: its name, its process, how many other processes run tests.
HEAD = """
import os, signal, pytest
from pathlib import Path

LOG = Path(__file__).parent / "log"

@pytest.fixture(autouse=True)
def noted(request):
    with LOG.open("a") as log:
        log.write(f"{request.node.name} {os.getpid()}\\n")
"""


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[str, dict[str, str]]:
    """Run files of tests with two workers; return what pytest prints, and the process of each test."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / name).write_text(HEAD + text)
    path = [str(Path(module.__file__ or "").parents[level]) for module, level in ((workers, 0), (weft, 1))]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder)]
    ran = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = (folder / "log").read_text().split("\n") if (folder / "log").exists() else []
    ended = [line.split() for line in lines if line]
    assert len({name for name, _ in ended}) == len(ended), "no test runs twice"
    return ran.stdout + ran.stderr, dict(ended)


def test_a_file_has_one_worker_and_what_tests_print_is_their_own(tmp_path: Path) -> None:
    text = "def test_{0}_1(capfd):\n    os.system('echo out'); assert capfd.readouterr().out == 'out\\n'\n"
    text += "def test_{0}_2(): print('said by {0}'); assert '{0}' != 'b'\n"
    said, process = run(tmp_path, {f"test_{name}.py": text.format(name) for name in "abc"})
    assert "1 failed, 5 passed" in said
    assert "said by b" in said and "said by a" not in said
    assert all(process[f"test_{name}_1"] == process[f"test_{name}_2"] for name in "abc")
    assert str(os.getpid()) not in process.values()


def test_a_test_that_ends_its_worker_has_failed_and_the_others_run(tmp_path: Path) -> None:
    text = "def test_1(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_2(): pass\n"
    said, process = run(tmp_path, {"test_a.py": text})
    assert "1 failed, 1 passed" in said
    assert "it ended the process that ran it: -9" in said
    assert process["test_1"] != process["test_2"]


def test_files_that_are_alone_run_at_the_end(tmp_path: Path) -> None:
    files = {f"test_{name}.py": f"def test_{name}(): pass\n" for name in "bcd"}
    alone = "pytestmark = pytest.mark.alone\ndef test_a(): pass\n"
    said, process = run(tmp_path, {"test_a.py": alone} | files)
    assert "4 passed" in said
    assert list(process)[-1] == "test_a"


def test_groups_of_a_file_are_taken_apart_and_a_limit_of_failures_holds(tmp_path: Path) -> None:
    text = "@pytest.mark.parametrize('n', [pytest.param(i, marks=pytest.mark.group(i)) for i in range(4)])\n"
    said, process = run(tmp_path, {"test_a.py": text + "def test_group(n): assert n < 0\n"}, "-x")
    assert "stopping after 1 failures" in said
    assert 1 <= len(process) <= 3
