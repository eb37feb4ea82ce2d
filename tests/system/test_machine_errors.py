# SPDX-License-Identifier: Apache-2.0
"""What is the matter with the machine, or with what was typed, is said in a line and before any work is done."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from programs import PYTHON, ROOT, WEFT, run_program

from weft import _core
from weft.collectives.executor import Call, Executor
from weft.collectives.library import build
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks

TYPED = {
    "bench transfer server --port 99999": "--port: got 99999, allowed: 0 (any) to 65535",
    "bench transfer client here:99999": "address: got here:99999, allowed: HOST:PORT",
    "bench moe --device cpu --delay 9:500 --ranks 2": "delay: got 9:500, allowed: a rank of 0 to 1",
    "bench moe --plot x.xyz": "--plot/--compare: got x.xyz, allowed: a name that ends in .png",
    "compile ring.py --ranks 2 --option x=1": "options: got x, allowed: none for program() of ring.py",
}


@pytest.mark.parametrize("command", TYPED)
def test_a_mistake_is_named_before_the_work(command: str, tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text("def program(ranks): pass\n")
    ran = run_program([*WEFT, *command.split()], tmp_path, timeout_s=100)
    assert ran.returncode in (1, 2)
    assert TYPED[command] in ran.stderr.splitlines()[-1], ran.stderr
    assert "Traceback" not in ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"ring.py"}


@pytest.mark.parametrize("example", ["transfer_kv_cache.py", "transfer_weight_broadcast.py"])
def test_an_example_says_that_libfabric_is_missing(example: str, tmp_path: Path) -> None:
    missing = {"WEFT_LIBFABRIC": "/nowhere/libfabric.so"}
    ran = run_program([*PYTHON, str(ROOT / "examples" / example)], tmp_path, more=missing)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert " cannot be used here: libfabric: /nowhere/libfabric.so: cannot open" in line


def _sum_compiled(rank: Rank, cache: str, path: str) -> None:
    """Run a program compiled for the CPU: in the cache, or where the cache cannot serve, beside it."""
    os.environ |= {"WEFT_CACHE_DIR": cache, "PATH": path}
    logging.getLogger().handlers.clear()  # pytest's, which would get the lines
    _core.config_reload()
    executor = Executor(Communicator(rank.group, timeout_s=100).core)
    program = executor.load(build("allreduce_allpairs", rank.size).compile())
    tensor = torch.ones(64)
    executor.run(program, Call(tensor.data_ptr(), tensor.data_ptr(), 64, 0, compiled=True))
    assert tensor.eq(rank.size).all()


def log_of_compiling(capfd: pytest.CaptureFixture[str], cache: Path, path: str = os.environ["PATH"]) -> str:
    run_ranks(2, _sum_compiled, str(cache), path)
    return capfd.readouterr().err


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")


@needs_compiler
def test_a_cache_is_made_for_its_owner_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert "kernel cache" not in log_of_compiling(capfd, tmp_path / "cache")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()}
    assert set(modes.values()) == {0o700}, modes
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    said = log_of_compiling(capfd, cache)
    assert f"{cache}: mode 0777, allowed: writable by its owner alone; chmod go-w {cache}" in said
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_made_costs_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    said = log_of_compiling(capfd, Path("/proc/weft"))  # where not even root makes a folder
    assert (
        "the kernel cache cannot be used, so every process compiles its kernels again: /proc/weft: " in said
    )
    assert "set WEFT_CACHE_DIR" in said


@needs_compiler
def test_a_full_cache_costs_a_warning(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cache, tools = tmp_path / "cache", tmp_path / "bin"
    tools.mkdir()
    # A compiler that finds no room below the cache, as the linker does.
    (tools / "c++").write_text(
        f"""#!/bin/sh
case "$*" in *{cache}/*) echo "ld: final link failed: No space left on device" >&2; exit 1 ;; esac
exec {shutil.which("c++")} "$@"
"""
    )
    (tools / "c++").chmod(0o755)
    said = log_of_compiling(capfd, cache, f"{tools}:{os.environ['PATH']}")
    assert f"{cache}: No space left on device (set WEFT_CACHE_DIR)" in said
    assert list(cache.iterdir()) == []
