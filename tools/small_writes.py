# SPDX-License-Identifier: Apache-2.0
"""What a small write with an immediate costs the CPU in two builds, by turns.

    python tools/small_writes.py BEFORE AFTER --turns 6 --json FILE

8 bytes, 32 under way, between two engines of one process, which have a secret. BEFORE and AFTER are folders of
checkouts with a package `weft`. CPU time, since that of the clock is of no use on a machine that others use. Each turn
is a process for each build and network, and each of its figures the mean of 1920 writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

WINDOW, WINDOWS, ROUNDS = 32, 60, 4


def cpu_s() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(provider: str) -> list[float]:
    """Return the microseconds of CPU of a write and its immediate, on both sides, for each round but the first."""
    from weft.transfer import TransferEngine

    a, b = (TransferEngine(provider, name=name, secret=b"a secret of sixteen or more") for name in "ab")
    source, target = a.register(bytearray(64)), b.register(bytearray(64), remote_write=True)
    a.connect(b.address)
    counter, remote = b.imm(b.connect(a.address), 7), a.attach(target.descriptor)
    found, count = [], 0
    for _ in range(ROUNDS + 1):
        began = cpu_s()
        for _ in range(WINDOWS):
            writes = [a.write(source, remote, 8, imm=7) for _ in range(WINDOW)]
            count += WINDOW
            writes[-1].wait()
            counter.wait(count)
        found.append((cpu_s() - began) / (WINDOW * WINDOWS) * 1e6)
    return found[1:]


def one_turn(folder: Path, provider: str) -> list[float]:
    """Measure in a process of its own that finds the build in ``folder``."""
    command = [sys.executable, __file__, "--measure", provider]
    variables = os.environ | {"PYTHONPATH": str(folder)}
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=300)
    found: list[float] = json.loads(ran.stdout)
    return found


def commit_of(folder: Path) -> str:
    """Return the commit that a build is of."""
    asked = subprocess.run(
        ["git", "-C", folder, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "not a checkout"


def main() -> int:
    """Measure by turns, print a table, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="*", type=Path, metavar="BUILD")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return 0
    rows = []
    for provider in ("fabric:tcp", "fabric:shm"):
        found: dict[str, list[float]] = {"before": [], "after": []}
        for _ in range(args.turns):
            for side, folder in zip(found, args.builds, strict=True):
                found[side] += one_turn(folder, provider)
        for side, all_us in found.items():
            median, least = statistics.median(all_us), min(all_us)
            rows.append(
                {
                    "provider": provider,
                    "build": side,
                    "median_us": round(median, 3),
                    "min_us": round(least, 3),
                }
            )
            rows[-1]["figures_us"] = [round(us, 3) for us in all_us]
            print(f"{provider:12} {side:8} median {median:.2f} us, least {least:.2f} us, of {len(all_us)}")
    if args.json:
        record = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": {
                "cpu_count": os.cpu_count(),
                "platform": platform.platform(),
                "load": [round(load, 1) for load in os.getloadavg()],
            },
            "versions": {
                side: commit_of(path) for side, path in zip(("before", "after"), args.builds, strict=True)
            },
            "command": "python tools/small_writes.py BEFORE AFTER " + f"--turns {args.turns}",
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
