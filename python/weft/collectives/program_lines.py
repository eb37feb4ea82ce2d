# SPDX-License-Identifier: Apache-2.0
"""Where in the user's file a step of a program stands, and the error that says so."""

from __future__ import annotations

import functools
import os
import sys
from types import TracebackType

from weft.errors import Error


class ProgramError(Error):
    """A mistake in a program; the message starts with the file and line of the user's code."""


def place_of(trace: TracebackType | None) -> str:
    """Return file:line of the innermost line that a traceback passed through; "" for none."""
    place = ""
    while trace is not None:
        place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def user_line() -> str:
    """Return the line of the nearest caller outside the language: "file.py:12"."""
    frame = sys._getframe(0)
    here = frame.f_code.co_filename
    own = (here, os.path.join(os.path.dirname(here), "language.py"))
    while frame.f_back is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    return _line_name(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=1024)
def _line_name(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def _error(message: str) -> ProgramError:
    return ProgramError(f"{user_line()}: {message}")
