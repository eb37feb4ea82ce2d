# SPDX-License-Identifier: Apache-2.0
"""The fit of the cost model's figures finds the figures that rows were made from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from weft.bench.collective import fit
from weft.collectives.cost import CPU, predict_us, sent_bytes
from weft.collectives.variants import VARIANTS


def _rows(name: str, words: str, least_us: float, gbs: float, ranks: int) -> list[dict[str, Any]]:
    sizes = [1 << power for power in range(10, 22, 2)]
    return [
        {
            "algorithm": f"{name} {words}",
            "ranks": ranks,
            "bytes": size,
            "us": least_us + sent_bytes(name, ranks, size) / (gbs * 1e3),
        }
        for size in sizes
    ]


def test_fit_finds_what_rows_were_made_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _rows("allgather_allpairs", "LL exchange", 4.0, 110.0, 4)
    slower = [{**row, "us": row["us"] * 3} for row in lines]  # noise: the least of a size counts
    places = _rows("allreduce_allpairs", "Simple exchange", 8.0, 320.0, 2)
    rows = [
        *slower,
        *lines,
        *places,
        {"algorithm": "allgather_ring Simple", "ranks": 4, "bytes": 8, "us": 1.0},
    ]
    found = fit.fit(rows)
    assert [(one.algorithm, one.protocol, one.sizes) for one in found] == [
        ("allgather_allpairs", "LL", 6),
        ("allreduce_allpairs", "Simple", 6),
    ]
    assert found[0].least_us == pytest.approx(4.0) and found[0].sent_gbs == pytest.approx(110.0)
    assert found[1].least_us == pytest.approx(8.0) and found[1].sent_gbs == pytest.approx(320.0)
    assert max(one.worst_error for one in found) < 1e-6
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    assert fit.main([str(tmp_path / "rows.json")]) == 0
    assert "allgather_allpairs LL" in capsys.readouterr().out


def test_fit_of_a_machine_finds_the_machine_of_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = dataclasses.replace(
        CPU, launch_us=20.0, egress_gbs=2.0, block_gbs=2.0, local_gbs=2.0, ll_factor=3.0
    )
    cells = []
    for size in (1 << 10, 1 << 16, 1 << 22):
        choices = {variant.label(): variant.choice(2, False) for variant in VARIANTS["allgather"]}
        programs = {label: choice for label, choice in choices.items() if choice.way is None}
        times = {label: predict_us(one.algorithm, size, real) for label, one in programs.items()}
        cells.append(
            {"call": "all_gather", "bytes": size, "measured_us": {**times, "of another version": 1.0}}
        )
    document = {"machine": "cpu", "ranks": 2, "cells": cells}
    start, measured = fit.read_measured(document)
    assert start == CPU and len(measured) == 3 * len(programs)
    found = fit.fit_machine(start, measured)
    assert fit.model_error(found, measured) < 0.05 < fit.model_error(start, measured)
    assert found.block_gbs == pytest.approx(2.0, rel=0.1) and found.ll_factor == pytest.approx(3.0, rel=0.1)
    (tmp_path / "measured.json").write_text(json.dumps(document))
    assert fit.main(["--machine", str(tmp_path / "measured.json")]) == 0
    assert "block_gbs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        fit.main([])
