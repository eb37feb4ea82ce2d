# SPDX-License-Identifier: Apache-2.0
"""Where everything that watches a process is begun and ended: its log, counters, last calls and start report."""

from __future__ import annotations

import atexit
from typing import Any

from weft import _core
from weft.runtime import call_record, logs, metrics, start_report

_begun_by: Any = None  # the process that did


def communicator_made(comm: Any) -> None:
    """Note that a core communicator was made."""
    _begin(int(comm.rank))
    start_report.log(comm)


def engine_made() -> None:
    """Note that a transfer engine was made."""
    _begin(None)


def _begin(rank: int | None) -> None:
    global _begun_by
    logs.follow(_core.config().log)
    logs.route(_core)
    metrics.begin(rank)
    if _begun_by is None:
        atexit.register(_end)
    if _begun_by is None or not _begun_by.is_this:
        _begun_by = _core.OwnerProcess()


def _end() -> None:
    if not _begun_by.is_this:  # a forked child, which has made nothing
        return
    metrics.log_at_end()
    call_record.write_if_asked()
