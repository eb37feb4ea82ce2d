# SPDX-License-Identifier: Apache-2.0
"""Children that programs fork: they refuse what their parent made, end at once, and leave the parent alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PYTHON, run_program, torchrun
from test_transfer_programs import skip_unless_usable

HERE = Path(__file__).parent
SECRET = {"WEFT_JOB_SECRET": "a secret of these tests"}


@pytest.mark.parametrize("provider", ["loopback", "fabric:tcp", "fabric:shm"])
def test_engines_outlive_children_of_every_kind(provider: str, tmp_path: Path) -> None:
    if provider.startswith("fabric:"):
        skip_unless_usable(provider.removeprefix("fabric:"))
    ran = run_program([*PYTHON, str(HERE / "forked_engines.py"), provider], tmp_path, more=SECRET)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stdout + ran.stderr
    assert ran.stderr == ""


def test_ranks_outlive_children_of_every_kind(tmp_path: Path) -> None:
    ran = run_program([*torchrun(2), str(HERE / "forked_ranks.py")], tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "done\n" * 2), ran.stdout + ran.stderr
