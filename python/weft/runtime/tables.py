# SPDX-License-Identifier: Apache-2.0
"""The one way in which commands print tables: they fit the terminal, and 80 columns where nobody sees a width.

    console = make_console(wide=args.wide)
    table = Table("Transports of cpu", [Column("name", is_key=True), Column("latency us", is_number=True)])
    table.add("mapped", "0.6")
    table.print(console)

Units stand in heads. A column without content is left out. A column that says the same in every row moves into a
line above the table. What is still too wide becomes several tables, each of which repeats the key columns, or, of a
table that stays one, is left out and named below it; only then are long texts folded. ``--wide`` prints one table with
everything, however wide.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from weft.runtime.files import own_file
from weft.runtime.logs import printable

WIDTH = 80
_UNBOUNDED = 100_000
_FOLDED_TEXT = 26  # a text that is longer than this may be folded rather than start a new table
_EMPTY = ("", "-")


def add_wide_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--wide``."""
    parser.add_argument("--wide", action="store_true", help="print each table as one, however wide it gets")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as one that SIGPIPE ends, where rich would leave with status 1."""
        raise  # noqa: PLE0704: rich calls this while it handles the error


def make_console(wide: bool = False) -> Console:
    """Return a console on standard output: as wide as the terminal, or 80 columns; unbounded with ``wide``."""
    if wide:
        return _Console(width=_UNBOUNDED)
    return _Console() if sys.stdout.isatty() else _Console(width=WIDTH)


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        head: with the unit, such as ``latency us``.
        is_number: aligned to the right, and never folded.
        is_key: says which row this is: repeated where a table is divided, and never moved above it.
        never_folds: a name to copy: never folded.
    """

    head: str
    is_number: bool = False
    is_key: bool = False
    never_folds: bool = False


@dataclass
class Table:
    """Rows under columns, and how they are printed.

    Args:
        title: one line.
        columns: at least one.
        fold_constants: say once, above the table, what all of two or more rows have in common.
        stays_one: columns come in the order of their worth, and those that do not fit are left out, not continued.
    """

    title: str
    columns: Sequence[Column]
    fold_constants: bool = False
    stays_one: bool = False
    _rows: list[tuple[str, ...]] = field(default_factory=list)
    _styles: list[str | None] = field(default_factory=list)

    def add(self, *cells: str, style: str | None = None) -> None:
        """Append a row: a text for each column, "" or "-" for nothing."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self._rows.append(tuple(printable(cell) for cell in cells))
        self._styles.append(style)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def print(self, console: Console) -> None:
        """Print the table, or the tables that it takes to fit ``console``."""
        for part in self.parts(console.width):
            console.print(part)

    def parts(self, width: int) -> list[Text | RichTable]:
        """Return what print() prints on a console of so many columns: titles, tables, empty lines."""
        parts: list[Text | RichTable] = []
        common, groups, left_out = self._layout(width)
        title = Text(printable(self.title), "bold")  # a Text: brackets in what is printed are no markup
        for group in groups:
            parts.append(title)
            if common:
                parts.append(Text(f"  all: {self._line(common)}"))
            parts += [self._table(group), Text()]
            title, common = Text(f"{printable(self.title)}, continued", "bold"), []
        if left_out:
            heads = ", ".join(self.columns[index].head for index in left_out)
            parts[-1:] = [Text(f"  with --wide or --json also: {heads}"), Text()]
        return parts

    def heads(self, width: int) -> set[str]:
        """Return the heads of the columns that print() shows on a console of so many columns."""
        common, groups, _ = self._layout(width)
        return {self.columns[index].head for group in [common, *groups] for index in group}

    def _layout(self, width: int) -> tuple[list[int], list[list[int]], list[int]]:
        """Return the columns that are said above the table, those of each table, and those that are left out."""
        filled = [
            index for index, column in enumerate(self.columns) if column.is_key or self._has_content(index)
        ]
        common = [index for index in filled if self._is_common(index)]
        shown = [index for index in filled if index not in common]
        if not self.stays_one:
            return common, self._groups(shown, width), []
        kept = [index for index in shown if self.columns[index].is_key]
        for index in shown:
            if index not in kept and self._width(sorted([*kept, index])) <= width:
                kept.append(index)
        return common, [sorted(kept)], [index for index in shown if index not in kept]

    def _has_content(self, index: int) -> bool:
        return any(row[index] not in _EMPTY for row in self._rows)

    def _is_common(self, index: int) -> bool:
        if not self.fold_constants or self.columns[index].is_key or len(self._rows) < 2:
            return False
        return len({row[index] for row in self._rows}) == 1

    def _line(self, common: Sequence[int]) -> str:
        return ", ".join(f"{self.columns[index].head} {self._rows[0][index]}" for index in common)

    def _groups(self, shown: Sequence[int], width: int) -> list[list[int]]:
        """Divide the columns into tables that are at most ``width`` wide with the keys before them."""
        keys = [index for index in shown if self.columns[index].is_key]
        groups: list[list[int]] = []
        group = list(keys)
        for index in shown:
            if index in keys:
                continue
            if len(group) > len(keys) and self._width([*group, index]) > width:
                groups.append(group)
                group = list(keys)
            group.append(index)
        return [*groups, group]

    def _width(self, group: Sequence[int]) -> int:
        probe = Console(width=_UNBOUNDED)
        return Measurement.get(probe, probe.options, self._table(group, _FOLDED_TEXT)).maximum

    def _head(self, index: int) -> str:
        """Return a number's head in lines that are no wider than its numbers, so that it costs no room."""
        head = self.columns[index].head
        if not self.columns[index].is_number:
            return head
        widths = [len(row[index]) for row in self._rows] + [len(word) for word in head.split()]
        return "\n".join(textwrap.wrap(head, max(widths), break_on_hyphens=False))

    def _table(self, group: Sequence[int], text_width: int | None = None) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
        for index in group:
            column = self.columns[index]
            is_rigid = column.is_number or column.never_folds
            table.add_column(
                self._head(index),
                justify="right" if column.is_number else "left",
                overflow="fold",
                no_wrap=is_rigid,
                max_width=None if is_rigid else text_width,
            )
        for row, style in zip(self._rows, self._styles, strict=True):
            table.add_row(*(Text(row[index]) for index in group), style=style)
        return table


def size(text: str) -> int:
    """Return bytes for 1024, 64K, 64M or 1G (powers of 1024)."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    try:
        return int(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: bytes such as 1024, 64K, 64M, 1G") from None


def integer_from(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least so much, for argparse."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"got {text}, allowed: a whole number, {least} or more")
        return number

    return read


def output_file(given: str) -> str:
    """Check that a file can be written before anything is measured. Makes its folder. Ranks may do it at once.

    Raises: ArgumentTypeError, for argparse.
    """
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        open(path, "a", opener=own_file).close()
        if not was_there:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"got {given}, which cannot be written: {error.strerror}") from None
    return given


def size_text(num_bytes: int) -> str:
    """Return a size as people say it: 64 KiB where it is a whole number of those, else 1.5 GB, 212 MB or 96 B."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= one and num_bytes % one == 0:
            return f"{num_bytes // one} {unit}"
    if num_bytes < 10_000:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1_000_000_000 else f"{num_bytes / 1e6:.3g} MB"
