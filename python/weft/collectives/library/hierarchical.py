# SPDX-License-Identifier: Apache-2.0
"""Algorithms over groups of ranks: nodes, sockets, columns."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.contract import AllReduce, Buffer, Collective, Slots
from weft.collectives.language import Ref, chunk
from weft.collectives.library.registry import algorithm, even
from weft.collectives.values import Chunk, Value


def _to_output(ranks: Sequence[int], chunks: int) -> None:
    for rank in ranks:
        chunk(rank, Buffer.input, 0, chunks).copy(rank, Buffer.output, 0)


def _scatter_sum(group: Sequence[int], first: int, size: int) -> None:
    """Leave the group's sum of part i (``size`` chunks from first + i*size) on its member i, all-pairs."""
    for i, owner in enumerate(group):
        acc = chunk(owner, Buffer.output, first + i * size, size)
        for step in range(1, len(group)):
            other = group[(i + step) % len(group)]
            acc = acc.reduce(chunk(other, Buffer.output, first + i * size, size))


def _gather(group: Sequence[int], first: int, size: int) -> None:
    """Send part i of member i to the whole group."""
    for i, owner in enumerate(group):
        for step in range(1, len(group)):
            chunk(owner, Buffer.output, first + i * size, size).copy(group[(i + step) % len(group)])


def _exchange(a: int, b: int, first: int, size: int) -> None:
    """Leave the sum of two ranks' chunks on both."""
    there = chunk(a, Buffer.output, first, size).copy(b, "crossed", first)
    back = chunk(b, Buffer.output, first, size).copy(a, "crossed", first)
    chunk(b, Buffer.output, first, size).reduce(there)
    chunk(a, Buffer.output, first, size).reduce(back)


@algorithm(AllReduce, factor=lambda n: n // 2, applies=even)
def allreduce_a100_multinode_allpairs(n: int) -> None:
    """Two nodes: all-pairs sum in the node, exchange with the twin GPU, gather in the node. Ranks 2*g."""
    half = n // 2
    _to_output(range(n), half)
    for node in (range(half), range(half, n)):
        _scatter_sum(node, 0, 1)
    for local in range(half):
        _exchange(local, local + half, local, 1)
    for node in (range(half), range(half, n)):
        _gather(node, 0, 1)


@algorithm(AllReduce, factor=lambda n: n, applies=even)
def allreduce_a100_pcie_hierarchical(n: int) -> None:
    """Two columns: all-pairs in the columns, then in the rows, and back. Ranks even."""
    rows = n // 2
    _to_output(range(n), n)
    columns = [[2 * row + column for row in range(rows)] for column in (0, 1)]
    for column in columns:
        _scatter_sum(column, 0, 2)
    for row in range(rows):
        _scatter_sum([2 * row, 2 * row + 1], 2 * row, 1)
        _gather([2 * row, 2 * row + 1], 2 * row, 1)
    for column in columns:
        _gather(column, 0, 2)


@algorithm(AllReduce, factor=lambda n, nodes=2: n, applies=even)
def hierarchical_allreduce(n: int, nodes: int = 2) -> None:
    """Ring reduce-scatter in the node, ring across nodes, and back. Ranks m*g."""
    per_node = n // nodes
    _to_output(range(n), n)
    local = [[node * per_node + i for i in range(per_node)] for node in range(nodes)]
    across = [[node * per_node + i for node in range(nodes)] for i in range(per_node)]
    for group in local:
        _ring_sum(group, [i * nodes for i in range(per_node)], nodes)
    for i, group in enumerate(across):
        firsts = [i * nodes + node for node in range(nodes)]
        _ring_sum(group, firsts, 1)
        _ring_copy(group, firsts, 1)
    for group in local:
        _ring_copy(group, [i * nodes for i in range(per_node)], nodes)


def _ring_sum(group: Sequence[int], firsts: Sequence[int], size: int) -> None:
    """Send every part around the ring, summing, so that part i ends on member i."""
    for i, first in enumerate(firsts):
        acc = chunk(group[(i + 1) % len(group)], Buffer.output, first, size)
        for step in range(2, len(group) + 1):
            acc = chunk(group[(i + step) % len(group)], Buffer.output, first, size).reduce(acc)


def _ring_copy(group: Sequence[int], firsts: Sequence[int], size: int) -> None:
    """Send part i of member i around the ring."""
    for i, first in enumerate(firsts):
        for step in range(1, len(group)):
            chunk(group[(i + step - 1) % len(group)], Buffer.output, first, size).copy(
                group[(i + step) % len(group)]
            )


@algorithm(AllReduce, applies=lambda n: n == 16)
def allreduce_dgx1(n: int) -> None:
    """Two DGX-1: a chain in each node, an exchange between the nodes, the chain back. Ranks: 16."""
    _to_output(range(n), 1)
    chain = [0, 1, 2, 3, 7, 6, 5, 4]
    for node in (0, 8):
        acc = chunk(node + chain[0], Buffer.output, 0)
        for local in chain[1:]:
            acc = chunk(node + local, Buffer.output, 0).reduce(acc)
    _exchange(chain[-1], 8 + chain[-1], 0, 1)
    for node in (0, 8):
        total: Ref = chunk(node + chain[-1], Buffer.output, 0)
        for local in reversed(chain[:-1]):
            total = total.copy(node + local)


class PipelineReduce(Collective):
    """The second half of the ranks gets the sum over the first half."""

    name = "custom"

    def before(self, rank: int) -> Slots:
        return [Chunk(rank, c) for c in range(self.chunk_factor)]

    def after(self, rank: int) -> Slots:
        half = self.num_ranks // 2
        if rank < half:
            return [None] * self.chunk_factor
        return [Value(tuple((r, c) for r in range(half))) for c in range(self.chunk_factor)]


@algorithm(PipelineReduce, factor=lambda n: n // 2, applies=even, forms=(False,))
def pipeline_a100_allpairs(n: int) -> None:
    """All-pairs sum in the first group, each part to the twin in the second, all-pairs copy there. Ranks 2*g."""
    half = n // 2
    _to_output(range(half), half)
    _scatter_sum(range(half), 0, 1)
    for local in range(half):
        chunk(local, Buffer.output, local).copy(half + local)
    _gather(range(half, n), 0, 1)


@algorithm(PipelineReduce, factor=lambda n: n // 2, applies=even, forms=(False,))
def pipeline_a100_ring(n: int) -> None:
    """Ring sum in the first group, each part to the twin in the second, ring copy there. Ranks 2*g."""
    half = n // 2
    _to_output(range(half), half)
    _ring_sum(range(half), range(half), 1)
    for local in range(half):
        chunk(local, Buffer.output, local).copy(half + local)
    _ring_copy(range(half, n), range(half), 1)


class ReduceGather(Collective):
    """Every rank gets the sums over each of two groups of ranks, one after the other."""

    name = "custom"

    def before(self, rank: int) -> Slots:
        return [Chunk(rank, c) for c in range(self.chunk_factor)]

    def after(self, rank: int) -> Slots:
        half = self.num_ranks // 2
        groups = (range(half), range(half, self.num_ranks))
        return [Value(tuple((r, c) for r in group)) for group in groups for c in range(self.chunk_factor)]


@algorithm(ReduceGather, factor=lambda n: n // 2, applies=even, forms=(False,))
def reducegather(n: int) -> None:
    """Sum in groups, part by part, then everyone gathers all sums. Ranks 2*g."""
    half = n // 2
    for group, members in enumerate((range(half), range(half, n))):
        for i, owner in enumerate(members):
            at = group * half + i
            acc = chunk(owner, Buffer.input, i).copy(owner, Buffer.output, at)
            for step in range(1, half):
                acc = acc.reduce(chunk(members[(i + step) % half], Buffer.input, i))
            for step in range(1, n):
                acc.copy((owner + step) % n)
