# SPDX-License-Identifier: Apache-2.0
"""AllGather and its mirror image, ReduceScatter."""

from __future__ import annotations

from collections.abc import Iterable

from weft.collectives.contract import AllGather, Buffer, ReduceScatter
from weft.collectives.language import chunk, create_scratch, rotations
from weft.collectives.library.registry import algorithm, power_of_two


def _publish_own(ranks: Iterable[int], per_rank: int = 1) -> None:
    """Copy every rank's input to its place in its own output; nothing to do in place."""
    for rank in ranks:
        own = chunk(rank, Buffer.input, 0, per_rank)
        own.copy(rank, Buffer.output, rank * per_rank)


@algorithm(AllGather)
def allgather_allpairs(n: int) -> None:
    """Everyone sends to everyone: one step, n-1 messages per rank."""
    _publish_own(range(n))
    for rank in range(n):
        for step in range(1, n):
            chunk(rank, Buffer.output, rank).copy((rank + step) % n)


@algorithm(AllGather, factor=lambda n, rings=1: rings)
def allgather_ring(n: int, rings: int = 1) -> None:
    """The classic ring: n-1 steps, every chunk travels once around; ``rings`` channels share a part."""
    _publish_own(rotations(), rings)
    for ring in range(rings):
        for rank in rotations():
            at = rank * rings + ring
            for step in range(1, n):
                chunk((rank + step - 1) % n, Buffer.output, at).copy((rank + step) % n, ch=ring)


@algorithm(AllGather, applies=power_of_two)
def allgather_recursive_doubling(n: int) -> None:
    """Pairs exchange blocks that double: log2(n) steps, ranks a power of two."""
    _publish_own(range(n))
    width = 1
    while width < n:
        for rank in range(n):
            start = rank // width * width
            chunk(rank, Buffer.output, start, width).copy(rank ^ width)
        width *= 2


@algorithm(AllGather, applies=lambda n: n == 4)
def allgather_a100_pcie(n: int) -> None:
    """Four ranks as two NVLink pairs on PCIe: swap in the pair, cross once, swap what came. Ranks: 4."""
    _publish_own(range(n))
    for rank in range(n):
        chunk(rank, Buffer.output, rank).copy(rank ^ 1)
    for rank in range(n):
        chunk(rank, Buffer.output, rank).copy(rank ^ 2)
    for rank in range(n):
        chunk(rank, Buffer.output, rank ^ 2).copy(rank ^ 1)


@algorithm(ReduceScatter)
def reducescatter_allpairs(n: int) -> None:
    """Everyone sends every part to its owner, who adds what comes: one step."""
    for rank in range(n):
        own = chunk(rank, Buffer.input, rank)
        acc = own.copy(rank, Buffer.output, 0)
        for step in range(1, n):
            acc = acc.reduce(chunk((rank + step) % n, Buffer.input, rank))


@algorithm(ReduceScatter)
def reducescatter_allpairs_fused(n: int) -> None:
    """Everyone sends every part to its owner's scratch, who adds all of them in one pass."""
    parts = {}
    for rank in range(n):
        for step in range(1, n):
            source = (rank + step) % n
            parts[rank, step] = chunk(source, Buffer.input, rank).copy(rank, "incoming", step - 1)
    for rank in range(n):
        acc = chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, 0)
        for step in range(1, n):
            acc = acc.reduce(parts[rank, step])


@algorithm(ReduceScatter, factor=lambda n, rings=1: rings)
def reducescatter_ring(n: int, rings: int = 1) -> None:
    """The classic ring: every part travels once around and is added to on the way."""
    for ring in range(rings):
        for owner in rotations():
            create_scratch(owner, "travelling", per_rank=0 if ring else rings)
            at = owner * rings + ring
            acc = chunk((owner + 1) % n, Buffer.input, at)
            for step in range(2, n + 1):
                rank = (owner + step) % n
                mine = chunk(rank, Buffer.input, at)
                where = (Buffer.output, ring) if rank == owner else ("travelling", at)
                acc = mine.copy(rank, *where).reduce(acc, ch=ring)


@algorithm(ReduceScatter, applies=power_of_two)
def reducescatter_recursive_halving(n: int) -> None:
    """Pairs exchange blocks that halve and add them: log2(n) steps, ranks a power of two."""
    work = {rank: chunk(rank, Buffer.input, 0, n).copy(rank, "work", 0) for rank in range(n)}
    halve(n, "work")
    for rank in work:
        chunk(rank, "work", rank).copy(rank, Buffer.output, 0)


def halve(n: int, buffer: str) -> None:
    """Vector halving: afterwards chunk r of ``buffer`` on rank r holds the sum over all ranks."""
    width = n // 2
    while width:
        for rank in range(n):
            partner = rank ^ width
            start = partner // width * width
            chunk(rank, buffer, start, width).copy(partner, f"half{width}", 0)
        for rank in range(n):
            start = rank // width * width
            chunk(rank, buffer, start, width).reduce(chunk(rank, f"half{width}", 0, width))
        width //= 2


def double(n: int, buffer: str) -> None:
    """Vector doubling: chunk r of rank r reaches every rank's ``buffer``."""
    width = 1
    while width < n:
        for rank in range(n):
            start = rank // width * width
            chunk(rank, buffer, start, width).copy(rank ^ width)
        width *= 2
