# SPDX-License-Identifier: Apache-2.0
"""Fits the cost model to measurements: of exchanges, and of the machine that programs run on.

    for call in all_gather all_to_all; do
      weft bench collective --calls $call -b 1K -e 64M --json $call.json \\
        --algorithm "${call/_/}_allpairs LL exchange" --algorithm "${call/_/}_allpairs Simple exchange"
    done
    python -m weft.bench.collective.fit all_gather.json all_to_all.json

Prints, for every algorithm and way, the microseconds of the smallest call and the GB/s of the bytes beyond it
(``_EXCHANGE_COSTS`` of weft.collectives.cost), and the largest relative error over the rows. The least of all rows of
one size counts, as a machine adds noise and takes none away. The fit is least squares of relative errors.

    weft tune --ranks 2 --device cpu --output two.json
    python -m weft.bench.collective.fit --machine two.measured.json

Prints the fields of ``Machine`` (weft.collectives.cost) with which the model's times of all candidates that were
measured have the least mean square of log(model / measured), and what that mean was and is. Each is tried larger and
smaller in turn, by steps that shrink. Ranks need a core each: the model knows no others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weft.collectives.cost import MACHINES, Machine, predict_us, sent_bytes
from weft.collectives.exchanges import LINES, PLACES
from weft.collectives.ir import Algorithm
from weft.collectives.variants import VARIANTS
from weft.errors import Error

# Sizes that a way is for; beyond, its times don't enter the fit. Bytes of the whole buffer.
_MOST_BYTES = {"LL": 2 << 20, "Simple": 64 << 20}
_MOST_BYTES_ONE_STEP = 128 << 10


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cost of one algorithm in one way: least_us + bytes sent / sent_gbs."""

    algorithm: str
    protocol: str
    least_us: float
    sent_gbs: float
    worst_error: float
    sizes: int


def fit(rows: Iterable[dict[str, Any]]) -> list[Fit]:
    """Fit every exchange among the rows of reports; those with fewer than three sizes are left out."""
    least: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for row in rows:
        name, *words = str(row.get("algorithm") or "").split()
        if "exchange" not in words or not row.get("ranks"):
            continue
        protocol = words[0]
        most = _MOST_BYTES_ONE_STEP if name == "allreduce_1step" else _MOST_BYTES[protocol]
        if row["bytes"] <= most:
            cells = least.setdefault((name, protocol), {})
            cell = int(row["ranks"]), int(row["bytes"])
            cells[cell] = min(float(row["us"]), cells.get(cell, float("inf")))
    return [_fit_one(*key, cells) for key, cells in sorted(least.items()) if len(cells) >= 3]


def _fit_one(name: str, protocol: str, cells: dict[tuple[int, int], float]) -> Fit:
    has_parts = name in ("gather_flat", "scatter_flat")  # of which results have the bytes of all
    way = LINES if protocol == "LL" else PLACES
    sent = np.array(
        [sent_bytes(name, ranks, all_bytes // (ranks if has_parts else 1), way) for ranks, all_bytes in cells]
    )
    us = np.array(list(cells.values()))
    columns = np.stack([1 / us, sent / us], axis=1)
    (least_us, us_per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(us)), rcond=None)
    errors = np.abs(columns @ (least_us, us_per_byte) - 1)
    return Fit(name, protocol, float(least_us), float(1e-3 / us_per_byte), float(errors.max()), len(us))


# Fields that are tried larger and smaller together. Speeds keep their ratios. ``message_us`` stays: few ranks take too
# few steps one after the other to tell it from ``launch_us``.
_TOGETHER = (
    ("launch_us",),
    ("egress_gbs", "block_gbs", "local_gbs"),
    ("ll_factor",),
    ("simple_sync_us",),
    ("step_us",),
)
_FIRST_FACTOR, _LAST_FACTOR = 1.6, 1.02
_LEAST_US = 0.05  # where a search for what is 0 begins


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program's time at a size of the whole buffer."""

    algorithm: Algorithm
    num_bytes: int
    us: float


def read_measured(document: dict[str, Any]) -> tuple[Machine, list[Measured]]:
    """Return the machine that ``weft tune`` measured, as the model has it now, and the programs' times."""
    ranks = int(document["ranks"])
    programs: dict[tuple[str, str], Algorithm] = {}
    for collective, variants in VARIANTS.items():
        for variant in variants:
            try:
                choice = variant.choice(ranks, collective == "allreduce")
            except Error:
                continue  # there is none for so many ranks
            if choice.way is None:
                programs[collective, variant.label()] = choice.algorithm
    found = []
    for cell in document["cells"]:
        for label, us in cell["measured_us"].items():
            program = programs.get((cell["call"].replace("_", ""), label))
            if program is not None:
                found.append(Measured(program, int(cell["bytes"]), float(us)))
    return MACHINES[document["machine"]], found


def model_error(machine: Machine, measured: list[Measured]) -> float:
    """Return the root of the mean square of log(model / measured)."""
    errors = [math.log(predict_us(one.algorithm, one.num_bytes, machine) / one.us) for one in measured]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def fit_machine(machine: Machine, measured: list[Measured]) -> Machine:
    """Return ``machine`` with the figures that fit best, each within some 2 %."""
    best, factor = model_error(machine, measured), _FIRST_FACTOR
    while factor > _LAST_FACTOR:
        before = best
        for fields in _TOGETHER:
            for by in (factor, 1 / factor):
                other = _scaled(machine, fields, by)
                error = model_error(other, measured)
                if error < best:
                    best, machine = error, other
        if before - best < 1e-4:
            factor = math.sqrt(factor)
    return machine


def _scaled(machine: Machine, fields: tuple[str, ...], by: float) -> Machine:
    numbers: dict[str, Any] = {field: (getattr(machine, field) or _LEAST_US) * by for field in fields}
    return dataclasses.replace(machine, **numbers)


def _print_machine(document: dict[str, Any]) -> None:
    old, measured = read_measured(document)
    new = fit_machine(old, measured)
    print(f"{len(measured)} times; mean error {_percent(old, measured)}, fitted {_percent(new, measured)}")
    for field in (field for fields in _TOGETHER for field in fields):
        print(f"{field:16} {getattr(old, field):8.2f} {getattr(new, field):8.2f}")


def _percent(machine: Machine, measured: list[Measured]) -> str:
    return f"{math.exp(model_error(machine, measured)) - 1:.0%}"


def main(argv: list[str] | None = None) -> int:
    """Read reports, or what weft tune measured, and print the fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE", help="JSON of weft bench collective")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="what weft tune measured, *.measured.json"
    )
    args = parser.parse_args(argv)
    if not args.results and not args.machine:
        parser.error("nothing to fit: name files of weft bench collective, or --machine FILE")
    if args.machine:
        _print_machine(json.loads(args.machine.read_text()))
    if not args.results:
        return 0
    rows = [row for path in args.results for row in json.loads(path.read_text())["rows"]]
    print(f"{'exchange':36} {'least us':>9} {'GB/s':>7} {'worst error':>12} {'sizes':>6}")
    for one in fit(rows):
        label = f"{one.algorithm} {one.protocol}"
        print(f"{label:36} {one.least_us:9.1f} {one.sent_gbs:7.0f} {one.worst_error:11.0%} {one.sizes:7d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
