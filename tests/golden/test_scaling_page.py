# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/scaling.md are those that ``weft plan`` gives; ``pytest --update`` rewrites them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from weft import cli

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
FEW = "2,4,8,16,32"  # with DeepSeek-V3's 256 experts
MANY = "64,128,256,512,1024"  # with an expert for each of 8192 ranks
# Commands in the FIFO for each put of data: itself and its signal; high throughput also says that a slot was read.
COMMANDS = {"ht": 3, "ll": 2}


def _plans(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = []
    for nodes, experts in ((FEW, "256"), (MANY, "8192")):
        assert cli.main(["plan", "--json", "--nodes", nodes, "--experts", experts, *options]) == 0
        plans += json.loads(capsys.readouterr().out)
    return plans


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _both(plan: dict[str, Any], value: Callable[[dict[str, Any]], float], digits: int = 0) -> str:
    return " / ".join(f"{value(plan[call]):,.{digits}f}" for call in ("dispatch", "combine"))


def _calls(plans: Sequence[dict[str, Any]]) -> str:
    heads = ("nodes", "mapped MB", "network MB", "puts", "10^3 puts/s", "10^3 commands/s", "inbox MiB")
    rows = [
        (
            str(plan["nodes"]),
            _both(plan, lambda call: call["mapped_bytes"] / 1e6, 1),
            _both(plan, lambda call: call["network_bytes"] / 1e6, 1),
            _both(plan, lambda call: call["puts"]),
            _both(plan, lambda call: 1e3 * call["puts"] / call["us"]),
            _both(plan, lambda call, each=COMMANDS[plan["mode"]]: 1e3 * each * call["puts"] / call["us"]),
            f"{plan['inbox_bytes'] / (1 << 20):,.0f}",
        )
        for plan in plans
    ]
    return _table(heads, rows)


def _times(plans: Sequence[dict[str, Any]]) -> str:
    rows = []
    for plan in plans:
        bounds = " / ".join(plan[call]["bound"] for call in ("dispatch", "combine"))
        fanned = _both(plan, lambda call: call["per_rank"]["us"]) if plan["mode"] == "ll" else ""
        in_host = _both(plan, lambda call: call["host_us"])
        rows.append((str(plan["nodes"]), _both(plan, lambda call: call["us"]), bounds, in_host, fanned))
    heads = ("nodes", "us at least", "limited by", "in host memory", "us with a row per (token, rank)")
    width = 5 if plans[0]["mode"] == "ll" else 4
    return _table(heads[:width], [row[:width] for row in rows])


def test_tables_are_those_of_the_planner(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    high = _plans(capsys, "--mode", "ht")
    low = _plans(capsys, "--mode", "ll", "--fp8")
    made = {
        "ht-calls": _calls(high),
        "ht-times": _times(high),
        "ll-calls": _calls(low),
        "ll-times": _times(low),
    }
    page = PAGE.read_text()
    for name, table in made.items():
        block = re.compile(rf"(<!-- plan {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert len(block.findall(page)) == 1, f"docs/scaling.md has no table {name}"
        page = block.sub(lambda found, table=table: f"{found[1]}\n{table}\n{found[2]}", page)
    if request.config.getoption("--update"):
        PAGE.write_text(page)
    assert page == PAGE.read_text(), "docs/scaling.md is not what weft plan gives: run pytest --update"
