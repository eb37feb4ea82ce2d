# SPDX-License-Identifier: Apache-2.0
"""Which chunks a step moves: what drawings name and follow.

names = chunk_names(algorithm)
names[rank, block, step]            # ("0.2", "1.2"): the originals, RANK.CHUNK, that are in what it moves
"""

from __future__ import annotations

import contextlib

from weft.collectives.interpreter import Interpreter, Running
from weft.collectives.ir import Algorithm, Step
from weft.collectives.structure import VerificationError, check_structure

_MOST = 64  # originals of one step; what more it moves is not named


def chunk_names(algorithm: Algorithm) -> dict[tuple[int, int, int], tuple[str, ...]]:
    """Return the names by (rank, block, step); of a wrong algorithm those of the steps before it goes wrong."""
    found: dict[tuple[int, int, int], dict[str, None]] = {}
    with contextlib.suppress(VerificationError):
        _Namer(algorithm.unrotated(), found).hang()
    return {place: tuple(names) for place, names in found.items()}


class _Namer(Interpreter):
    def __init__(self, algorithm: Algorithm, found: dict[tuple[int, int, int], dict[str, None]]) -> None:
        super().__init__(algorithm, algorithm.forms()[0], check_structure(algorithm))
        self.found = found

    def _execute(self, running: Running, step: Step) -> None:
        super()._execute(running, step)
        rank, block = running.identity[0], running.block
        if step.op.writes_dst:
            value = self._values[self._slot(rank, step.dst.buffer, step.dst.index + running.chunk)]
        else:
            value = self._fifo[rank, block.send, block.channel][-1].value
        names = self.found.setdefault((*running.identity, running.step), {})
        for origin, index in value.parts:
            if len(names) < _MOST:
                names[f"{origin}.{index}"] = None
