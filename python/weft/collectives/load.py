# SPDX-License-Identifier: Apache-2.0
"""Algorithms from files, whatever their form."""

from __future__ import annotations

from pathlib import Path

from weft.collectives.ir import Algorithm
from weft.collectives.xml import from_xml
from weft.errors import Error, invalid


def load_file(path: str | Path) -> Algorithm:
    """Read MSCCL XML or an MSCCL++ JSON plan, by the ending. Not verified yet.

    Raises: Error, naming file and place; OSError.
    """
    file = Path(path)
    if file.suffix == ".xml":
        return from_xml(_text(file), file.name)
    if file.suffix == ".json":
        from weft.collectives.plan_json import from_plan

        return from_plan(_text(file), file.name)
    raise invalid("file", file.name, "a name that ends in .xml (MSCCL) or .json (MSCCL++ plan)")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{file.name}: not text: {error}") from None
