# SPDX-License-Identifier: Apache-2.0
"""Settings from the environment: what cannot be read is refused at first use, by name, in Python and in commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from programs import PYTHON, ROOT, WEFT, run_program

import weft
from weft import _core
from weft.testing.ranks import Rank, run_ranks

WRONG = {
    "WEFT_TIMEOUT_S": ("soon", "got 'soon', allowed: seconds above 0, also with a unit: 500ms, 5s, 2min"),
    "WEFT_WINDOW_BYTES": ("1G", "got '1G', allowed: bytes, 0 or more, also with a unit: 64KiB, 1GiB, 2GB"),
    "WEFT_LOG": ("loud", "got 'loud', allowed: error, warn, info or debug"),
    "WEFT_HUGE_PAGE": ("0", "got '0', but there is no such setting; the nearest is WEFT_HUGE_PAGES"),
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_command_refuses_what_it_cannot_read(variable: str, tmp_path: Path) -> None:
    value, says = WRONG[variable]
    ran = run_program([*WEFT, "info"], tmp_path, more={variable: value})
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"weft: {variable}: {says}"), ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_program_gets_an_error_at_first_use_not_at_import(tmp_path: Path) -> None:
    program = "import weft; print('imported'); weft.Buffer"
    ran = run_program([*PYTHON, "-c", program], tmp_path, more={"WEFT_LOG": "loud"})
    assert ran.stdout == "imported\n"
    assert "weft.errors.Error: WEFT_LOG: got 'loud'" in ran.stderr


def test_every_setting_that_is_refused_is_named(tmp_path: Path) -> None:
    ran = run_program([*WEFT, "info"], tmp_path, more={name: value for name, (value, _) in WRONG.items()})
    assert re.findall(r"WEFT_\w+(?=: got)", ran.stderr) == [
        "WEFT_TIMEOUT_S",
        "WEFT_LOG",
        "WEFT_WINDOW_BYTES",
        "WEFT_HUGE_PAGE",
    ]


def test_what_the_documents_set_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {row[0] for row in _core.config_table()} | {"WEFT_CXX"}
    given = r"(?<!define\.)\b(WEFT_[A-Z_]+)=(?![\"']?\$)([^\s`)]+)"  # not an option of cmake, nor what a shell makes
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]:
        for name in re.findall(r"`(WEFT_[A-Z_]*[A-Z])[`=]", page.read_text()):
            assert name in known, f"{page.name} names {name}"
        for name, value in re.findall(given, page.read_text()):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                _core.config_reload()
    _core.config_reload()


def _differ(rank: Rank) -> None:
    os.environ["WEFT_WINDOW_BYTES"] = f"{rank.rank}MiB"
    _core.config_reload()
    said = r"WEFT_WINDOW_BYTES: got '0' on rank 0 and '1048576' on rank 1, allowed: the same on all ranks"
    with pytest.raises(weft.Error, match=said):
        weft.Communicator(rank.group)


def test_ranks_with_different_settings_are_told_at_the_start() -> None:
    run_ranks(2, _differ)


def _refuse(rank: Rank) -> None:
    os.environ["WEFT_TIMEOUT_S"] = "later"
    with pytest.raises(weft.Error, match="WEFT_TIMEOUT_S: got 'later'"):
        _core.config_reload()
    with pytest.raises(weft.Error, match="WEFT_TIMEOUT_S: got 'later'"):
        weft.Communicator(rank.group)


def test_no_communicator_is_made_with_a_refused_setting() -> None:
    run_ranks(1, _refuse)
