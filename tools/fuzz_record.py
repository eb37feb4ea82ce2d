#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds what one run of a fuzz target did to a JSON file: inputs, coverage, findings, seconds. tools/fuzz calls it."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def figures(log: str) -> dict[str, Any]:
    """Return what libFuzzer's log says in the end; None where it does not say."""

    def last(pattern: str) -> int | None:
        found = re.findall(pattern, log, re.MULTILINE)
        return int(found[-1]) if found else None

    return {
        "inputs": last(r"^stat::number_of_executed_units: *(\d+)"),
        "new_inputs": last(r"^stat::new_units_added: *(\d+)"),
        "slowest_s": last(r"^stat::slowest_unit_time_sec: *(\d+)"),
        "coverage_edges": last(r"^#\d+.* cov: (\d+)"),
        "features": last(r"^#\d+.* ft: (\d+)"),
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {"cpu_count": os.cpu_count(), "platform": platform.platform()}


def versions(compiler: str) -> dict[str, str]:
    """Return those of what fuzzes."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    found = {"clang": said.splitlines()[0], "python": platform.python_version()}
    try:
        return found | {"atheris": importlib.metadata.version("atheris")}
    except importlib.metadata.PackageNotFoundError:
        return found


def main() -> None:
    """Add one target's run; a run of the same target before is replaced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("log", type=Path)
    for name in ("target", "command", "compiler"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seconds", "findings"):
        parser.add_argument(f"--{name}", required=True, type=int)
    given = parser.parse_args()
    record = json.loads(given.record.read_text()) if given.record.exists() else {"targets": {}}
    record["date"] = datetime.date.today().isoformat()
    record["machine"] = machine()
    record["versions"] = versions(given.compiler)
    record["targets"][given.target] = {
        **figures(given.log.read_text(errors="replace")),
        "findings": given.findings,
        "seconds": given.seconds,
        "command": given.command,
        "load_1_min": round(os.getloadavg()[0], 1),
    }
    given.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
