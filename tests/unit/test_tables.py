# SPDX-License-Identifier: Apache-2.0
"""Tables fit 80 columns, whatever the command that prints them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weft import _core, cli
from weft.bench.moe.trace import print_phases
from weft.bench.report import Report, Row, check_document
from weft.runtime.tables import Column, Table, size_text

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "bench/results").glob("*.json"))


def printed(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    table.print(Console(file=out, width=width))
    return out.getvalue().rstrip("\n").split("\n")


def a_table(num_columns: int, **options: Any) -> Table:
    names = [Column(f"value {index} us", is_number=True) for index in range(num_columns)]
    table = Table("Times", [Column("name", is_key=True), *names], **options)
    for row in range(2):
        table.add(f"row {row}", *(f"{100 * row + index}.5" for index in range(num_columns)))
    return table


def test_a_table_that_fits_is_one() -> None:
    lines = printed(a_table(3))
    assert lines[0] == "Times"
    assert "continued" not in "".join(lines)
    assert " ".join(lines[1:3]).split().count("value") == 3


def test_a_wide_table_becomes_several_with_the_keys_in_each() -> None:
    lines = printed(a_table(12))
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if "value" in line]
    assert len(heads) > 1
    assert sum(line.count("value") for line in heads) == 12
    assert sum(line.startswith("row 1") for line in lines) == len(heads)
    assert "Times, continued" in lines


def test_a_table_that_stays_one_names_what_it_leaves_out() -> None:
    table = a_table(12, stays_one=True)
    lines = printed(table)
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if "value" in line)
    shown = head.count("value")
    assert 3 < shown < 12
    left_out = " ".join(lines).partition("with --wide or --json also: ")[2]
    assert left_out.startswith(f"value {shown} us, ") and left_out.rstrip().endswith("value 11 us")
    assert table.heads(80) == {"name", *(f"value {index} us" for index in range(shown))}


def test_wide_is_one_table() -> None:
    assert sum("value" in line for line in printed(a_table(40), width=100_000)) == 1


def test_heads_of_numbers_take_lines_before_they_take_width() -> None:
    table = Table("Times", [Column("name", is_key=True), Column("a long name us", is_number=True)])
    table.add("x", "1.5")
    assert [line.strip() for line in printed(table)[1:5]] == ["a", "long", "name", "name     us"]


def test_columns_without_content_are_left_out() -> None:
    table = Table("Facts", [Column("name", is_key=True), Column("empty"), Column("none"), Column("some")])
    table.add("a", "", "-", "x")
    table.add("b", "", "", "-")
    assert printed(table)[1].split() == ["name", "some"]


def test_what_all_rows_share_is_said_once() -> None:
    table = Table("Facts", [Column("name", is_key=True), Column("ranks"), Column("us")], fold_constants=True)
    table.add("a", "4", "1")
    table.add("b", "4", "2")
    lines = printed(table)
    assert lines[1] == "  all: ranks 4"
    assert lines[2].split() == ["name", "us"]


def test_long_texts_are_folded_and_names_are_not() -> None:
    table = Table("Settings", [Column("variable", is_key=True, never_folds=True), Column("help")])
    table.add("WEFT_A_NAME_OF_FORTY_CHARACTERS_OR_MORE", "word " * 40)
    lines = printed(table)
    assert max(map(len, lines)) <= 80
    assert any("WEFT_A_NAME_OF_FORTY_CHARACTERS_OR_MORE" in line for line in lines)


def test_brackets_are_no_markup() -> None:
    table = Table("Shapes", [Column("name", is_key=True), Column("shape")])
    table.add("x", "bf16[tokens]")
    assert "bf16[tokens]" in "".join(printed(table))


def test_sizes_read_as_people_say_them() -> None:
    assert [size_text(n) for n in (8, 1024, 65536, 3 << 20, 1 << 30, 211_000_000)] == [
        "8 B",
        "1 KiB",
        "64 KiB",
        "3 MiB",
        "1 GiB",
        "211 MB",
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_of_a_benchmark_fits(path: Path) -> None:
    document = json.loads(path.read_text())
    rows = document.get("rows", [])
    if not rows or "samples" in rows[0] or check_document(document):
        pytest.skip("a record of another form")
    known = {"call", "dtype", "tokens", "bytes", "us", "us_min", "us_max", "floor_us", "checked", "baselines"}
    extra = sorted({name for row in rows for name in row} - known)
    out = io.StringIO()
    report = Report("weft bench", extra, console=Console(file=out, width=80))
    for row in rows:
        samples = [row["us_min"], row["us"], row["us_max"]]
        fixed = (row["call"], row["dtype"], row["tokens"], row["bytes"], samples, row["floor_us"])
        report.add(
            Row(*fixed, row["checked"], row["baselines"], {name: row.get(name, "-") for name in extra})
        )
    report.finish()
    assert max(map(len, out.getvalue().split("\n"))) <= 80
    assert "…" not in out.getvalue()


@pytest.mark.parametrize("arguments", [["info"], ["info", "--config"]])
def test_info_fits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.split("\n"))) <= 80
    assert "…" not in shown


def test_config_prints_every_name_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--config"]) == 0
    words = capsys.readouterr().out.split()
    assert [row[0] for row in _core.config_table() if row[0] not in words] == []


def test_phases_of_a_trace_fit() -> None:
    class Span:
        name, begin_ns, end_ns, block, warp, peer = "wait for counts of", 1000, 2_000_000, 12, 3, 1

    class Call:
        name, spans, num_dropped = "ht_dispatch", (Span,), 0

        def began_ns(self) -> int:
            return 0

    out = io.StringIO()
    print_phases(Console(file=out, width=80), [[Call()]])  # type: ignore[list-item]
    assert max(map(len, out.getvalue().split("\n"))) <= 80


def test_help_fits(tmp_path: Path) -> None:
    for command in ("info", "demo", "compile", "show", "tune"):
        ran = subprocess.run(
            [sys.executable, "-m", "weft", command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"COLUMNS": "80", "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert max(map(len, ran.stdout.split("\n"))) <= 80, command


def test_kept_results_name_their_command() -> None:
    kept = {file.name: json.loads(file.read_text()) for file in RESULTS}
    without = [name for name, result in kept.items() if not (result.get("command") or result.get("commands"))]
    assert without == ["h200-x4-exchanges.json"]  # collected from runs whose commands were not kept
