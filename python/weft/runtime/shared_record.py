# SPDX-License-Identifier: Apache-2.0
"""A JSON file to which several runs, one after another or at once, add what they measured."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.runtime.files import own_file


@dataclass
class SharedRecord:
    """``before`` is what the file held, empty at first; ``after`` is what it will hold."""

    before: dict[str, Any]
    after: dict[str, Any]


@contextmanager
def shared_record(path: Path) -> Iterator[SharedRecord]:
    """Hold the file while its content is read and replaced. An error in between leaves it as it was."""
    with open(path, "a+", opener=own_file) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
        file.seek(0)
        text = file.read()
        record = SharedRecord(json.loads(text) if text.strip() else {}, {})
        yield record
        file.seek(0)
        file.truncate()
        file.write(json.dumps(record.after, indent=1) + "\n")
