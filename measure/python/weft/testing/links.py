# SPDX-License-Identifier: Apache-2.0
"""Slow links between ranks on the CPU, to measure schedules for machines whose links are unequal.

    delay_links(comm.collectives, {(0, 1): (500.0, 0.01), (1, 0): (500.0, 0.01)})    # us, us per byte
    comm.collectives.run(algorithm, tensor)
    delay_links(comm.collectives, {})                                                # as fast as they are

The ranks, their memory and their messages are the real ones; the signal that tells a receiver of a message is held
until the link has carried the bytes of all messages before it and its own, plus the latency. Links that are not named
are not delayed. Programs of protocol Simple only; other calls are refused meanwhile. Delays should be large against the
machine's own noise: milliseconds where ranks share cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.errors import invalid

if TYPE_CHECKING:
    from weft.collectives.calls import Collectives


def delay_links(collectives: Collectives, links: Mapping[tuple[int, int], tuple[float, float]]) -> None:
    """Make links slow in later runs; every rank calls it with all links.

    Args:
        links: (sender, receiver) -> (microseconds of latency, microseconds per byte); none: as fast as they are.
    Raises: Error on GPUs, and for a link between other ranks.
    """
    ranks, rank = collectives.size, collectives.rank
    for (src, dst), delay in links.items():
        if not (0 <= src < ranks and 0 <= dst < ranks) or min(delay) < 0:
            raise invalid("links", {(src, dst): delay}, f"ranks below {ranks}, and times of 0 or more")
    mine = [links.get((rank, peer), (0.0, 0.0)) for peer in range(ranks)]
    collectives.delay_links([(us * 1e3, us_per_byte * 1e3) for us, us_per_byte in mine] if links else [])
