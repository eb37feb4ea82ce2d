# SPDX-License-Identifier: Apache-2.0
"""Where programs end their sums, which is where an average divides."""

from __future__ import annotations

import pytest
from random_programs import uneven_sums

from weft.collectives import verify
from weft.collectives.average import ended_sums
from weft.collectives.library import build, entries
from weft.errors import Error

REDUCING = [
    name for name, entry in entries().items() if entry.collective in ("allreduce", "reducescatter", "reduce")
]


@pytest.mark.parametrize("name", REDUCING)
def test_every_sum_of_the_library_ends_somewhere(name: str) -> None:
    for ranks in (2, 3, 4, 8):
        if not entries()[name].applies(ranks):
            continue
        for inplace in (True, False):
            try:
                algorithm = build(name, ranks, inplace=inplace).compile()
            except Error:
                continue
            sums = ended_sums(algorithm)
            assert sums.has_average and sums.ends and sums.algorithm is algorithm
            assert all(algorithm.ranks[r].blocks[b].steps[s].op.reduces for r, b, s in sums.ends)


def test_a_ring_ends_its_sums_in_its_last_reducing_step() -> None:
    algorithm = build("allreduce_a100_ring", 4, inplace=True).compile()
    adding = [(r, b, s) for r, b, s, step in algorithm.steps() if step.op.reduces]
    ends = ended_sums(algorithm).ends
    assert 0 < len(ends) < len(adding) and ends < set(adding)


def test_a_step_that_ends_some_of_its_sums_is_taken_apart() -> None:
    algorithm = uneven_sums()
    sums = ended_sums(algorithm)
    assert sums.has_average and sums.algorithm is not algorithm
    assert all(step.count == 1 for *_, step in sums.algorithm.steps())
    assert verify(sums.algorithm).messages == verify(algorithm).messages
    assert len(sums.ends) == 2  # of one chunk each
    assert ended_sums(algorithm) is sums


def test_only_sums_of_all_ranks_can_be_averaged() -> None:
    assert not ended_sums(build("allgather_ring", 4).compile()).has_average
