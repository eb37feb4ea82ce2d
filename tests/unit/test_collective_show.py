# SPDX-License-Identifier: Apache-2.0
"""Drawings: chunks have names, large ones have arrows for the chunk that is named alone, pages have waits, too."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft import _core
from weft.cli import main
from weft.collectives.chunk_names import chunk_names
from weft.collectives.library import build


def _shown(tmp_path: Path, *options: str) -> tuple[str, str]:
    svg, page = tmp_path / "a.svg", tmp_path / "a.html"
    assert main(["show", *options, "-o", str(svg), "--html", str(page)]) == 0
    ElementTree.fromstring(svg.read_text())
    return svg.read_text(), page.read_text()


def test_steps_name_the_chunks_that_they_move() -> None:
    algorithm = build("allgather_ring", 3).compile()
    names = chunk_names(algorithm)
    assert {name for moved in names.values() for name in moved} == {"0.0", "1.0", "2.0"}
    assert len(names) == sum(1 for _ in algorithm.steps())


def test_small_drawings_have_all_arrows_and_large_ones_those_of_a_chunk(tmp_path: Path) -> None:
    small, _ = _shown(tmp_path, "allgather_ring", "--ranks", "4")
    assert small.count('class="message"') == 12
    large, page = _shown(tmp_path, "allreduce_allpairs", "--ranks", "8")
    assert 'class="message"' not in large
    assert page.count('class="message"') == 2 * 8 * 7 and 'class="wait"' in page
    one, _ = _shown(tmp_path, "allreduce_allpairs", "--ranks", "8", "--chunk", "3.0")
    arrows = re.findall(r'class="message" data-chunks="([^"]*)"', one)
    assert 0 < len(arrows) < 2 * 8 and all("3.0" in names.split() for names in arrows)


def test_a_page_draws_arrows_before_anybody_asks(tmp_path: Path) -> None:
    _, small = _shown(tmp_path, "allgather_ring", "--ranks", "4")
    assert "checked> all messages" in small and 'svg class=""' in small and "<dt>critical path</dt>" in small
    _, large = _shown(tmp_path, "allreduce_allpairs", "--ranks", "8")
    assert "value='0.0'" in large and 'svg class="few"' in large and "path.message:not(.on)" in large


@pytest.mark.parametrize(("gpus", "machine"), [([], "cpu"), (["a GPU"], "nvlink")])
def test_times_are_of_the_machine_that_it_runs_on(
    gpus: list[str], machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_core, "gpus", lambda: gpus)
    assert main(["show", "allgather_ring", "--ranks", "4"]) == 0
    assert f"predicted on {machine}: " in capsys.readouterr().out
    assert main(["show", "allgather_ring", "--ranks", "4", "--machine", "nvlink"]) == 0
    assert "predicted on nvlink: " in capsys.readouterr().out


def test_a_script_without_ranks_says_how_many_it_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "from weft.collectives import AllGather, Buffer, Program, chunk\n"
        "with Program('alone', AllGather(1)):\n    chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0)\n"
    )
    assert main(["compile", str(script)]) == 0
    assert "note: made for 1 rank, as alone.py runs without --ranks" in capsys.readouterr().err
    assert main(["compile", "allgather_ring", "--ranks", "2"]) == 0
    assert "note: made for" not in capsys.readouterr().err


def test_a_misspelt_name_gets_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "allgather_rings", "--ranks", "4"]) == 1
    assert (
        "got allgather_rings" in (said := capsys.readouterr().err) and "did you mean allgather_ring?" in said
    )
    assert main(["show"]) == 1
    assert "source: got nothing" in capsys.readouterr().err


def test_chunk_that_nobody_moves_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["show", "allgather_ring", "--ranks", "4", "--chunk", "9.0", "-o", str(tmp_path / "a.svg")]
    assert main(command) == 1
    assert "allowed: RANK.INDEX of a chunk that some step moves" in capsys.readouterr().err


def test_bars_name_their_chunks_and_times_are_round(tmp_path: Path) -> None:
    drawing = tmp_path / "pairs.svg"
    command = ["show", "allreduce_allpairs", "--ranks", "4", "--machine", "nvlink", "-o", str(drawing)]
    assert main(command) == 0
    text = drawing.read_text()
    assert ">3.1</text>" in text and ">0.0 +3</text>" in text
    assert text.count(">50 us</text>") == 2 and ">message</text>" in text
