# SPDX-License-Identifier: Apache-2.0
"""The one way in which commands show how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(enabled: bool = True) -> Iterator[Progress]:
    """Yield a rich ``Progress`` with the bar that all benchmarks show; draw nothing when not ``enabled``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not enabled) as bar:
        yield bar
