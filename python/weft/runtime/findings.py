# SPDX-License-Identifier: Apache-2.0
"""One line of ``weft doctor``: what was looked at, what it is for, and what helps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        state: "ok", "missing", "slow" or "wrong".
        what: the part that was looked at.
        serves: what it is for.
        why: what was seen, where it is not ok.
        remedy: a command, or what to do, where there is something to do.
    """

    state: str
    what: str
    serves: str
    why: str = ""
    remedy: str = ""
