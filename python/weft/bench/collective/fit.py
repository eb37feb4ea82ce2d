# SPDX-License-Identifier: Apache-2.0
"""Fits the cost model's figures of exchanges to results of ``weft bench collective``.

    for call in all_gather all_to_all; do
      weft bench collective --calls $call -b 1K -e 64M --json $call.json \\
        --algorithm "${call/_/}_allpairs LL exchange" --algorithm "${call/_/}_allpairs Simple exchange"
    done
    python -m weft.bench.collective.fit all_gather.json all_to_all.json

Prints, for every algorithm and way, the microseconds of the least call and the GB/s of what a rank sends beyond it
(``_EXCHANGE_COSTS`` of weft.collectives.cost), and the largest relative error over the rows. The least of all rows of
one size counts, as a machine adds noise and takes none away. The fit is least squares of relative errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weft.collectives.cost import sent_bytes

# Sizes that a way is for; beyond, its times don't enter the fit. Bytes of the whole buffer.
_MOST_BYTES = {"LL": 2 << 20, "Simple": 64 << 20}
_MOST_BYTES_ONE_STEP = 128 << 10


@dataclasses.dataclass(frozen=True)
class Fit:
    """What one algorithm costs, one way: least_us + bytes sent / sent_gbs."""

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
    sent = np.array([sent_bytes(name, ranks, num_bytes) for ranks, num_bytes in cells])
    us = np.array(list(cells.values()))
    columns = np.stack([1 / us, sent / us], axis=1)
    (least_us, us_per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(us)), rcond=None)
    errors = np.abs(columns @ (least_us, us_per_byte) - 1)
    return Fit(name, protocol, float(least_us), float(1e-3 / us_per_byte), float(errors.max()), len(us))


def main(argv: list[str] | None = None) -> int:
    """Read reports and print the fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="JSON of weft bench collective")
    args = parser.parse_args(argv)
    rows = [row for path in args.results for row in json.loads(path.read_text())["rows"]]
    print(f"{'exchange':36} {'least us':>9} {'GB/s':>7} {'worst error':>12} {'sizes':>6}")
    for one in fit(rows):
        label = f"{one.algorithm} {one.protocol}"
        print(f"{label:36} {one.least_us:9.1f} {one.sent_gbs:7.0f} {one.worst_error:11.0%} {one.sizes:7d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
