# SPDX-License-Identifier: Apache-2.0
"""Where everything that watches a process is begun and ended: its log, counters, last calls and start report."""

from __future__ import annotations

import atexit
from typing import Any

from weft import _core
from weft.runtime import call_record, logs, metrics, start_report

_is_begun = False


def communicator_made(comm: Any) -> None:
    """Note that a core communicator was made."""
    _begin(int(comm.rank))
    start_report.log(comm)


def engine_made() -> None:
    """Note that a transfer engine was made."""
    _begin(None)


def _begin(rank: int | None) -> None:
    global _is_begun
    logs.follow(_core.config().log)
    logs.route(_core)
    metrics.begin(rank)
    if not _is_begun:
        _is_begun = True
        atexit.register(_end)


def _end() -> None:
    metrics.log_at_end()
    call_record.write_if_asked()
