# SPDX-License-Identifier: Apache-2.0
"""What a run of the tests says at its end: how many ran of those that this machine can run, and why others did not.

    title, lines = summary.of(ran=4114, reasons=Counter({"no C++ compiler (c++)": 2, "needs 2 or more GPUs, ...": 166}))
    # 4114 of 4116 tests that this machine can run ran here; 168 skipped

A reason that an installation, a build or an option removes stands for tests that this machine can run. All others need
another machine, or say that a test does not apply to what it was given.
"""

from __future__ import annotations

import re
from collections import Counter

# Reasons that one command removes, on the same machine.
REMOVABLE = re.compile(
    r"not installed|not built|could not import|older than|no C\+\+ compiler|no wheel|no cuda\.h|no NVRTC"
    r"|--thorough|--every-kernel|needs (ip|mpirun)\b|apt(-get)? install|pip install|tools/"
)


def of(ran: int, reasons: Counter[str]) -> tuple[str, list[str]]:
    """Return a title, and lines with each reason and its count, most first.

    ran: tests that passed or failed. reasons: of those that were skipped.
    """
    removable = Counter({reason: n for reason, n in reasons.items() if REMOVABLE.search(reason)})
    others = reasons - removable
    title = f"{ran} of {ran + removable.total()} tests that this machine can run ran here"
    if reasons:
        title += f"; {reasons.total()} skipped"
    lines = []
    for heading, group in (
        ("This machine can run these after an installation, a build, or with an option:", removable),
        ("These need another machine, or do not apply to it:", others),
    ):
        if group:
            lines += [heading, *(f"{count:5}  {reason}" for reason, count in group.most_common())]
    return title, lines
