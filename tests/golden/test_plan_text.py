# SPDX-License-Identifier: Apache-2.0
"""What ``weft plan`` prints: decisions of the planners, and a prediction from the figures of the machine."""

from __future__ import annotations

import pytest

from golden import check_golden
from weft import cli

ASKED = {
    "default": ["--nodes", "1,2,4,16"],
    "decode": ["--mode", "ll", "--fp8", "--tokens", "64", "--nodes", "2,8", "--ranks-per-node", "4"],
    "slow_network": [
        "--mode",
        "ht",
        "--nic-gbit",
        "25",
        "--latency-us",
        "20",
        "--nvlinks",
        "0",
        "--hidden",
        "4096",
    ],
}


@pytest.mark.parametrize("case", ASKED)
def test_a_plan_is_printed_with_its_prediction(
    case: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *ASKED[case]]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    check_golden(request, f"plan_{case}.txt", "\n".join(lines) + "\n")
