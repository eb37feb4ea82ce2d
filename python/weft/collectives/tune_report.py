# SPDX-License-Identifier: Apache-2.0
"""``weft tune --report``: what was measured here beside what the cost model says, and how good the choices are.

A cell is a call at a size. Its best candidate is the one with the least measured time, a median; a choice is near where
its own median is within 10 % of that. A choice whose median's 95 % interval begins within 10 % is counted apart: the
samples do not tell whether it is near. Three choices are counted: the cost model's, the shipped table's, which serves
where nothing was measured, and the tuned table's. By its own run's measurements a table is always near: another run's
(``measured``) say how good it is.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

from weft.collectives.cost import MACHINES, predict_exchange_us, predict_us
from weft.collectives.selector import Selector
from weft.collectives.tuned_tables import read_table
from weft.collectives.variants import VARIANTS, Choice
from weft.errors import Error
from weft.runtime.files import write_file
from weft.runtime.machine import versions

NEAR = 1.1
_SHOWN = ("call", "bytes", "measured_us", "low_us")


def measured_path(table: Path) -> Path:
    """Return where every candidate's time stands beside a table."""
    return table.with_suffix(".measured.json")


def keep_measured(table: Path, machine: str, key: str, ranks: int, found: list[dict[str, Any]]) -> None:
    """Add new measurements to those of earlier runs; a cell that was measured again is replaced."""
    path = measured_path(table)
    cells = {(row["call"], row["bytes"]): row for row in _read(path)["cells"]} if path.is_file() else {}
    for row in found:
        if "measured_us" in row:  # a journal of an earlier version has winners alone
            cells[row["call"], row["bytes"]] = {name: row[name] for name in _SHOWN if name in row}
    document = {
        "machine": machine,
        "key": key,
        "ranks": ranks,
        "date": date.today().isoformat(),
        "versions": versions(),
        "command": shlex.join(["weft", *sys.argv[1:]]),
        "cells": [cells[key] for key in sorted(cells)],
    }
    write_file(path, json.dumps(document, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        if not isinstance(document["cells"], list) or document["machine"] not in MACHINES:
            raise ValueError("no cells of a known machine")
        return dict(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Error(f"{path}: {error}; allowed: what weft tune wrote") from None


def report(table: Path, names: dict[str, str], measured: Path | None = None) -> list[str]:
    """Return the report's lines. ``names``: collectives by call; ``measured``: by default what stands beside the table.

    Raises: Error where nothing was measured.
    """
    path = measured or measured_path(table)
    if not path.is_file():
        raise Error(f"{path} does not exist: run weft tune without --report first")
    document = _read(path)
    ranks, machine = int(document["ranks"]), str(document["machine"])
    selectors = {
        name: Selector(ranks, machine, may_copy=True) for name in ("model", "shipped table", "table")
    }
    selectors["model"].use_rows([])
    selectors["table"].use_rows(read_table(table, str(document["key"])))
    lines = [f"{'microseconds':46} {'measured':>10} {'model':>10} {'error':>7}"]
    near, perhaps = dict.fromkeys(selectors, 0), dict.fromkeys(selectors, 0)
    for cell in document["cells"]:
        times = {str(label): float(us) for label, us in cell["measured_us"].items()}
        lines.append(f"{cell['call']}, {cell['bytes']} bytes")
        choices = _choices(names[cell["call"]], ranks)
        for label, us in sorted(times.items(), key=lambda item: item[1]):
            model = _predicted(choices.get(label), int(cell["bytes"]), machine)
            said = f"{model:10.1f} {model / us - 1:+7.0%}" if model is not None else f"{'-':>10} {'-':>7}"
            lines.append(f"  {label:44} {us:10.1f} {said}")
        for name, selector in selectors.items():
            choice = selector.choose(names[cell["call"]], int(cell["bytes"]), cell["call"] == "all_reduce")
            label = next((label for label, one in choices.items() if _is_same(one, choice)), "")
            limit = NEAR * min(times.values())
            near[name] += times.get(label, math.inf) <= limit
            perhaps[name] += float(cell.get("low_us", times).get(label, math.inf)) <= limit
    cells = len(document["cells"])
    for name, count in near.items():
        lines.append(f"the {name}'s choice is within 10 % of the best in {count} of {cells} cells")
        lines.append(f"  and may be by its 95 % interval in {perhaps[name]}")
    return lines


def _choices(collective: str, ranks: int) -> dict[str, Choice]:
    """Return every candidate that exists, by label."""
    found = {}
    for variant in VARIANTS[collective]:
        try:
            found[variant.label()] = variant.choice(ranks, collective == "allreduce")
        except Error:
            continue
    return found


def _predicted(choice: Choice | None, num_bytes: int, machine: str) -> float | None:
    if choice is None or (choice.way is not None and machine != "nvlink"):
        return None
    if choice.way is not None:
        return predict_exchange_us(choice.algorithm, choice.way, num_bytes)
    return predict_us(choice.algorithm, num_bytes, MACHINES[machine])


def _is_same(one: Choice, other: Choice) -> bool:
    """Return whether two choices run alike; candidates are built once, so an algorithm is itself."""
    return one.algorithm is other.algorithm and (one.mode, one.num_sms) == (other.mode, other.num_sms)
