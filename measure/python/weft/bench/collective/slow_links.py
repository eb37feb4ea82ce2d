# SPDX-License-Identifier: Apache-2.0
"""Measures algorithms on CPU ranks whose links are as slow as a topology says (weft.testing.links).

    weft synthesise --topology bench/topologies/hub.json --collective all_gather --bytes 256K --measure 5

The algorithms take turns, so that all meet the same machine; a result is compared with what the algorithm promises
before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.bench.report import Report, Row, slowest_rank
from weft.collectives.ir import Algorithm
from weft.collectives.values import Value
from weft.collectives.verifier import promised
from weft.errors import Error

if TYPE_CHECKING:
    from weft.testing.ranks import Rank

Links = dict[tuple[int, int], tuple[float, float]]  # (sender, receiver): us, us per byte
_DEADLINE_S = 600.0


def measure(
    algorithms: Sequence[Algorithm], links: Links, num_bytes: int, iterations: int
) -> list[list[float]]:
    """Return the slowest rank's microseconds of every iteration, for every algorithm. Raises: Error, RankError."""
    from weft.testing.ranks import run_ranks

    ranks = algorithms[0].num_ranks
    found = run_ranks(ranks, _measure, list(algorithms), links, num_bytes, iterations, deadline_s=_DEADLINE_S)
    return [slowest_rank(samples) for samples in zip(*found, strict=True)]


def report(
    name: str,
    collective: str,
    num_bytes: int,
    rows: Sequence[tuple[str, float, list[float]]],
    json_path: str | None,
    wide: bool = False,
) -> None:
    """Print and write (algorithm, predicted us, samples) rows, the first of which was synthesised."""
    made = Report(
        "weft synthesise --measure",
        extra_columns=("predicted_us", "algorithm", "topology"),
        wide=wide,
        names_rows=("algorithm",),
    )
    for algorithm, predicted_us, samples in rows:
        extra = {"topology": name, "algorithm": algorithm, "predicted_us": round(predicted_us, 1)}
        made.add(
            Row(collective, "float32", None, num_bytes, samples, checked=True, extra=extra, series=algorithm)
        )
    made.note(
        "links between CPU ranks are delayed as the topology says (weft.testing.links); predicted us: the time that "
        "the links alone take"
    )
    made.finish(json_path)


def _measure(
    me: Rank, algorithms: list[Algorithm], links: Links, num_bytes: int, iterations: int
) -> list[list[float]]:
    import torch.distributed as dist

    from weft.runtime.communicator import Communicator
    from weft.testing.links import delay_links

    collectives = Communicator(me.group, device="cpu").collectives
    calls = [_Case(me.rank, algorithm, num_bytes) for algorithm in algorithms]
    for case in calls:  # loads it, which may make connections anew
        case.run(collectives)
    delay_links(collectives, links)
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(iterations):
        for case, mine in zip(calls, samples, strict=True):
            dist.barrier(group=me.group)
            start = time.perf_counter()
            case.run(collectives)
            mine.append((time.perf_counter() - start) * 1e6)
            case.check()
    return samples


class _Case:
    """An algorithm's buffers on one rank, filled with the values of its symbols."""

    def __init__(self, rank: int, algorithm: Algorithm, num_bytes: int) -> None:
        import torch

        contract = algorithm.contract
        assert contract is not None
        self._algorithm, self._rank = algorithm, rank
        self._elems = max(4, num_bytes // 4 // algorithm.chunks // 4 * 4)
        self._wanted = promised(algorithm, contract)[rank]
        held = contract.in_form(False).before(rank)
        numbers = [_number(value) if value else 0.0 for value in held]
        self._start = torch.tensor(numbers).repeat_interleave(self._elems)
        self._input = self._start.clone()
        self._output: Any = None

    def run(self, collectives: Any) -> None:
        self._input.copy_(self._start)
        self._output = collectives.run(self._algorithm, self._input)

    def check(self) -> None:
        for at, value in enumerate(self._wanted):
            chunk = self._output[at * self._elems : (at + 1) * self._elems]
            if value is not None and not (chunk == _number(value)).all():
                raise Error(f"{self._algorithm.name}: rank {self._rank}, chunk {at}: got {chunk[0]}")


def _number(value: Value) -> float:
    return float(sum(1 + rank * 31 % 17 + index * 7 % 11 for rank, index in value.parts))
