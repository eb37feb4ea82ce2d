# SPDX-License-Identifier: Apache-2.0
"""How every ``weft bench`` command reports: one JSON form, one table, one plot, one progress bar.

    report = Report("weft bench moe", extra_columns=("egress_gbs",))
    with progress(enabled=rank == 0) as bar:
        task = bar.add_task("ht_dispatch", total=iterations)
        ...
    report.add(Row("ht_dispatch", "bf16", 4096, bytes, slowest_rank(samples), floor_us=floor, checked=True,
                   baselines={"gloo": gloo_us}, extra={"ranks": 4, "egress_gbs": gbs}))
    report.finish(args.json, args.plot)

The JSON is ``{"date": "2026-01-31", "machine": {...}, "versions": {...}, "command": "...", "notes": [...],
"rows": [...]}``. A row holds ``call``, ``dtype``, ``tokens`` (null where it means nothing), ``bytes``, ``us``
(median), ``us_min``, ``us_max``, ``floor_us`` (null where no floor is known), ``checked``, ``baselines`` (name ->
median microseconds), and whatever ``extra`` adds (ranks, hidden, ...). ``command`` begins with the WEFT_ variables that
were set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from weft.errors import NotInstalled
from weft.runtime.files import write_file
from weft.runtime.machine import machine, versions
from weft.runtime.tables import Column, Table, add_wide_argument, make_console, output_file, size_text

# What a row must hold, and the types that JSON may carry for it.
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "call": (str,),
    "dtype": (str,),
    "tokens": (int, type(None)),
    "bytes": (int,),
    "us": (int, float),
    "us_min": (int, float),
    "us_max": (int, float),
    "floor_us": (int, float, type(None)),
    "checked": (bool,),
    "baselines": (dict,),
}


class Note(NamedTuple):
    """A line under the table. ``of``: heads of columns; it is printed if one of them is shown, and always in JSON."""

    line: str
    of: tuple[str, ...] = ()


@dataclass
class Row:
    """One measured call.

    Args:
        call: e.g. ``ht_dispatch``.
        dtype: of the payload, e.g. ``bf16``.
        tokens: per rank, or None where the call has no tokens.
        bytes: that one call moves, as the benchmark defines it (its ``--help`` says how).
        samples_us: microseconds of each repetition on the slowest rank (``slowest_rank``); at least one.
        floor_us: what the machine would need at best for those bytes, or None where no floor is known.
        checked: whether this run compared the call's result with an oracle, and it agreed.
        baselines: what the same work took otherwise in the same run: name -> median microseconds.
        extra: more columns: numbers, texts, booleans.
        series: what tells rows of one call and size apart in plots, such as an algorithm; "" where nothing does.
    """

    call: str
    dtype: str
    tokens: int | None
    bytes: int
    samples_us: Sequence[float]
    floor_us: float | None = None
    checked: bool = False
    baselines: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    series: str = ""

    @property
    def label(self) -> str:
        """The call and the series, for a plot."""
        return f"{self.call} {self.series}".rstrip()

    @property
    def us(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples_us)

    def to_json(self) -> dict[str, Any]:
        """Return the row in the form that the module's documentation gives."""
        return {
            "call": self.call,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "us": round(self.us, 3),
            "us_min": round(min(self.samples_us), 3),
            "us_max": round(max(self.samples_us), 3),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 3),
            "checked": self.checked,
            "baselines": {name: round(us, 3) for name, us in self.baselines.items()},
            **({"series": self.series} if self.series else {}),
            **self.extra,
        }


def plain_text(docstring: str) -> str:
    """Return a docstring as help shows it: without marks of code, in 79 columns; indented lines stay lines."""
    paragraphs = docstring.replace("``", "").strip().split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else textwrap.fill(" ".join(paragraph.split()), 79)
        for paragraph in paragraphs
    )


class Report:
    """Collects rows; prints the table, writes the JSON and the plot. Use it on one rank."""

    def __init__(
        self,
        title: str,
        extra_columns: Sequence[str] = (),
        command: str | None = None,
        console: Console | None = None,
        wide: bool = False,
        names_rows: Sequence[str] = (),
    ) -> None:
        """``extra_columns``: the keys of ``Row.extra`` to show. ``command``: None takes it from sys.argv.

        ``wide``: print every column, however wide the table gets. ``names_rows``: those of ``extra_columns`` without
        which rows of one call and size could not be told apart; they stand before all others.
        """
        self.title = title
        self.rows: list[Row] = []
        self._extra_columns = tuple(extra_columns)
        settings = [
            f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("WEFT_")
        ]
        self._command = command or shlex.join([*settings, "weft", *sys.argv[1:]])
        self.console = console or make_console(wide)
        self._names_rows = tuple(names_rows)
        self._notes: list[Note] = []

    def add(self, row: Row) -> None:
        """Append a measured call."""
        self.rows.append(row)

    def add_columns(self, names: Sequence[str]) -> None:
        """Show more keys of ``Row.extra``."""
        self._extra_columns += tuple(name for name in names if name not in self._extra_columns)

    def note(self, line: str, *of: str) -> None:
        """Add a Note, such as what the floor means or why a baseline is absent."""
        self._notes.append(Note(line, of))

    def to_json(self) -> dict[str, Any]:
        """Return the whole document."""
        return {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "command": self._command,
            "notes": [note.line for note in self._notes],
            "rows": [row.to_json() for row in self.rows],
        }

    def finish(self, json_path: str | Path | None = None, plot_path: str | Path | None = None) -> None:
        """Print the table, then write the files that were asked for and say so."""
        table = self.table()
        table.print(self.console)
        shown = table.heads(self.console.width)
        for note in self._notes:
            if not note.of or shown.intersection(note.of):
                self.console.print(f"  {note.line}", highlight=False)
        if json_path:
            path = Path(json_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(self.to_json(), indent=1) + "\n")
            self.console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        if plot_path:
            Path(plot_path).parent.mkdir(parents=True, exist_ok=True)
            from weft.bench import pictures

            pictures.draw_document(self.to_json(), Path(plot_path))
            self.console.print(f"wrote {plot_path}", highlight=False, soft_wrap=True)

    def table(self) -> Table:
        """Return the rows as a table, the columns that matter most first.

        There is one per baseline, with its time as a multiple of the row's.
        """
        names = sorted({name for row in self.rows for name in row.baselines})
        is_binary = all(row.bytes < 10_000 or row.bytes % 1024 == 0 for row in self.rows)
        columns = [
            Column("call", is_key=True),
            Column("size" if is_binary else "MB", is_number=True, is_key=True),
            *(self._column(name, is_key=self._differs(name)) for name in self._names_rows),
            Column("us", is_number=True),
            *(Column(f"{name} us (ratio)", is_number=True) for name in names),
            Column("over floor", is_number=True),
            Column("checked"),
            Column("dtype"),
            Column("tokens", is_number=True),
            *(self._column(name) for name in self._extra_columns if name not in self._names_rows),
            *(Column(head, is_number=True) for head in ("min us", "max us", "floor us")),
        ]
        table = Table(self.title, columns, fold_constants=True, stays_one=True)
        for row in self.rows:
            size = size_text(row.bytes) if is_binary else f"{row.bytes / 1e6:.4g}"
            table.add(row.call, size, *self._cells(row, names))
        return table

    def _column(self, name: str, is_key: bool = False) -> Column:
        is_text = any(isinstance(row.extra.get(name), str) for row in self.rows)
        return Column(head_of(name), is_number=not is_text, is_key=is_key)

    def _differs(self, name: str) -> bool:
        return len({str(row.extra.get(name)) for row in self.rows}) > 1

    def _cells(self, row: Row, baselines: Sequence[str]) -> list[str]:
        cells = [*(self._extra_cell(row, name) for name in self._names_rows), f"{row.us:.1f}"]
        for name in baselines:
            us = row.baselines.get(name)
            cells.append("-" if us is None else f"{us:.1f} ({us / row.us:.2f}x)")
        cells.append(f"{row.us / row.floor_us:.1f}x" if row.floor_us else "-")
        cells += ["yes" if row.checked else "no", row.dtype, "-" if row.tokens is None else str(row.tokens)]
        cells += [self._extra_cell(row, name) for name in self._extra_columns if name not in self._names_rows]
        cells += [f"{min(row.samples_us):.1f}", f"{max(row.samples_us):.1f}"]
        return [*cells, f"{row.floor_us:.1f}" if row.floor_us else "-"]

    @staticmethod
    def _extra_cell(row: Row, name: str) -> str:
        value = row.extra.get(name, "-")
        return number_text(value) if isinstance(value, float) else str(value)


def number_text(value: float) -> str:
    """Return a number in four digits, or all those before the point, never with an exponent: 14,100, 3.142, 0.0005."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4f}"


_UNITS = {"_gbs": " GB/s", "_us": " us", "gbit_per_s": "Gbit/s", "mops": "million/s"}


def head_of(name: str) -> str:
    """Return what stands above the column of an extra value: its name with a unit that people know."""
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return name.removesuffix(end).replace("_", " ") + unit
    return name.replace("_", " ")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``, ``--plot FILE``, also called ``--compare``, and ``--wide``."""
    add_wide_argument(parser)
    parser.add_argument("--json", metavar="FILE", type=output_file, help="write the result there as JSON")
    parser.add_argument(
        "--plot",
        "--compare",
        metavar="FILE",
        type=picture_file,
        help="write a picture of the result there, beside the peers that were measured (needs matplotlib)",
    )


PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


def picture_file(given: str) -> str:
    """Check the name of a picture before anything is measured. Raises: ArgumentTypeError, for argparse."""
    if Path(given).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"got {given}, allowed: a name that ends in {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(str(NotInstalled("a picture", "matplotlib")))
    return output_file(given)


def slowest_rank(samples_us_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, repetition by repetition, the time of the rank that took longest."""
    return [max(repetition) for repetition in zip(*samples_us_by_rank, strict=True)]


_PARTS = ("date", "machine", "versions", "command", "rows")


def check_document(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with a benchmark's JSON, one sentence each; an empty list when nothing is."""
    wrong = [f"{key} is missing" for key in _PARTS if key not in document]
    for index, row in enumerate(document.get("rows", [])):
        for name, types in ROW_FIELDS.items():
            if name not in row:
                wrong.append(f"rows[{index}].{name} is missing")
            elif not isinstance(row[name], types) or (isinstance(row[name], bool) and bool not in types):
                wrong.append(f"rows[{index}].{name} is {row[name]!r}")
    return wrong
