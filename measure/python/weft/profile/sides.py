# SPDX-License-Identifier: Apache-2.0
"""``weft profile sides``: one ``weft bench`` on several sides by turns, and by how much each differs from the first.

A side is a name and what its runs have in the environment: settings, or another commit's installation.

    weft profile sides --rounds 7 --side plain: --side again: --side check:WEFT_CHECK=1 -- \\
        collective --device cpu --ranks 4 --calls all_reduce -b 1K -e 1M
    weft profile sides --side old:PYTHONPATH=/tmp/old --side new:PYTHONPATH=/tmp/new --json cost.json -- \\
        moe --device cpu
    weft profile sides --side mapped: --side nccl:WEFT_TRANSPORT=nccl,WEFT_WINDOW_BYTES=4GiB -- moe --mode ll

Another commit's installation: git archive COMMIT into a folder, and there pip install --no-deps --target /tmp/old .

Every round runs each side once, and begins with another one. A row's time is the median over rounds of the run's own
medians. ``noise`` is how far the first side's rounds lie apart, slowest / fastest: a difference below it says nothing.
Give the first side twice, as in the first example, to see what nothing looks like. On a machine that does other work
the figures are worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.bench.report import Report
from weft.errors import Error, invalid
from weft.runtime.files import write_file
from weft.runtime.tables import integer_from, output_file

_TIMES = ("us", "enqueue_us", "eager_us")
_NO_KEYS = {"us_min", "us_max", "floor_us", "checked", "baselines", *_TIMES}
Side = tuple[str, dict[str, str]]
Row = dict[str, Any]
Samples = dict[
    tuple[str, str], dict[str, list[float]]
]  # (row, what was timed) -> side -> a median for each round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile sides``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--side", type=side, action="append", required=True, metavar="NAME:VARIABLE=VALUE,..."
    )
    parser.add_argument("--rounds", type=integer_from(1), default=5, help="runs of each side (5)")
    parser.add_argument("--python", default=sys.executable, help="the one that runs Weft (this one)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write what was measured to FILE")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="of weft bench, after --")


def run(args: argparse.Namespace) -> int:
    """Run all rounds, print the comparison, write the JSON. Returns 0."""
    sides: list[Side] = args.side
    names = [name for name, _ in sides]
    if len(set(names)) < len(sides) or len(sides) < 2:
        raise invalid("side", ", ".join(names), "two or more, with different names")
    measured: dict[str, list[Row]] = {name: [] for name in names}
    for turn in range(args.rounds):
        first = turn % len(sides)
        for of in sides[first:] + sides[:first]:
            measured[of[0]] += measure(of, args.arguments, args.python)["rows"]
            print(f"round {turn + 1} of {args.rounds}: {of[0]}", file=sys.stderr)
    rows = compare(sort(measured), sides)
    if not any(len(row["us"]) == len(sides) for row in rows):
        raise Error("the sides have no row in common: do they take the same arguments?")
    show(rows, sides)
    if args.json:
        document = Report("sides").to_json() | {"sides": names, "rows": rows}
        write_file(Path(args.json), json.dumps(document, indent=1) + "\n")
    return 0


def side(text: str) -> Side:
    """Return the name and the variables of NAME:VARIABLE=VALUE,..."""
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not all(variable and equals for variable, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"got {text}, allowed: NAME:VARIABLE=VALUE,...")
    return name, {variable: value for variable, _, value in pairs}


def kept(row: Row) -> Row:
    """Return what may tell a row apart: its texts, whole numbers and claims, not what was measured."""
    return {k: v for k, v in row.items() if k not in _NO_KEYS and isinstance(v, (str, int))}


def keys(rows: dict[str, list[Row]]) -> list[str]:
    """Return the fields that tell rows apart: those in which all sides have the same values.

    Another commit may have fields of its own, or choose another algorithm.
    """

    def values(of: list[Row], field: str) -> set[Any]:
        return {kept(row).get(field) for row in of}

    first, *others = rows.values()
    fields = dict.fromkeys(field for row in first for field in kept(row))
    return [f for f in fields if all(values(first, f) == values(other, f) for other in others)]


def sort(rows: dict[str, list[Row]]) -> Samples:
    """Return the times of all rounds by row and side."""
    fields, samples = keys(rows), Samples()
    for name, of_side in rows.items():
        for row in of_side:
            shown = kept(row)
            words = [
                shown[f] if isinstance(shown[f], str) else f"{f}={shown[f]}" for f in fields if f in shown
            ]
            for time in _TIMES:
                if isinstance(row.get(time), (int, float)):
                    samples.setdefault((" ".join(words), time), {}).setdefault(name, []).append(row[time])
    return samples


def measure(of: Side, arguments: list[str], python: str) -> dict[str, Any]:
    """Run the bench once on a side; return its report."""
    name, variables = of
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [python, "-m", "weft", "bench", *arguments, "--json", str(path)]
        ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        if ran.returncode != 0 or not path.exists():
            ended = f"{' '.join(command)} ended with {ran.returncode}"
            raise Error(f"side {name}: {ended}:\n{ran.stderr[-3000:]}", "system")
        report: dict[str, Any] = json.loads(path.read_text())
    return report


def compare(samples: Samples, sides: list[Side]) -> list[dict[str, Any]]:
    """Return for each row the median of each side, and its ratio to the first side's."""
    rows = []
    for (row, time), by_side in samples.items():
        base = by_side.get(sides[0][0], [])
        if not base or min(base) <= 0:
            continue
        medians = {name: statistics.median(by_side[name]) for name, _ in sides if name in by_side}
        ratios = {name: median / statistics.median(base) for name, median in medians.items()}
        rows.append(
            {"row": row, "time": time, "us": medians, "ratio": ratios, "noise": max(base) / min(base)}
        )
    return rows


def show(rows: list[dict[str, Any]], sides: list[Side]) -> None:
    """Print a line for each row, and the median ratio of each side over all rows."""
    for row in rows:
        columns = "  ".join(
            f"{name} {us:.2f} us ({row['ratio'][name]:.3f})" for name, us in row["us"].items()
        )
        print(f"{row['row']}, {row['time']}: {columns}; noise {row['noise']:.3f}")
    for name, _ in sides[1:]:
        for time in _TIMES:
            ratios = [row["ratio"][name] for row in rows if name in row["ratio"] and row["time"] == time]
            if ratios:
                middle = statistics.median(ratios)
                print(
                    f"{name} / {sides[0][0]}, {time}, {len(ratios)} rows: median {middle:.3f}, worst {max(ratios):.3f}"
                )
