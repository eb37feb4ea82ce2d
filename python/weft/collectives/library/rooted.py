# SPDX-License-Identifier: Apache-2.0
"""Collectives with a root: Broadcast, Reduce, Gather, Scatter."""

from __future__ import annotations

from weft.collectives.contract import Broadcast, Buffer, Gather, Reduce, Scatter
from weft.collectives.language import chunk
from weft.collectives.library.registry import algorithm


def _others(n: int, root: int) -> list[int]:
    return [(root + step) % n for step in range(1, n)]


@algorithm(Broadcast)
def broadcast_flat(n: int, root: int = 0) -> None:
    """The root sends to everyone: one step, n-1 times the bytes out of the root."""
    own = chunk(root, Buffer.input, 0).copy(root, Buffer.output, 0)
    for rank in _others(n, root):
        own.copy(rank)


@algorithm(Broadcast, factor=lambda n, root=0: n)
def broadcast_scatter_allgather(n: int, root: int = 0) -> None:
    """The root scatters parts, then everyone sends its part to everyone: two steps, twice the bytes."""
    chunk(root, Buffer.input, 0, n).copy(root, Buffer.output, 0)
    for rank in _others(n, root):
        chunk(root, Buffer.output, rank).copy(rank)
    for rank in range(n):
        for peer in _others(n, rank):
            if peer != root:
                chunk(rank, Buffer.output, rank).copy(peer)


@algorithm(Broadcast)
def broadcast_chain(n: int, root: int = 0) -> None:
    """Along a chain from the root; slices pipeline it, so large buffers move at one link's speed."""
    ref = chunk(root, Buffer.input, 0).copy(root, Buffer.output, 0)
    for rank in _others(n, root):
        ref = ref.copy(rank)


@algorithm(Reduce)
def reduce_flat(n: int, root: int = 0) -> None:
    """Everyone sends to the root, who adds: one step."""
    acc = chunk(root, Buffer.input, 0).copy(root, Buffer.output, 0)
    for rank in _others(n, root):
        acc = acc.reduce(chunk(rank, Buffer.input, 0))


@algorithm(Reduce)
def reduce_chain(n: int, root: int = 0) -> None:
    """Along a chain that ends at the root; slices pipeline it."""
    chain = [*_others(n, root), root]
    acc = chunk(chain[0], Buffer.input, 0)
    for rank in chain[1:]:
        where = (Buffer.output, 0) if rank == root else ("travelling", 0)
        acc = chunk(rank, Buffer.input, 0).copy(rank, *where).reduce(acc)


@algorithm(Gather)
def gather_flat(n: int, root: int = 0) -> None:
    """Everyone sends to the root."""
    for rank in range(n):
        chunk(rank, Buffer.input, 0).copy(root, Buffer.output, rank)


@algorithm(Scatter)
def scatter_flat(n: int, root: int = 0) -> None:
    """The root sends every part to its rank."""
    for rank in range(n):
        chunk(root, Buffer.input, rank).copy(rank, Buffer.output, 0)
