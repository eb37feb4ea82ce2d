# SPDX-License-Identifier: Apache-2.0
"""Which of several holders gives how many bytes, and what no choice can beat.

Demands with the same set of holders are one group, as their bytes are exchangeable. The least maximum of the sources'
times is then a flow problem over groups. Filling each group anew, level over its holders, until nothing moves,
minimises the sum of load²/rate; over such sets that minimum has the least maximum, too (a base of a polymatroid).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.transfer.reshard.layout import Ints

Floats = npt.NDArray[np.float64]
_SWEEPS = 64
_STILL = 1e-4  # of the largest time: less movement ends the filling


@dataclass(frozen=True)
class Groups:
    """Sets of holders: of group g, ``holders[first[g] : first[g + 1]]``, and the bytes that one of them must give."""

    first: Ints
    holders: Ints
    nbytes: Ints

    def of(self, group: int) -> slice:
        return slice(int(self.first[group]), int(self.first[group + 1]))


def shares(groups: Groups, rates: Floats) -> tuple[Floats, Floats]:
    """Return the bytes of each holder of each group, as ``holders``, and of each source."""
    counts = np.diff(groups.first)
    given = np.repeat(groups.nbytes / np.maximum(counts, 1), counts)
    loads = np.bincount(groups.holders, given, len(rates)).astype(np.float64)
    choices = np.flatnonzero(counts > 1)
    for _ in range(_SWEEPS):
        moved = 0.0
        for group in choices:
            part = groups.of(int(group))
            ranks = groups.holders[part]
            others = loads[ranks] - given[part]
            filled = _filled(others, rates[ranks], float(groups.nbytes[group]))
            moved = max(moved, float(np.abs((filled - given[part]) / rates[ranks]).max()))
            given[part] = filled
            loads[ranks] = others + filled
        if moved <= _STILL * float((loads / rates).max(initial=0.0)):
            break
    return given, loads


def _filled(loads: Floats, rates: Floats, nbytes: float) -> Floats:
    """Return how bytes are poured over loads so that the times of all that get some are equal, and least."""
    order = np.argsort(loads / rates, kind="stable")
    levels = (loads / rates)[order]
    rate, load = np.cumsum(rates[order]), np.cumsum(loads[order])
    level = (nbytes + load) / rate  # if the first 1, 2, ... were filled
    last = int(np.flatnonzero(level > levels).max(initial=0))
    return np.asarray(np.maximum(level[last] * rates - loads, 0.0), np.float64)


def bound_s(groups: Groups, loads: Floats, rates: Floats) -> float:
    """Return seconds that the sources need at least: what only a set of them holds, over their rates.

    True of every set; those that are tried are the busiest 1, 2, 3, ... of ``loads``, among which is the tightest when
    loads are balanced.
    """
    if not len(groups.nbytes):
        return 0.0
    times = loads / rates
    times = np.round(times / max(float(times.max()), 1e-300), 3)  # equal ones belong to one set
    least = np.minimum.reduceat(times[groups.holders], groups.first[:-1])
    best = 0.0
    for time in np.unique(times):
        held = float(groups.nbytes[least >= time].sum())
        best = max(best, held / float(rates[times >= time].sum()))
    return best
