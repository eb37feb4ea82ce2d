# SPDX-License-Identifier: Apache-2.0
"""tools/nccl-tests-check: what it reads from programs of nccl-tests, of which scripts stand in for two."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("weft.bench", reason="needs weft.bench, which this build is without")
TOOL = Path(__file__).parents[2] / "tools" / "nccl-tests-check"
_LINES = """#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong
        1024           256     float    none       0    21.96    0.05    0.05      0    14.48    0.07    0.07{wrong}
    33554432       8388608     float    none       0   145.28  230.96  230.96      0   129.76  258.59  258.59    N/A
# Out of bounds values : 0 OK
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("nccl_tests_check", str(TOOL))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, loader.name, module)  # dataclasses look there
    loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    return module


def _program(folder: Path, name: str, text: str, code: int = 0) -> None:
    program = folder / f"{name}_perf"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    program.chmod(0o755)


def test_rows_are_what_the_programs_print(tool: ModuleType, tmp_path: Path) -> None:
    _program(tmp_path, "broadcast", _LINES.format(wrong="      0"))
    rows, failed = tool.measure(["broadcast"], 2, 1, time.monotonic() + 60)
    assert not failed and [row.bytes for row in rows] == [1024, 33554432]
    assert (rows[0].us, rows[0].baselines) == (21.96, {"nccl": 21.96})
    assert rows[0].extra == {
        "in_place_us": 14.48,
        "nccl_in_place_us": 14.48,
        "nccl_us_min": 21.96,
        "nccl_us_max": 21.96,
    }
    assert all(row.checked for row in rows)


def test_medians_of_rounds_count(tool: ModuleType, tmp_path: Path) -> None:
    """Each round of the program takes longer: Weft's are the first, third and fifth."""
    runs = tmp_path / "runs"
    line = f"1024 256 float none 0 $(wc -l < {runs}) 0 0 0 $((10 + $(wc -l < {runs}))) 0 0 0"
    program = tmp_path / "scatter_perf"
    program.write_text(f"#!/bin/sh\necho >> {runs}\necho {line}\n")
    program.chmod(0o755)
    (row,), failed = tool.measure(["scatter"], 2, 3, time.monotonic() + 60)
    assert not failed and list(row.samples_us) == [1, 3, 5]
    assert (row.us, row.extra["in_place_us"], row.baselines["nccl"]) == (3, 13, 4)
    assert (row.extra["nccl_us_min"], row.extra["nccl_us_max"]) == (2, 6)


def test_wrong_results_and_failures_are_told(tool: ModuleType, tmp_path: Path) -> None:
    _program(tmp_path, "reduce", _LINES.format(wrong="      3"))
    rows, failed = tool.measure(["reduce"], 2, 1, time.monotonic() + 60)
    assert failed and [row.checked for row in rows] == [False, True]
    _program(tmp_path, "gather", "", 3)
    assert tool.measure(["gather"], 2, 1, time.monotonic() + 60) == ([], True)
    assert tool.measure(["gather"], 2, 1, time.monotonic()) == ([], True)


def test_lines_say_type_reduction_and_root(tool: ModuleType) -> None:
    """The last is one of hypercube, which names no reduction."""
    lines = tool.lines_of(
        "  1000  250   float  avg  1  8.1  0.1  0.1  0  9.1  0.1  0.1  0\n"
        "  1000  125  double  max  0  8.1  0.1  0.1  0  9.1  0.1  0.1  2\n"
        "  1000  500    half      -1  8.1  0.1  0.1  0  9.1  0.1  0.1  0\n"
    )
    what = [(line.type, line.reduction, line.root, line.is_right) for line in lines]
    assert what == [
        ("float", "avg", "1", True),
        ("double", "max", "0", False),
        ("half", "", "-1", True),
    ]
    assert (lines[2].us, lines[2].in_place_us) == (8.1, 9.1)


def _recording(folder: Path, name: str, wrong_with: str = "no such option") -> Path:
    """Write a program that notes its options, and has a wrong result where it finds one of them."""
    runs = folder / "runs"
    line = "1000 250 float sum 1 8 0 0 0 9 0 0"
    program = folder / name
    program.write_text(
        f"#!/bin/sh\necho {name} $* >> {runs}\n"
        f'case " $* " in *" {wrong_with} "*) echo {line} 3;; *) echo {line} 0;; esac\n'
        "echo weft info: ncclSend 0 + 4 ncclAllReduce 2 + 0 >&2\n"
    )
    program.chmod(0o755)
    return runs


def test_exhaustive_checks_run_every_way(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("reduce_perf", "reduce_perf_mpi", "alltoallv_perf", "alltoallv_perf_mpi"):
        runs = _recording(tmp_path, name)
    launcher = tmp_path / "mpi" / "bin" / "mpirun"
    launcher.parent.mkdir(parents=True)
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    until = time.monotonic() + 60
    assert tool.check_all(["reduce", "all_to_allv"], 2, tmp_path / "mpi", 3, until) == 0
    options = " ".join(tool.CHECK_OPTIONS)
    every = {"reduce": "-d all -o all -r -1", "alltoallv": "-d all"}
    ways = [("", "-g 2"), ("", "-t 2 -g 1 -p 1"), ("_mpi", "-g 1")]
    wanted = {
        f"{name}_perf{suffix} {where} {options} {what}{graph}"
        for name, what in every.items()
        for suffix, where in ways
        for graph in ("", " -G 2")
    }
    wanted.remove(f"reduce_perf -g 2 {options} -d all -o all -r -1")  # a run for each type instead
    wanted |= {f"reduce_perf -g 2 {options} -d {kind} -o all -r -1" for kind in tool.TYPES}
    ran = runs.read_text().splitlines()
    assert len(ran) == len(wanted) and set(ran) == wanted
    said = capsys.readouterr().out
    assert "23 of 23 runs passed" in said
    assert "passed   all_to_allv, every type, graphs, a process for each GPU: 1 lines" in said
    assert "NCCL served some of ncclSend\n" in said


def test_exhaustive_checks_tell_what_is_wrong(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _recording(tmp_path, "broadcast_perf", wrong_with="-G 2")
    assert tool.check_all(["broadcast"], 2, None, 2, time.monotonic() + 60) == 1
    said = capsys.readouterr().out
    assert "WRONG    broadcast, every type, graphs, one process" in said
    assert "type='float', reduction='sum', root='1'" in said
    assert "passed   broadcast, every type, eager, one process" in said
    assert "a process for each GPU: left out: there is no MPI" in said and "2 of 4 runs passed" in said
    _program(tmp_path, "broadcast", "", 3)
    assert tool.check_all(["broadcast"], 2, None, 2, time.monotonic() + 60) == 1
    assert "FAILED   broadcast, every type, eager, one process: status 3" in capsys.readouterr().out
    assert tool.check_all(["broadcast"], 2, None, 2, time.monotonic()) == 1
    assert "NOT RUN  broadcast, every type, eager, one process: the time is up" in capsys.readouterr().out


def test_a_hypercube_of_three_is_left_out(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _program(tmp_path, "hypercube", "nRanks 3 is not a power of 2, skipping\n")
    assert tool.check_all(["hypercube"], 3, None, 1, time.monotonic() + 60) == 0
    assert "left out hypercube" in capsys.readouterr().out


def test_an_mpi_is_found_by_its_folder(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("include/mpi.h", "lib/libmpi.so"):
        assert tool.mpi_home() is None
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert tool.mpi_home() == tmp_path


def test_calls_that_the_sources_lack_are_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("common.mk", "reduce.cu", "gather.cu"):
        (tmp_path / "src" / name).touch()
    command = [sys.executable, str(TOOL), str(tmp_path), "--calls", "reduce,hypercube"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--calls: got hypercube, allowed, as these sources have: reduce, gather" in done.stderr


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "src/common.mk" in done.stderr
