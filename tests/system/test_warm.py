# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled ahead, and caches that are shipped. NVRTC without a GPU, and the CPU's compiler."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from programs import PYTHON, WEFT, environment, run_program

from weft import _core, cli
from weft.collectives.executor import Call, Executor
from weft.collectives.library import build
from weft.errors import Error
from weft.runtime import nvrtc, warm
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find().nvrtc is None, reason="no NVRTC (pip install nvidia-cuda-nvrtc)"
)
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")
SMALL = ["--ranks", "2", "--arch", "sm_90a", "--mode", "ht", "--formats", "bf16"]

GENERATED = """
namespace weft { struct ValueArgs { int64_t* out; }; struct ValueMesh {};
template <class Mesh, class Shape> WEFT_KERNEL void value(const ValueArgs& a, const Mesh&, const Shape&) {
  *a.out = Shape::value; } }
"""


def recorded(target: str) -> str:
    """A line as a run leaves it."""
    key = {
        "file": "kernels/target/target.h",
        "name": "value",
        "args_type": "ValueArgs",
        "mesh_type": "ValueMesh",
    }
    rest = {"shape": [["value", 7]], "threads_per_block": 32, "blocks_per_sm": 1, "prelude": GENERATED}
    return json.dumps({"target": target} | key | rest) + "\n"


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64, "num_experts_per_tok": 2, "n_routed_experts": 4},
        {"model_type": "any", "text_config": {"hidden_size": 64, "moe_topk": 2, "num_local_experts": 4}},
    ],
)
def test_a_model_is_read_from_its_configuration(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert warm.read_model(tmp_path) == warm.Model(64, 2, 4)
    assert warm.read_model(tmp_path / "config.json", experts=8).experts == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "without any of hidden_size"), ("[]", "a JSON object"), ("{", "a configuration in JSON")],
)
def test_a_configuration_that_lacks_something_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Error, match=words):
        warm.read_model(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "model: got none, allowed: a config.json"),
        (["--hidden", "64"], "model: got none"),
        (["--hidden", "64", "--top-k", "2", "--experts", "4", "--arch", "hopper"], "--arch: got hopper"),
        (
            ["--hidden", "64", "--top-k", "2", "--experts", "4", "--arch", "sm_80", "--mode", "x"],
            "--mode: got x",
        ),
        (
            ["--hidden", "64", "--top-k", "2", "--experts", "4", "--arch", "sm_80", "--ranks", "0"],
            "--ranks: got 0",
        ),
        (["--hidden", "-1", "--top-k", "2", "--experts", "4", "--arch", "sm_80"], "--hidden: got -1"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_the_kernels_of_a_model_are_those_that_its_calls_launch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hidden", "7168", "--top-k", "8", "--experts", "256", "--arch", "sm_90a", "--list"]
    assert cli.main(["warm", *arguments]) == 0
    listed = capsys.readouterr().out
    # As DeepSeek-V3's calls launch them: tests/kernels compiles the same constants.
    for row in ("dispatch_rows", "combine_rows", "low_latency_dispatch", "low_latency_combine"):
        typical = next(
            kernel.typical
            for kernel in _core.kernel_table()
            if kernel.name == row and kernel.mesh_type == "MappedMesh"
        )
        assert typical.split(";")[0] in listed


def is_cached(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Ask a new process for the kernels of SMALL."""
    program = """
import sys
from weft import _core
for key in _core.high_throughput_keys(ranks=2, row_bytes=int(sys.argv[1]), scale_words=0, top_k=2, element=2,
                                      combine_row_bytes=int(sys.argv[1]), architecture="sm_90a"):
    print(_core.compile_kernel(key, "sm_90a", _core.config().cache_dir).is_cached)
"""
    return run_program([*PYTHON, "-c", program, settings.pop("row_bytes", "128")], folder, more=settings)


@needs_nvrtc
def test_a_shipped_cache_serves_where_nothing_may_be_compiled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_experts_per_tok": 2, "num_experts": 4}')
    made = [*WEFT, "warm", "config.json", *SMALL, "--cache", str(tmp_path / "made"), "--for-image"]
    first = run_program(made, tmp_path)
    assert first.returncode == 0, first.stderr
    assert "6 compiled in" in first.stdout
    again = run_program([*made[:-1]], tmp_path)
    assert "0 compiled in" in again.stdout and "6 were there" in again.stdout

    moved = (tmp_path / "made").rename(tmp_path / "image")
    assert (moved.stat().st_mode & 0o777, *{file.stat().st_mode & 0o777 for file in moved.iterdir()}) == (
        0o555,
        0o444,
    )
    own = tmp_path / "own"
    settings = {"WEFT_CACHE_DIR": str(own), "WEFT_CACHE_PATH": f"/nowhere:{moved}", "WEFT_COMPILE": "never"}
    # With the compiler that made them, and where there is none.
    for more in ({}, {"WEFT_NVRTC": "/nowhere/libnvrtc.so"}):
        ran = is_cached(tmp_path, **settings, **more)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == ["True"] * 4
    assert not own.exists()
    other = is_cached(tmp_path, **settings, row_bytes="256")
    assert "kernel dispatch_rows for sm_90a" in other.stderr
    assert "row_bytes=256" in other.stderr and "WEFT_COMPILE is never; `weft warm`" in other.stderr
    moved.chmod(0o755)  # so that the test's folder can be removed


@needs_compiler
def test_a_recorded_run_is_compiled_for_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(recorded("cpu") * 2)
    command = [*WEFT, "warm", "--recorded", "run.jsonl", "--cache", "cache"]
    first, second = run_program(command, tmp_path), run_program(command, tmp_path)
    assert "1 compiled in" in first.stdout, first.stdout + first.stderr
    assert "0 compiled in" in second.stdout and "1 were there" in second.stdout
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".so"]


def test_a_record_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text(recorded("cpu") + '{"target": "cpu"}\n')
    assert cli.main(["warm", "--recorded", str(tmp_path / "run.jsonl")]) == 1
    assert "--recorded: got line 2 of" in capsys.readouterr().err


ELEMENTS = {torch.float32: 0, torch.int32: 8}


def _broadcasts(rank: Rank, folder: str) -> None:
    """Broadcast floats, then integers, each by the program's own kernel."""
    os.environ |= {"WEFT_RECORD_KERNELS": f"{folder}/run.jsonl", "WEFT_CACHE_DIR": f"{folder}/cache"}
    _core.config_reload()
    executor = Executor(Communicator(rank.group, timeout_s=60).core)
    program = executor.load(build("broadcast_chain", rank.size).compile())
    for dtype in (torch.float32, torch.int32):
        tensor = torch.full((64,), rank.rank, dtype=dtype)
        address = tensor.data_ptr()
        executor.run(program, Call(address, address, 64, ELEMENTS[dtype], compiled=True))
        assert tensor.sum() == 0


@needs_compiler
def test_a_run_writes_down_its_kernels_and_what_only_moves_data_has_one_for_each_width(
    tmp_path: Path,
) -> None:
    run_ranks(2, _broadcasts, str(tmp_path), deadline_s=200)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} == {"run_compiled"}
    assert len(rows) == 2, "one of each rank"
    ahead = run_program([*WEFT, "warm", "--recorded", "run.jsonl", "--cache", "cache"], tmp_path)
    assert "0 compiled in" in ahead.stdout and "2 were there" in ahead.stdout, ahead.stdout + ahead.stderr


@needs_nvrtc
def test_compiling_is_said_in_one_line(tmp_path: Path) -> None:
    ran = is_cached(tmp_path, WEFT_CACHE_DIR=str(tmp_path / "cache"), WEFT_LOG="info")
    assert ran.stderr.count("jit: compiled dispatch_rows for sm_90a in ") == 1, ran.stderr
    quiet = is_cached(tmp_path, WEFT_CACHE_DIR=str(tmp_path / "other"))
    assert quiet.stderr == ""


@needs_nvrtc
def test_a_terminal_shows_what_is_compiled(tmp_path: Path) -> None:
    program = (
        "from weft import _core; key, *_ = _core.high_throughput_keys(ranks=2, row_bytes=64, scale_words=0, "
    )
    program += (
        "top_k=2, element=2, combine_row_bytes=64, architecture='sm_80'); _core.compile_kernel(key, 'sm_80')"
    )
    terminal, inside = pty.openpty()
    child = subprocess.Popen([*PYTHON, "-c", program], cwd=tmp_path, env=environment(), stderr=inside)
    os.close(inside)
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:  # the last who could write has gone
        pass
    assert child.wait(timeout=120) == 0
    os.close(terminal)
    assert b"weft: compiling dispatch_layout for sm_80, once" in said
    assert b"weft: compiled dispatch_layout for sm_80 in " in said and said.endswith(b" s\r\n")
