# SPDX-License-Identifier: Apache-2.0
"""Algorithms from files, whatever their form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from weft.collectives.ir import Algorithm
from weft.collectives.xml import from_xml, is_list, read_list
from weft.errors import Error, invalid


def load_file(path: str | Path, reschedule: bool = False) -> Algorithm:
    """Read MSCCL XML or an MSCCL++ JSON plan, by the ending. XML is not verified yet.

    ``reschedule``: of a plan, let our compiler make blocks, channels and order anew.

    Raises: Error, naming file and place; OSError.
    """
    file = Path(path)
    if file.suffix == ".xml":
        return from_xml(_text(file), file.name)
    if file.suffix == ".json":
        from weft.collectives.plan_json import from_plan

        return from_plan(_text(file), file.name, reschedule)
    raise invalid("file", file.name, "a name that ends in .xml (MSCCL) or .json (MSCCL++ plan)")


def load_listed(path: str | Path) -> list[Algorithm]:
    """Read the algorithms that a list of microsoft/msccl names, with the sizes and protocols that it gives them.

    Paths are relative to the list. Raises: Error, naming file and place; OSError.
    """
    file = Path(path)
    found = []
    for listed in read_list(_text(file), file.name):
        algorithm = load_file(file.parent / Path(listed.path).expanduser())
        found.append(
            dataclasses.replace(
                algorithm,
                min_bytes=listed.min_bytes,
                max_bytes=listed.max_bytes,
                protocol=listed.protocol or algorithm.protocol,
            )
        )
    return found


def is_listing(path: str | Path) -> bool:
    """Return whether a file is such a list. Raises: Error, OSError."""
    file = Path(path)
    return file.suffix == ".xml" and is_list(_text(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{file.name}: not text: {error}") from None
