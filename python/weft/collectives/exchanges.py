# SPDX-License-Identifier: Apache-2.0
"""The collectives that a single kernel does (kernels/collective/exchange.cuh), by their programs' names.

Numbers as in kernels/collective/exchange_args.h. Needs no core, so that books can be written where none is built yet.
"""

from __future__ import annotations

import dataclasses

LINES, PLACES, STAGES = range(3)  # the ways of an exchange, as Executor.plan_exchange() says


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The request to a program's own exchange kernel."""

    number: int
    is_one_shot: bool = False


EXCHANGES = {
    "allreduce_1step": Exchange(0, is_one_shot=True),
    "allreduce_allpairs": Exchange(0),
    "allgather_allpairs": Exchange(1),
    "reducescatter_allpairs": Exchange(2),
    "alltoall_allpairs": Exchange(3),
    "broadcast_flat": Exchange(4),
    "reduce_flat": Exchange(5),
    "gather_flat": Exchange(6),
    "scatter_flat": Exchange(7),
}
