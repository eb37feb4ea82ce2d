# SPDX-License-Identifier: Apache-2.0
"""compat/nccl on host memory: a C program for NCCL, linked with our libnccl, as several processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import weft
from weft.collectives.book import Part, write_book
from weft.collectives.tuned_tables import table_name, write_table

SOURCE = Path(__file__).with_name("nccl_ranks.c")
LIBRARY = Path(weft.__file__).parent / "nccl"
HEADER = Path(__file__).parents[2] / "compat" / "nccl"

pytestmark = pytest.mark.skipif(
    not (LIBRARY / "libnccl.so.2").exists() or not shutil.which("cc"),
    reason="needs a build with libnccl.so.2, and a C compiler",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("nccl") / "nccl_ranks"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-I", str(HEADER), "-pthread"]
    subprocess.run(
        ["cc", *flags, str(SOURCE), "-o", str(target), str(LIBRARY / "libnccl.so.2")], check=True, timeout=100
    )
    return target


def _run(program: Path, test: str, ranks: int, folder: Path, **options: str) -> list[tuple[int, str]]:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(LIBRARY),
        "WEFT_NCCL_LIBRARY": "none",
        "WEFT_NCCL_DEVICE": "cpu",
        "WEFT_CACHE_DIR": str(folder / "cache"),
        "WEFT_TIMEOUT_S": "60",
        **options,
    }
    processes = [
        subprocess.Popen(
            [program, test, str(rank), str(ranks), str(folder / "id")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [(p.wait(), p.stderr.read()) for p in processes for _ in [0] if p.stderr]
    finally:
        for process in processes:
            process.kill()


def _pass(program: Path, test: str, ranks: int, folder: Path, **options: str) -> str:
    answers = _run(program, test, ranks, folder, **options)
    assert [code for code, _ in answers] == [0] * ranks, answers
    return answers[0][1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_type_and_reduction(program: Path, tmp_path: Path, ranks: int) -> None:
    _pass(program, "collectives", ranks, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_operators(program: Path, tmp_path: Path, ranks: int) -> None:
    _pass(program, "operators", ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("test", ["transfers", "repeats", "splits", "groups", "forks"])
def test_calls(program: Path, tmp_path: Path, test: str, ranks: int) -> None:
    _pass(program, test, ranks, tmp_path)


@pytest.fixture(scope="module", params=["LL", "Simple"])
def exchanges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a program book for CPUs in which exchanges serve all calls that have them."""
    folder, names = tmp_path_factory.mktemp("book"), ("allreduce", "allgather", "reducescatter", "alltoall")
    steps = ("1step", "allpairs") if request.param == "LL" else ("allpairs",)
    rooted = ("broadcast", "reduce", "gather", "scatter")
    for ranks in (2, 3, 4, 5):
        rows = [
            {
                "collective": name,
                "ranks": ranks,
                "max_bytes": 4096 if at == 0 and len(steps) == 2 and name == "allreduce" else None,
                "algorithm": f"{name}_{step}",
                "protocol": request.param,
                "mode": "exchange",
            }
            for name in names
            for at, step in enumerate(steps if name == "allreduce" else ("allpairs",))
        ] + [
            {
                **{"collective": name, "ranks": ranks, "max_bytes": None, "algorithm": f"{name}_flat"},
                **{"protocol": request.param, "mode": "exchange"},
            }
            for name in rooted
        ]
        write_table(folder / table_name("cpu", "test", ranks), "test", rows)
    write_book(folder / "exchanges.book", [Part("cpu", ranks, "test", folder) for ranks in (2, 3, 4, 5)])
    return str(folder / "exchanges.book")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_by_exchanges(program: Path, tmp_path: Path, exchanges: str, ranks: int) -> None:
    _pass(program, "collectives", ranks, tmp_path, WEFT_PROGRAM_BOOK=exchanges)


@pytest.mark.parametrize("test", ["operators", "transfers", "repeats", "splits"])
def test_calls_by_exchanges(program: Path, tmp_path: Path, exchanges: str, test: str) -> None:
    _pass(program, test, 3, tmp_path, WEFT_PROGRAM_BOOK=exchanges)


def test_a_silent_rank_and_an_abort_end_an_exchange(program: Path, tmp_path: Path, exchanges: str) -> None:
    options = {"WEFT_PROGRAM_BOOK": exchanges}
    answers = _run(program, "lost", 3, tmp_path, WEFT_TIMEOUT_S="2", WEFT_LOG="info", **options)
    assert [code for code, _ in answers] == [0] * 3, answers
    assert "collective all_reduce," in answers[0][1], answers  # an exchange's name; programs have others
    (tmp_path / "id").unlink()
    _pass(program, "aborts", 3, tmp_path, WEFT_LOG="error", **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_errors_are_results_and_sentences(program: Path, tmp_path: Path, ranks: int) -> None:
    _pass(program, "errors", ranks, tmp_path)


def test_a_silent_rank_is_an_error_by_the_deadline(program: Path, tmp_path: Path) -> None:
    _pass(program, "lost", 3, tmp_path, WEFT_TIMEOUT_S="2", WEFT_LOG="error")


@pytest.mark.parametrize("test", ["differ", "messages_differ"])
def test_calls_that_differ_are_errors(program: Path, tmp_path: Path, test: str) -> None:
    _pass(program, test, 2, tmp_path, WEFT_TIMEOUT_S="4", WEFT_LOG="error")


def test_abort_ends_a_call_of_another_thread(program: Path, tmp_path: Path) -> None:
    _pass(program, "aborts", 3, tmp_path, WEFT_LOG="error")


def test_several_communicators_in_one_process(program: Path, tmp_path: Path) -> None:
    _pass(program, "in_one_process", 1, tmp_path)


def test_threads_of_one_process(program: Path, tmp_path: Path) -> None:
    _pass(program, "in_threads", 1, tmp_path)


@pytest.mark.parametrize("reads", ["1", "0"])
def test_large_calls_in_one_process(program: Path, tmp_path: Path, reads: str) -> None:
    _pass(program, "in_one_process_large", 1, tmp_path, WEFT_PROCESS_READS=reads)


def test_large_calls_in_one_process_by_exchanges(program: Path, tmp_path: Path, exchanges: str) -> None:
    _pass(program, "in_one_process_large", 1, tmp_path, WEFT_PROGRAM_BOOK=exchanges)


def test_layouts_are_those_of_the_abi(program: Path, tmp_path: Path) -> None:
    _pass(program, "abi", 1, tmp_path)


def test_the_report_counts_what_was_served(program: Path, tmp_path: Path) -> None:
    report = _pass(program, "operators", 2, tmp_path, WEFT_NCCL_REPORT="1")
    assert "ncclAllReduce 5 + 0; ncclReduce 1 + 0;" in report


def test_a_bad_program_book_is_named_and_left_out(program: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.book"
    bad.write_bytes(b"weftbook" + bytes(40))
    said = _pass(program, "operators", 2, tmp_path, WEFT_PROGRAM_BOOK=str(bad))
    assert "bad.book" in said and "not used" in said


def test_what_weft_has_no_part_in_goes_to_the_real_library(program: Path, tmp_path: Path) -> None:
    real = tmp_path / "libreal.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    source = SOURCE.with_name("nccl_real.c")
    subprocess.run(["cc", *flags, str(source), "-o", str(real)], check=True, timeout=100)
    _pass(program, "real_library", 1, tmp_path, WEFT_NCCL_LIBRARY=str(real))


def _symbols(library: Path, option: str) -> set[str]:
    said = subprocess.run(["nm", "-D", option, library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in said.splitlines()}
    return {name for name in names if name.startswith(("nccl", "pnccl"))}


def test_every_name_of_the_real_library_is_exported() -> None:
    found = importlib.util.find_spec("nvidia.nccl")
    folders = found.submodule_search_locations if found else None
    real = Path(next(iter(folders or ["/"]))) / "lib" / "libnccl.so.2"
    if not real.exists():
        pytest.skip("no real NCCL is installed as nvidia-nccl")
    ours = _symbols(LIBRARY / "libnccl.so.2", "--defined-only")
    missing = _symbols(real, "--defined-only") - ours
    assert not missing, sorted(missing)


def test_every_name_that_torch_imports_is_exported() -> None:
    torch = pytest.importorskip("torch")
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.exists():
        pytest.skip("this torch has no CUDA, so it imports nothing of NCCL")
    missing = _symbols(library, "-u") - _symbols(LIBRARY / "libnccl.so.2", "--defined-only")
    assert not missing, sorted(missing)


def test_no_other_name_is_exported() -> None:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY / "libnccl.so.2"], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in said.splitlines()}
    assert {name for name in names if not name.startswith(("nccl", "pnccl", "weftNccl"))} == set()
