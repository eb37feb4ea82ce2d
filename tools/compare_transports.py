# SPDX-License-Identifier: Apache-2.0
"""Compares transports with mapped peers in one run: expert parallelism over each, in turns.

Usage: python tools/compare_transports.py [--transports mapped,nccl,nvshmem] [--modes ll,ht] [--rounds 3] ...

Each round runs `weft bench moe` over every transport, so that what changes with time changes for all. Printed: the best
median of each call, and its ratio to the first transport's. NVLink multicast is off. Exits with 1 where a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_SYMMETRIC_SIZE": "12G",
    "WEFT_WINDOW_BYTES": str(4 << 30),  # memory of a library does not grow
}


def run(transport: str, mode: str, ranks: int | None) -> list[dict[str, Any]]:
    """Return the rows of one benchmark; none where it failed, whose error is printed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "weft", "bench", "moe", "--mode", mode, "--device", "cuda"]
        command += ["--transport", transport, "--json", str(out)]
        if ranks:
            command += ["--ranks", str(ranks)]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | SETTINGS, timeout=300)
        if ran.returncode != 0:
            print(f"{transport}, {mode}: failed\n{ran.stdout}{ran.stderr}", file=sys.stderr)
            return []
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return rows


def main() -> int:
    """Run everything, print a table, and say whether all ran."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transports", default="mapped,nccl,nvshmem")
    parser.add_argument("--modes", default="ll,ht")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    transports = args.transports.split(",")
    best: dict[tuple[str, str, str], float] = {}
    all_ran = True
    for _ in range(args.rounds):
        for mode in args.modes.split(","):
            for transport in transports:
                rows = run(transport, mode, args.ranks)
                all_ran = all_ran and bool(rows) and all(row["checked"] for row in rows)
                for row in rows:
                    key = (mode, row["call"], transport)
                    best[key] = min(best.get(key, float("inf")), row["us"])
    print(f"{'mode':5}{'call':30}" + "".join(f"{name:>12}{'ratio':>8}" for name in transports))
    for mode, call in dict.fromkeys((mode, call) for mode, call, _ in best):
        first = best.get((mode, call, transports[0]))
        line = f"{mode:5}{call:30}"
        for name in transports:
            us = best.get((mode, call, name))
            line += f"{us:12.1f}{us / first:8.3f}" if us and first else f"{'-':>12}{'-':>8}"
        print(line)
    if args.json:
        rows = [{"mode": m, "call": c, "transport": t, "us": us} for (m, c, t), us in best.items()]
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all_ran else 1


if __name__ == "__main__":
    sys.exit(main())
