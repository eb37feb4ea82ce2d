# SPDX-License-Identifier: Apache-2.0
"""Which steps of a program end a sum over all ranks: there an average divides.

    sums = ended_sums(algorithm)
    sums.ends                             # (rank, block, step)

A sum of all ranks is made by one step, the one that adds what was missing, and is only copied after that; so every
value of the result is divided once. The interpreter of the verifier tells the steps.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.cached import cached
from weft.collectives.flow import size_limit
from weft.collectives.interpreter import Interpreter, Running
from weft.collectives.ir import Algorithm, Block, Connection, Step
from weft.collectives.structure import BlockId, check_structure
from weft.collectives.values import total

StepId = tuple[int, int, int]  # rank, block, step
_REDUCING = ("allreduce", "reduce", "reducescatter", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class EndedSums:
    """The steps of ``algorithm`` whose chunks, all of them, are sums of all ranks from then on.

    ``algorithm`` is the one that was asked for, unless some step ended the sums of a part of its chunks; then it is
    the same with a step for every chunk. ``has_average`` is False, and ``ends`` empty, where a program promises no sum
    of all ranks, or ends them at other steps in place than out of place.
    """

    algorithm: Algorithm
    ends: frozenset[StepId]
    has_average: bool


@cached
def ended_sums(algorithm: Algorithm) -> EndedSums:
    """Analyse a verified algorithm. The answer is cached: every rank of a book asks for it. Threads: any."""
    algorithm = algorithm.unrotated()
    nothing = EndedSums(algorithm, frozenset(), False)
    if algorithm.contract is None or algorithm.collective not in _REDUCING:
        return nothing
    found = [_Adder(algorithm, form) for form in algorithm.forms()]
    if any(adder.mixed for adder in found):
        algorithm = _one_chunk_a_step(algorithm)
        if size_limit(algorithm) is not None:  # its chunks must travel together
            return nothing
        found = [_Adder(algorithm, form) for form in algorithm.forms()]
    ends = {frozenset(adder.ends) for adder in found}
    return EndedSums(algorithm, ends.pop(), True) if len(ends) == 1 else nothing


class _Adder(Interpreter):
    """Runs the steps; ``ends`` are those that end sums, ``mixed`` those that do so for some of their chunks only."""

    def __init__(self, algorithm: Algorithm, inplace: bool) -> None:
        connections: dict[Connection, tuple[BlockId, BlockId]] = check_structure(algorithm)
        super().__init__(algorithm, inplace, connections)
        self._ended: dict[StepId, list[bool]] = {}
        self.run()
        self.ends = {place for place, ended in self._ended.items() if all(ended)}
        self.mixed = {place for place, ended in self._ended.items() if any(ended)} - self.ends

    def _execute(self, running: Running, step: Step) -> None:
        super()._execute(running, step)
        if not step.op.reduces:
            return
        (rank, number), block = running.identity, running.block
        if step.op.writes_dst:
            value = self._values[self._slot(rank, step.dst.buffer, step.dst.index + running.chunk)]
        else:
            value = self._fifo[rank, block.send, block.channel][-1].value
        never_folds = value == total(self._algorithm.num_ranks, value.parts[0][1])
        self._ended.setdefault((rank, number, running.step), []).append(never_folds)


def _one_chunk_a_step(algorithm: Algorithm) -> Algorithm:
    """Return what the verifier proves anyway: every step of many chunks as many steps."""
    ranks = []
    for program in algorithm.ranks:
        last = [_last_parts(block) for block in program.blocks]
        blocks = []
        for block in program.blocks:
            steps = [
                dataclasses.replace(
                    step,
                    src=dataclasses.replace(step.src, index=step.src.index + chunk),
                    dst=dataclasses.replace(step.dst, index=step.dst.index + chunk),
                    count=1,
                    depends=() if chunk else tuple((b, last[b][s]) for b, s in step.depends),
                )
                for step in block.steps
                for chunk in range(step.count)
            ]
            blocks.append(dataclasses.replace(block, steps=steps))
        ranks.append(dataclasses.replace(program, blocks=blocks))
    return dataclasses.replace(algorithm, ranks=ranks)


def _last_parts(block: Block) -> list[int]:
    """Return the number of the last part of every step."""
    ends, at = [], -1
    for step in block.steps:
        at += step.count
        ends.append(at)
    return ends
