# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured: which variant serves a collective up to which size. `weft tune` writes them.

Bad and missing tables are never fatal: each is named in one line of the log, and has no rows. The core is loaded when a
table is read: tools/compile_book.py imports this module before there is one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import weft
from weft.collectives.library import entries
from weft.collectives.variants import MODES, PROGRAM, Variant
from weft.errors import Error
from weft.runtime.files import write_file

log = logging.getLogger("weft.collectives")

TABLE_VERSION = 1
_MOST_BYTES = 64 << 20


def table_name(machine: str, key: str, ranks: int) -> str:
    """Return the file name of a measured table."""
    safe = "".join(c if c.isalnum() else "-" for c in key) or "any"
    return f"collectives-{machine}-{safe}-{ranks}.json"


def read_table(path: Path, key: str, is_private: bool = False) -> list[dict[str, Any]]:
    """Return a table's rows: collective, ranks (0 = any), max_bytes (None = all), variant. Bad: none, and a log.

    Args: is_private: one that somebody else may have written is bad, too.
    """
    return [row for _, row in _read_rows(path, key, is_private)]


def other_rows(path: Path, key: str, collectives: Iterable[str], ranks: int) -> list[dict[str, Any]]:
    """Return a table's rows but those of ``collectives`` on ``ranks`` ranks, as write_table() takes them."""
    without = {(collective, ranks) for collective in collectives}
    return [
        written
        for written, row in _read_rows(path, key, is_private=False)
        if (row["collective"], row["ranks"]) not in without
    ]


def _read_rows(path: Path, key: str, is_private: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the rows of a table, as they are written and as they are used."""
    if not path.is_file():
        return []
    try:
        document = json.loads(
            weft._core.read_private(str(path), _MOST_BYTES) if is_private else path.read_text()
        )
        if document["version"] != TABLE_VERSION or (key and document["key"] != key):
            log.info("table %s is for %s, version %s: not used", path, document["key"], document["version"])
            return []
        return [(row, _row(row)) for row in document["rows"]]
    except (
        Error,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        log.warning("table %s is not used: %s: %s", path, type(error).__name__, error)
        return []


def _row(row: dict[str, Any]) -> dict[str, Any]:
    options = tuple(sorted(row.get("options", {}).items()))
    variant = Variant(
        row["algorithm"],
        row.get("protocol", "Simple"),
        int(row.get("instances", 1)),
        int(row.get("slice_bytes", 0)),
        int(row.get("num_sms", 0)),
        options,
        row.get("mode", PROGRAM),
    )
    if variant.mode not in MODES:
        raise ValueError(f"no mode {variant.mode!r}")
    if variant.name not in entries():
        raise ValueError(f"no algorithm {variant.name!r}")
    hash(variant)  # a list among the options is a TypeError here, not where the variant is looked up
    limit = row.get("max_bytes")
    numbers = (variant.instances, variant.slice_bytes, variant.num_sms, row.get("ranks", 0), limit or 0)
    if not isinstance(row["collective"], str) or any(int(number) < 0 for number in numbers):
        raise ValueError(f"collective {row['collective']!r} with {numbers}")
    return {
        "collective": row["collective"],
        "ranks": int(row.get("ranks", 0)),
        "max_bytes": None if limit is None else int(limit),
        "variant": variant,
        "measured_us": {str(label): float(us) for label, us in row.get("measured_us", {}).items()},
    }


def write_table(path: Path, key: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table; atomically, so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": TABLE_VERSION, "key": key, "rows": list(rows)}
    write_file(path, json.dumps(document, indent=1) + "\n")
