# SPDX-License-Identifier: Apache-2.0
"""The fit of the cost model's figures finds the figures that rows were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.bench.collective import fit
from weft.collectives.cost import sent_bytes


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
