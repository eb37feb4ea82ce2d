# SPDX-License-Identifier: Apache-2.0
"""``weft compile``, ``weft bench collective`` and ``weft tune`` as users start them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from programs import WEFT, run_program

from weft.bench.report import check_document
from weft.cli import main
from weft.collectives.library import build
from weft.collectives.xml_write import to_xml

RING = """
from weft.collectives import AllReduce, Buffer, Program, chunk


def program(ranks, protocol="Simple", instances=1):
    with Program("my ring", AllReduce(ranks, ranks), protocol=protocol, instances=instances) as ring:
        for index in range(ranks):
            c = chunk(index, Buffer.input, index)
            for step in range(1, ranks):
                c = chunk((index + step) % ranks, Buffer.input, index).reduce(c)
            c = c.copy(c.rank, Buffer.output, index)
            for step in range(ranks, 2 * ranks - 1):
                c = c.copy((index + step) % ranks)
    return ring
"""


def run(folder: Path, *arguments: str, fails: bool = False) -> str:
    ran = run_program([*WEFT, *arguments], folder, more={"WEFT_CACHE_DIR": str(folder / "cache")})
    assert (ran.returncode != 0) == fails, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


REFUSED = [
    (["ring.xml", "--ranks", "5"], "ranks: got 5, allowed: 2, as ring.xml says"),
    (["ring.xml", "--in-place"], "options: got inplace, allowed: protocol, for ring.xml"),
    (["ring.py", "--ranks", "3", "--option", "x=3"], "options: got x, allowed: protocol, instances"),
    (["script.py", "--ranks", "3"], "allowed: its own arguments (--args): script.py has no program(ranks)"),
    (["wrong.py", "--ranks", "3"], "wrong.py:5: chunk_factor: got 0"),
    (["syntax.py", "--ranks", "3"], "syntax.py:1: SyntaxError: expected ':'"),
    (
        ["alltoallv_allpairs", "--ranks", "3", "--dialect", "microsoft"],
        "does not exist in microsoft's dialect",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_compile_refuses_what_would_have_no_effect_and_names_the_users_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring.py").write_text(RING)
    (tmp_path / "ring.xml").write_text(to_xml(build("allreduce_1step", 2, inplace=True).compile()))
    (tmp_path / "script.py").write_text("import sys\n")
    (tmp_path / "wrong.py").write_text(
        RING.replace("AllReduce(ranks, ranks)", "AllReduce(ranks, 0)").lstrip()
    )
    (tmp_path / "syntax.py").write_text("def program(ranks)\n")
    assert main(["compile", *options]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("weft: ") and message in said.err and len(said.err.splitlines()) == 1
    assert not said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calls", "none"], "calls: got ['none']"),
        (["-b", "4K", "-e", "1K"], "sizes: got (4096, 1024, 4)"),
        (["-f", "1"], "sizes: got (1024, 67108864, 1)"),
    ],
)
def test_tune_refuses_in_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    assert main(["tune", "--device", "cpu", "--output", str(table), *options]) == 1
    assert capsys.readouterr().err.startswith(f"weft: {message}") and not table.exists()


def test_tune_goes_on_where_it_stopped_and_leaves_what_is_for_other_calls_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, journal = tmp_path / "table.json", tmp_path / "table.cpu-2.journal"
    variant = {"algorithm": "allgather_ring", "protocol": "Simple", "instances": 1, "slice_bytes": 0}
    of_gather, larger, of_all = (
        {"call": call, "bytes": size, "us": 7.5, "label": "as measured before", "variant": variant}
        for call, size in (("all_gather", 1024), ("all_gather", 4096), ("all_to_all", 1024))
    )
    lines = [json.dumps(row) + "\n" for row in (of_gather, larger, of_all)]
    journal.write_text("".join(lines) + '{"call": "all_ga')
    options = ["tune", "--device", "cpu", "--ranks", "2", "-b", "1K", "--output", str(table)]
    assert main([*options, "-e", "1K", "--calls", "all_gather"]) == 0
    assert "7.5 us  as measured before" in capsys.readouterr().out
    assert [row["algorithm"] for row in json.loads(table.read_text())["rows"]] == ["allgather_ring"]
    assert journal.read_text() == "".join(lines[1:])
    # Each row that is left serves the run that it is for; then none is left.
    assert main([*options, "-e", "4K", "--calls", "all_gather"]) == 0
    assert capsys.readouterr().out.count("as measured before") == 1
    assert journal.read_text() == lines[2]
    assert main([*options, "-e", "1K", "--calls", "all_to_all"]) == 0
    assert not journal.exists()


def test_a_file_may_use_its_own_program_and_still_be_compiled_for_other_ranks(tmp_path: Path) -> None:
    """The example of docs/collectives.md: without ``--ranks`` it is what the file makes when it runs."""
    page = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
    (tmp_path / "ring.py").write_text(
        next(text for text in page.split("```python\n") if "def program(" in text).split("```")[0]
    )
    assert "ring: allgather, 8 ranks" in run(tmp_path, "compile", "ring.py", "--ranks", "8", "-o", "ring.xml")
    assert "ring: allgather, 4 ranks" in run(tmp_path, "compile", "ring.py", "-o", "ring.xml")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    script = '"$@" | :; echo "${PIPESTATUS[0]}"'
    for command in (["compile", "--list"], ["compile", "allgather_ring", "--ranks", "2"]):
        ended = run_program(["bash", "-c", script, "-", *WEFT, *command], tmp_path)
        assert ended.stdout == "141\n" and "Broken pipe" not in ended.stderr and "Error" not in ended.stderr


def test_show_takes_the_options_of_compile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--ranks", "4", "--protocol", "LL", "--instances", "2", "--html", str(page)]
    assert main(["show", "allreduce_allpairs", *options]) == 0
    assert "allreduce, LL" in capsys.readouterr().out and page.read_text().count("<title>") > 80


BENCH = ("bench", "collective", "--device", "cpu", "--ranks", "2")
FEW = ("-e", "16K", "-n", "2", "-w", "1")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")
def test_bench_measures_algorithms_of_files_in_several_modes_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(RING)
    run(tmp_path, "compile", "ring.py", "--ranks", "2", "-o", "ring.xml")
    given = ["ring.py", "ring.xml compiled", "ring.xml LL128", "allreduce_allpairs Simple x2", "auto"]
    options = [word for text in given for word in ("--algorithm", text)]
    files = ("--json", "out.json", "--plot", "out.png")
    run(tmp_path, *BENCH, *FEW, "--calls", "all_reduce", *options, *files)
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    rows = document["rows"]
    assert [row["algorithm"] for row in rows[:4]] == given[:4]
    assert len(rows) == 3 * len(given) and all(row["checked"] for row in rows)
    assert len({row["baselines"]["gloo"] for row in rows[:5]}) == 1
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_in_place(tmp_path: Path) -> None:
    run(tmp_path, *BENCH, *FEW, "--calls", "all_gather,reduce_scatter", "--place", "in", "--json", "in.json")
    rows = json.loads((tmp_path / "in.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["in_place"] and row["checked"] for row in rows)
    assert all(min(row["enqueue_us"], row["eager_us"], row["gloo_eager_us"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calls", "all_reduce", "--algorithm", "none.xml"], "source: got none.xml"),
        (["--calls", "all_reduce", "--algorithm", "none"], "algorithm: got none"),
        (
            ["--calls", "all_reduce", "--algorithm", "allgather_ring"],
            "allgather_ring, which is for allgather",
        ),
        (
            ["--calls", "all_reduce", "--algorithm", "three.xml"],
            "ranks: got 2, allowed: 3, as three.xml says",
        ),
        (
            ["--calls", "all_reduce", "--ranks", "3", "--algorithm", "three.xml x2"],
            "options: got instances, allowed: protocol",
        ),
        (
            ["--calls", "all_reduce,all_gather", "--algorithm", "allreduce_1step"],
            "calls: got all_reduce,all_gather",
        ),
        (["--calls", "broadcast", "--place", "out"], "place: got out, allowed: in for broadcast"),
    ],
)
def test_bench_refuses_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.xml").write_text(to_xml(build("allreduce_1step", 3, inplace=True).compile()))
    assert main([*BENCH, *options]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("weft: ") and message in said and len(said.splitlines()) == 1, said
