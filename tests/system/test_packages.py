# SPDX-License-Identifier: Apache-2.0
"""``tools/packages``: what the system lacks is named with what it is for, and with the line that installs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from programs import ROOT

TOOLS = ["bash", "sh", "env", "dirname", "id", "grep", "sed", "head", "awk", "cut", "ldconfig", "cat"]


def packages(task: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a machine that has the programs in ``path`` alone."""
    environment = {"PATH": str(path), "PACKAGES": "no"} | variables
    return subprocess.run(
        ["/bin/bash", ROOT / "tools" / "packages", task],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def bare(folder: Path) -> Path:
    """Return a folder with the programs that every Debian has, and an apt-get that notes its arguments."""
    folder.mkdir()
    search = [*os.environ["PATH"].split(":"), "/usr/sbin", "/sbin"]
    for name in TOOLS:
        found = next(path for path in (Path(place) / name for place in search) if path.exists())
        (folder / name).symlink_to(found)
    program(folder, "apt-get", f'echo "$@" >>{folder}/asked')
    program(folder, "apt-cache", 'case $2 in clang-2?|lld-2?) exit 1 ;; *) echo "Package: $2" ;; esac')
    return folder


def test_what_is_missing_is_listed_with_the_line_that_installs_it(tmp_path: Path) -> None:
    path = bare(tmp_path / "bin")
    ran = packages("test", path)
    assert ran.returncode == 0, ran.stderr
    assert "packages: missing: clang 17 or newer with lld: kernels compiled for AMD's GPUs" in ran.stdout
    (line,) = (line for line in ran.stdout.splitlines() if "to install: " in line)
    assert "apt-get install -y make" in line and "clang-19 lld-19" in line, line
    assert not (path / "asked").exists()


def test_without_what_guests_need_their_tests_do_not_begin(tmp_path: Path) -> None:
    ran = packages("rdma", bare(tmp_path / "bin"))
    assert ran.returncode == 1, ran.stdout
    assert "packages: missing: QEMU: guests without KVM" in ran.stdout
    (line,) = (line for line in ran.stdout.splitlines() if "to install: " in line)
    assert "qemu-system-x86" in line and "busybox-static" in line, line


def test_root_installs_what_is_missing_and_says_so_first(tmp_path: Path) -> None:
    path = bare(tmp_path / "bin")
    (path / "id").unlink()
    program(path, "id", "echo 0")
    ran = packages("ci", path, PACKAGES="yes")
    asked = (path / "asked").read_text().splitlines()
    assert "update" in asked[0]
    assert "install -y --no-install-recommends make" in asked[1] and " ccache" in asked[1]
    assert ran.stdout.startswith(
        "packages: installing with apt-get (PACKAGES=no leaves the system as it is): make"
    )


def test_nothing_is_asked_where_all_is_there(tmp_path: Path) -> None:
    path = bare(tmp_path / "bin")
    (path / "ldconfig").unlink()
    program(path, "ldconfig", "echo libfabric.so.1")
    for name in ("make", "g++", "python3"):
        program(path, name, 'case "$*" in *dumpversion*) echo 13 ;; esac; exit 0')
    ran = packages("build", path, WEFT_CXX=str(path / "g++"))
    assert ran.stdout == "packages: everything for 'build' is installed\n"


def test_the_demo_asks_for_what_the_readmes_examples_need(tmp_path: Path) -> None:
    path = bare(tmp_path / "bin")
    (path / "ldconfig").unlink()
    program(path, "ldconfig", "true")
    said = packages("build", path).stdout
    assert "missing: libfabric: transfers" in said and " libfabric1" in said.partition("to install: ")[2], (
        said
    )


def test_what_the_system_does_not_package_is_not_asked_for(tmp_path: Path) -> None:
    path = bare(tmp_path / "bin")
    program(path, "apt-cache", 'case $2 in clang-*|lld-*) exit 1 ;; *) echo "Package: $2" ;; esac')
    said = packages("test", path).stdout
    assert "missing: clang 17 or newer" in said
    assert "clang-" not in said.partition("to install: ")[2]


def test_tests_run_without_googletest_and_say_so(tmp_path: Path) -> None:
    """CMake warns that GoogleTest is missing and makes no target for the C++ tests: Python's run all the same."""
    build, programs = tmp_path / "build" / "cp", tmp_path / ".venv" / "bin"
    build.mkdir(parents=True)
    programs.mkdir(parents=True)
    (tmp_path / ".venv" / "weft-installed").touch()  # by tools/setup wheel
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "run-tests"
    script.write_text((ROOT / "tools" / "run-tests").read_text())
    program(tmp_path, "cmake", 'case $1 in --build) exit 1 ;; *) echo "GoogleTest is missing" ;; esac')
    program(programs, "python", 'echo "ran $@"')
    (build / "CMakeCache.txt").write_text(f"CMAKE_COMMAND:INTERNAL={tmp_path}/cmake\n")
    (build / "weft_tests").touch()  # of a time when it was there
    ran = subprocess.run(["/bin/bash", script, "tests/unit"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "GoogleTest is missing: apt-get install libgtest-dev libgmock-dev" in ran.stdout
    assert "--cpp-tests=build/cp/weft_tests tests/unit" in ran.stdout
    assert not (build / "weft_tests").exists()
