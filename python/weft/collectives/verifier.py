# SPDX-License-Identifier: Apache-2.0
"""The verifier: proves an Algorithm, or says in words how it goes wrong.

    verify(algorithm)                 # a Report; VerificationError with .kind and a counterexample otherwise

It checks the structure, then interprets the lowered steps with finite connections and follows, for every slot, its
symbolic contents and who accessed it. Kinds: "structure" (peers, bounds, dependencies, sends without receives), "race"
(two accesses to a slot, one a write, that nothing orders), "deadlock", "result" (an empty slot is read, or the contract
is broken).

One pass over the steps stands for all slices: slices touch disjoint parts of every chunk, connections are empty after
each, and a blocking execution that can finish finishes under every timing. Groups of one chunk are the worst case: any
larger group sends fewer messages through the same connections and orders more. A program that only hangs with groups
of few chunks passes, and ``Report.limit`` says up to which size it runs (weft.collectives.flow).

In place, input and output are one memory everywhere: as the contract's alias() says, chunk by chunk without one.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.cached import cached
from weft.collectives.contract import Collective, Slots
from weft.collectives.flow import SizeLimit, size_limit
from weft.collectives.interpreter import Interpreter
from weft.collectives.ir import RING_SLOTS, Algorithm, Connection
from weft.collectives.structure import BlockId, VerificationError, check_structure, size_warnings


@dataclasses.dataclass(frozen=True)
class Report:
    """What was proven. ``result_checked`` is False when the collective is unknown (coll="custom" of a file).

    ``limit``: up to which size it was proven not to hang; None for every size.
    """

    steps: int
    messages: int
    forms: tuple[str, ...]
    result_checked: bool
    warnings: tuple[str, ...]
    limit: SizeLimit | None = None

    @property
    def proven(self) -> str:
        """Say what was proven, and what was not."""
        if self.result_checked:
            return "result, races and deadlock"
        alike = "; both forms give the same" if len(self.forms) > 1 else ""
        return f"races and deadlock{alike}; not proven: what it computes, as it has no contract"


def verify(algorithm: Algorithm, slots: int = RING_SLOTS) -> Report:
    """Check structure, races, deadlock and results, in every form that it claims. Raises: VerificationError.

    ``slots``: messages that a connection holds before the receiver takes one; the executor's rings hold RING_SLOTS.
    """
    connections = check_structure(algorithm)
    warnings = size_warnings(algorithm)
    forms = [
        name
        for name, claimed in (("in place", algorithm.inplace), ("out of place", algorithm.outofplace))
        if claimed
    ]
    if not forms:
        raise VerificationError(
            "structure", f"{algorithm.name} serves neither in-place nor out-of-place calls"
        )
    limit = _limit(algorithm, connections, slots)
    found = [Interpreter(algorithm, form, connections) for form in algorithm.forms()]
    messages = [interpreter.run() for interpreter in found]
    if algorithm.contract is None and len(found) == 2:
        _check_forms_agree(algorithm, *found)
    alike = algorithm.num_ranks // len(algorithm.distinct)
    steps = sum(len(block.steps) for *_, block in algorithm.distinct_blocks()) * alike
    if limit is not None:
        warnings.append(limit.says)
    return Report(
        *(steps, messages[-1] * alike, tuple(forms), algorithm.contract is not None, tuple(warnings)),
        limit=limit,
    )


@cached
def proven(algorithm: Algorithm) -> Report:
    """Return verify()'s report of an algorithm, which is made once."""
    return verify(algorithm)


def _limit(
    algorithm: Algorithm, connections: dict[Connection, tuple[BlockId, BlockId]], slots: int
) -> SizeLimit | None:
    """Return up to which size connections of ``slots`` messages suffice. Raises: VerificationError where for none."""
    limit = size_limit(algorithm, slots)
    is_any_left = limit is None or algorithm.min_bytes <= limit.most_bytes
    if is_any_left:
        return limit
    story = Interpreter(algorithm, algorithm.forms()[0], connections, slots).hang()
    assert limit is not None
    raise VerificationError("deadlock", story if limit.group == 0 else f"{story}; {limit.says}")


def _check_forms_agree(algorithm: Algorithm, inplace: Interpreter, apart: Interpreter) -> None:
    """Check that a program without a contract computes in place what it computes out of place."""
    for program in algorithm.ranks:
        for index in range(program.output_chunks):
            together, alone = (each.output(program.rank, index) for each in (inplace, apart))
            if alone is not None and together != alone:
                raise VerificationError(
                    "result",
                    f"rank {program.rank}: o[{index}] gets {together!r} in place and {alone!r} out of place, "
                    "and the program claims both forms",
                )


def promised(algorithm: Algorithm, contract: Collective) -> list[Slots]:
    """Return what every output must hold: what after() says or, where there is check() alone, what is computed."""
    ranks = range(algorithm.num_ranks)
    if type(contract).after is not Collective.after:
        return [contract.after(rank) for rank in ranks]
    algorithm = algorithm.unrotated()
    interpreter = Interpreter(algorithm, algorithm.forms()[0], check_structure(algorithm))
    interpreter.run()
    return [[interpreter.output(r, c) for c in range(contract.output_chunks(r))] for r in ranks]
