# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from weft.bench.report import Report, Row, check_document, number_text, plain_text, slowest_rank
from weft.runtime.tables import output_file


def a_report(console: Console | None = None) -> Report:
    report = Report("test", extra_columns=("egress_gbs",), command="weft bench test", console=console)
    report.add(
        Row("ht_dispatch", "bf16", 64, 1_000_000, [30.0, 10.0, 20.0], floor_us=5.0, checked=True,
            baselines={"gloo": 60.0}, extra={"egress_gbs": 50.0})
    )  # fmt: skip
    report.add(Row("write", "u8", None, 8, [1.5]))
    return report


def test_document_has_the_agreed_form() -> None:
    document = json.loads(json.dumps(a_report().to_json()))
    assert check_document(document) == []
    first = document["rows"][0]
    assert (first["us"], first["us_min"], first["us_max"]) == (20.0, 10.0, 30.0)
    assert first["egress_gbs"] == 50.0
    assert document["rows"][1]["floor_us"] is None
    assert document["command"] == "weft bench test"


def test_command_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/weft", "bench", "moe", "--json", "a file"])
    monkeypatch.setenv("WEFT_HOST_THREADS", "2")
    command = Report("test").to_json()["command"]
    assert "WEFT_HOST_THREADS=2" in command and command.endswith("weft bench moe --json 'a file'")


def test_check_document_names_what_is_wrong() -> None:
    document = a_report().to_json()
    del document["rows"][0]["baselines"]
    document["rows"][1]["us"] = True
    del document["machine"]
    assert check_document(document) == [
        "machine is missing",
        "rows[0].baselines is missing",
        "rows[1].us is True",
    ]


def test_slowest_rank_counts_each_repetition() -> None:
    assert slowest_rank([[1.0, 9.0, 3.0], [2.0, 4.0, 5.0]]) == [2.0, 9.0, 5.0]
    with pytest.raises(ValueError):
        slowest_rank([[1.0], [1.0, 2.0]])


def test_table_shows_ratio_to_each_baseline() -> None:
    out = io.StringIO()
    a_report(Console(file=out, width=200)).finish()
    assert "60.0 (3.00x)" in out.getvalue()
    assert "4.0x" in out.getvalue()


def test_notes_explain_columns_that_are_shown_and_are_all_in_the_document() -> None:
    out = io.StringIO()
    report = a_report(Console(file=out, width=40))
    report.note("egress GB/s: what leaves", "egress GB/s")
    report.note("us: the median", "us")
    report.note("measured on a quiet day")
    report.finish()
    printed = out.getvalue()
    assert "us: the median" in printed and "a quiet day" in printed and "what leaves" not in printed
    assert "egress" in printed.partition("with --wide or --json also: ")[2]
    assert len(report.to_json()["notes"]) == 3


def test_what_tells_rows_apart_stands_first() -> None:
    out = io.StringIO()
    report = Report("test", ("egress_gbs", "sms"), console=Console(file=out, width=34), names_rows=("sms",))
    for sms in (16, 24):
        report.add(Row("ht_dispatch", "bf16", 64, 1000, [30.0 + sms], extra={"egress_gbs": 50.0, "sms": sms}))
    report.finish()
    assert ["call", "size", "sms", "us"] in [line.split() for line in out.getvalue().splitlines()]


def test_files_are_written_where_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = a_report(Console(file=io.StringIO()))
    report.finish(tmp_path / "new" / "result.json", tmp_path / "plots" / "result.png")
    assert check_document(json.loads((tmp_path / "new" / "result.json").read_text())) == []
    assert (tmp_path / "plots" / "result.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_refused_before_a_run(tmp_path: Path) -> None:
    good, bad = str(tmp_path / "new" / "a.json"), str(tmp_path)
    assert output_file(good) == good
    assert not Path(good).exists()
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"got {bad}, which cannot be written: Is a directory"
    ):
        output_file(bad)
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    output_file(str(kept))
    assert kept.read_text() == "{}"


def test_numbers_have_no_exponent() -> None:
    shown = [number_text(value) for value in (14123.4, 3.14159, 0.5, 0.0, 0.00042, -2000.0)]
    assert shown == ["14,123", "3.142", "0.5", "0", "0.0004", "-2,000"]


def test_a_time_beside_its_floor_is_a_multiple() -> None:
    report = Report("title", command="", console=Console(file=io.StringIO(), width=200))
    report.add(Row("call", "bf16", None, 1024, [310.0], floor_us=1.0))
    report.finish()
    out = report.console.file.getvalue()  # type: ignore[attr-defined]
    assert "310.0x" in out
    assert "over" in out


def test_help_of_a_docstring_is_plain_and_fits() -> None:
    text = plain_text("First ``word``.\n\n    weft bench --json FILE\n\n" + "Long ``text``. " * 30)
    assert "`" not in text
    assert max(map(len, text.splitlines())) <= 79
    assert "\n    weft bench --json FILE\n" in text
