# SPDX-License-Identifier: Apache-2.0
"""Lets Python's logger ``weft.collectives`` follow WEFT_LOG, as the extension's own lines do."""

from __future__ import annotations

import logging
import sys

_LEVELS = {"error": logging.ERROR, "info": logging.INFO, "debug": logging.DEBUG}
_log = logging.getLogger("weft.collectives")


class _Lines(logging.Handler):
    """Writes what the extension would; nothing where the program has handlers of its own, which get every record."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            # In one piece, as other ranks write there, too.
            sys.stderr.write(f"weft {record.levelname.lower()}: {record.getMessage()}\n")


def follow(level: str) -> None:
    """Log from ``level`` on, a value of WEFT_LOG; its default leaves the level to the program."""
    if level in _LEVELS:
        _log.setLevel(_LEVELS[level])
    if not any(isinstance(handler, _Lines) for handler in _log.handlers):
        _log.addHandler(_Lines())
