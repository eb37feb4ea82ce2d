# SPDX-License-Identifier: Apache-2.0
"""Inputs of our own in the dialects that others write: one per feature, and one per defect with what must be said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import cli

SAMPLES = Path(__file__).parents[1] / "samples" / "collectives"

# file, its arguments, what the summary must say
SERVED = (
    ("exchange_by_destination.py", "2 2", "alltoall, 4 ranks"),
    ("two_programs.py", "", "chain: custom, 3 ranks"),
    ("gather_by_senders_index.py", "", "allgather, 3 ranks"),
    ("shift_with_two_buffers.py", "", "makes an output of its own: serves out-of-place calls only"),
    ("custom_out_of_place.xml", "", "not proven: what it computes, as it has no contract"),
    ("four_simple_before_receives.xml", "", "verified: result, races and deadlock"),
    ("sixteen_chunks_a_step.xml", "", "it would hang from 4194305 bytes on"),
    ("nops_before_a_sum.xml", "", "allreduce, 2 ranks"),
    ("reduce_scatter_by_another_name.xml", "", "reducescatter, 3 ranks"),
    ("plan_of_puts.json", "", "allgather, 2 ranks"),
    ("plan_of_packets.json", "", "allreduce, 2 ranks"),
)
REFUSED = (
    ("twice_the_own_part.py", "", "too much C(1,0)"),
    ("custom_in_place_race.xml", "", "race: rank 1, block 1, step 0 (s to rank 2"),
    ("nine_before_receives.xml", "", "(8 are taken)"),
    ("plan_without_signals.json", "", "rank 1, block 0, operation 1 (put): race: rank 0 may end before"),
    ("plan_with_multicast.json", "", "operation 4 (gstore): needs multicast"),
)


@pytest.mark.parametrize(("name", "arguments", "says"), SERVED, ids=lambda value: str(value)[:32])
def test_sample_is_served(
    name: str, arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.xml"
    assert cli.main(["compile", str(SAMPLES / name), "--args", arguments, "-o", str(out)]) == 0
    assert says in capsys.readouterr().err
    assert cli.main(["compile", str(out), "-o", str(tmp_path / "again.xml")]) == 0


@pytest.mark.parametrize(("name", "arguments", "says"), REFUSED, ids=lambda value: str(value)[:32])
def test_sample_is_refused_in_a_sentence(
    name: str, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", str(SAMPLES / name), "--args", arguments]) != 0
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_all_programs_of_a_script_are_written_or_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(SAMPLES / "two_programs.py")
    assert cli.main(["compile", script, "-o", str(tmp_path / "both.xml")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both-2.xml", "both.xml"]
    assert cli.main(["compile", script, "--program", "2"]) == 0
    assert 'name="chain"' in capsys.readouterr().out
    assert cli.main(["show", script, "-o", str(tmp_path / "a.svg")]) != 0
    assert "1 'flat', 2 'chain'" in capsys.readouterr().err


def test_every_sample_is_tested() -> None:
    from_tables = {name for name, *_ in (*SERVED, *REFUSED)}
    files = {path.name for path in SAMPLES.iterdir() if path.suffix in (".py", ".xml", ".json")}
    assert files == from_tables


def test_the_script_that_reads_others_files_counts_these() -> None:
    pytest.importorskip("weft.testing", reason="needs weft.testing, which this build is without")
    script = Path(__file__).parents[2] / "tools" / "read_public_files.py"
    ran = subprocess.run([sys.executable, str(script), str(SAMPLES)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    # One script that is served asks for arguments, which this run does not give.
    lines = ran.stdout.splitlines()
    assert len(lines) == len(SERVED) + len(REFUSED) + 1
    served = {line.split(":")[0] for line in lines if line.endswith(": verified")}
    assert served == {name for name, arguments, _ in SERVED if not arguments}
