# SPDX-License-Identifier: Apache-2.0
"""Pictures: sizes and times as people say them, a colour per system, every kept result can be drawn again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.bench import pictures
from weft.bench.report import Row, check_document
from weft.collectives.cost import MACHINES, estimate
from weft.collectives.library.registry import build
from weft.collectives.show import summary, svg, time_parts
from weft.demo import why_slower
from weft.demo.train import Outcome

RESULTS = sorted((Path(__file__).parents[2] / "bench/results").glob("*.json"))
PNG = b"\x89PNG"


def test_a_system_has_one_colour() -> None:
    assert pictures.color_of("weft") == pictures.WEFT
    assert len(set(pictures.COLORS.values())) == len(pictures.COLORS)
    assert pictures.color_of("something new") == pictures.color_of("something new")


def test_times_have_three_digits_and_a_unit() -> None:
    assert [pictures.time_text(us) for us in (3.4519, 445, 999.6, 1540, 2e6)] == [
        "3.45 us",
        "445 us",
        "1.00 ms",
        "1.54 ms",
        "2.00 s",
    ]


def test_the_subtitle_has_what_all_rows_share() -> None:
    rows = [{"dtype": "bf16", "ranks": 4, "tokens": n} for n in (1, 2)]
    assert pictures.settings_of(rows, {"cpu": "Loom", "cores": 2}) == "Loom, 2 cores, ranks 4, bf16"
    assert pictures.settings_of(rows, {"gpus": ["H200"] * 4}) == "4 H200, ranks 4, bf16"


def test_the_footnote_explains_the_floor() -> None:
    assert pictures.explanations(["a; floor: so; and so", "b"]) == "floor: so; and so"
    assert pictures.explanations(["raw: a loop.", "of_raw: its time over ours"]) == "raw: a loop"


@pytest.mark.parametrize(
    "name", ["h200-x4-collective", "h200-x4-high-throughput-bf16", "cpu-2core-transfer-tcp"]
)
def test_kept_results_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (path,) = [path for path in RESULTS if path.stem == name]
    document = json.loads(path.read_text())
    assert check_document(document) == []
    pictures.draw_document(document, tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes().startswith(PNG)


def test_rows_without_baselines_or_with_several_series_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        Row("all_gather", "f32", None, 1 << k, [k + i], series=f"way {i}")
        for k in (9, 10, 11)
        for i in (1, 2)
    ]
    pictures.draw_rows("series", rows, tmp_path / "series.png")
    pictures.draw_rows("one", rows[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)


def test_the_drawing_of_a_program_agrees_with_its_summary() -> None:
    machine = MACHINES["nvlink"]
    algorithm = build("allgather_ring", 4).compile()
    for num_bytes in (1 << 12, 1 << 24):
        guess = estimate(algorithm, num_bytes, machine)
        parts = time_parts(guess, machine)
        total = sum(float(part.split()[-2]) for part in parts.split(" + "))
        assert total == pytest.approx(guess.total_us, abs=0.2)
        assert parts in summary(algorithm, num_bytes, machine)
        assert parts in svg(algorithm, guess, parts)


def test_the_demo_says_why_ranks_are_slower() -> None:
    alone, ranks = Outcome([3.0, 2.0], 1000.0, 0.0), Outcome([3.0, 2.0], 400.0, 0.6)
    said = why_slower(alone, ranks, 4, 2, "cpu")
    assert "60%" in said and "4 ranks share 2 cores" in said
    assert why_slower(ranks, alone, 4, 2, "cpu") == ""
