# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets of what Python parses: XML programs and lists, JSON plans, tuned tables.

    python tests/fuzz/python_targets.py xml -max_total_time=60 build/fuzz/found-xml tests/fuzz/corpus_xml

atheris (libFuzzer for Python) drives them by coverage. An input ends in a result or in weft.Error: everything else is a
finding, and so is an input that takes longer than ``-timeout``. tools/fuzz runs them all.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weft.collectives"], enable_loader_override=False):
    import weft.collectives.plan_form
    import weft.collectives.plan_json
    import weft.collectives.tuned_tables
    import weft.collectives.xml
    from weft.errors import Error

TABLE = Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "table.json"


def xml(data: bytes) -> None:
    """An algorithm in XML, or a list of them."""
    text = data.decode("utf-8", "replace")
    if weft.collectives.xml.is_list(text):
        weft.collectives.xml.read_list(text, "list.xml")
    else:
        weft.collectives.xml.from_xml(text, "program.xml")


def plan(data: bytes) -> None:
    """A JSON plan, run as it stands and scheduled anew."""
    text = data.decode("utf-8", "replace")
    for reschedule in (False, True):
        weft.collectives.plan_json.from_plan(text, "plan.json", reschedule)


def table(data: bytes) -> None:
    """A tuned table: read, and what is read is used."""
    TABLE.write_bytes(data)
    for row in weft.collectives.tuned_tables.read_table(TABLE, ""):
        (row["collective"], row["ranks"]) in {("all_reduce", 2)}  # noqa: B015 - as other_rows() does
        assert row["max_bytes"] is None or row["max_bytes"] >= 0
        hash(row["variant"])
    weft.collectives.tuned_tables.other_rows(TABLE, "", ["all_reduce"], 2)


TARGETS: dict[str, Callable[[bytes], None]] = {"xml": xml, "plan": plan, "table": table}


def main() -> None:
    """Fuzz the target that the first argument names; the others are libFuzzer's."""
    target = TARGETS[sys.argv.pop(1)]
    logging.disable()

    def one(data: bytes) -> None:
        try:
            target(data)
        except Error:
            return

    atheris.Setup(sys.argv, one)
    try:
        atheris.Fuzz()
    finally:
        TABLE.unlink(missing_ok=True)
        os.rmdir(TABLE.parent)


if __name__ == "__main__":
    main()
