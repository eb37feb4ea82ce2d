# SPDX-License-Identifier: Apache-2.0
"""Checks that no source file is longer than a reader can keep in mind.

Usage: python tools/check_sizes.py [ROOT]. Prints one line per file that is too long and returns 1 if there is any.
A file at the limit is cut by idea: docs/architecture.md says where things stand.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = {".h", ".cc", ".cuh", ".py", ".c", ".cu"}
# Folder -> the lines that a source file below it may have.
LIMITS = {"kernels": 700, "src": 700, "compat": 700, "python": 700}


def breaches(root: Path) -> list[str]:
    """Return every file that is too long, one sentence each."""
    found: list[str] = []
    for top, limit in LIMITS.items():
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES or path.is_symlink() or not path.is_file():
                continue
            lines = len(path.read_text().splitlines())
            if lines > limit:
                found.append(f"{path.relative_to(root).as_posix()}: {lines} lines, allowed in {top}: {limit}")
    return found


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    found = breaches(root)
    for line in found:
        print(line)
    print(f"sizes: {len(found)} files are too long" if found else "sizes: every file is within its limit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
