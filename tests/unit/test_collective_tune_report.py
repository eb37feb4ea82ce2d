# SPDX-License-Identifier: Apache-2.0
"""What was measured beside the cost model: one line per candidate, and how many choices are near the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.collectives.tune import table_rows
from weft.collectives.tune_report import keep_measured, measured_path, report
from weft.collectives.tuned_tables import write_table
from weft.collectives.variants import VARIANTS
from weft.errors import Error

NAMES = {"all_gather": "allgather"}


def _cell(num_bytes: int, best: int) -> dict[str, object]:
    """Return a cell in which the program number ``best`` takes 10 us and every other one 20."""
    variants = [variant for variant in VARIANTS["allgather"] if variant.mode == "program"]
    times = {variant.label(): 10.0 if at == best else 20.0 for at, variant in enumerate(variants)}
    winner = variants[best]
    about = {"algorithm": winner.name, "protocol": winner.protocol, "instances": winner.instances}
    label = {"label": winner.label(), "variant": about, "us": 10.0}
    return {"call": "all_gather", "bytes": num_bytes, "measured_us": times, **label}


def test_report_has_every_candidate_with_its_error_and_counts_near_choices(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    keep_measured(table, "cpu", "here", 4, [_cell(1024, 0), _cell(4096, 2)])
    keep_measured(table, "cpu", "here", 4, [_cell(4096, 3)])  # measured again
    write_table(table, "here", table_rows([_cell(1024, 0), _cell(4096, 3)], 4))
    lines = report(table, NAMES)
    programs = sum(1 for variant in VARIANTS["allgather"] if variant.mode == "program")
    assert len(lines) == 1 + 2 * (1 + programs) + 6 and max(map(len, lines)) <= 80
    assert lines[-2:] == [
        "the table's choice is within 10 % of the best in 2 of 2 cells",
        "  and may be by its 95 % interval in 2",
    ]
    assert lines[1] == "all_gather, 1024 bytes" and lines[2].endswith("%")


def test_a_table_is_judged_by_what_another_run_measured(tmp_path: Path) -> None:
    table, other = tmp_path / "table.json", tmp_path / "other.json"
    keep_measured(table, "cpu", "here", 4, [_cell(1024, 0), _cell(4096, 3)])
    write_table(table, "here", table_rows([_cell(1024, 0), _cell(4096, 3)], 4))
    noisy = _cell(4096, 2)
    noisy["low_us"] = {label: 9.0 for label in dict(noisy["measured_us"])}
    keep_measured(other, "cpu", "here", 4, [_cell(1024, 2), noisy])
    lines = report(table, NAMES, measured_path(other))
    assert lines[-2:] == [
        "the table's choice is within 10 % of the best in 0 of 2 cells",
        "  and may be by its 95 % interval in 1",
    ]


def test_report_without_measurements_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(Error, match="run weft tune without --report first"):
        report(tmp_path / "table.json", NAMES)
    (tmp_path / "table.measured.json").write_text("{}")
    with pytest.raises(Error, match="what weft tune wrote"):
        report(tmp_path / "table.json", NAMES)
