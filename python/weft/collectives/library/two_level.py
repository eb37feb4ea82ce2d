# SPDX-License-Identifier: Apache-2.0
"""Algorithms for several nodes: a byte crosses the network once for every pair of nodes, and the node does the rest.

Ranks are numbered node by node, ``per_node`` to each. A rail is the ranks with the same place in their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.contract import AllGather, AllReduce, Buffer, ReduceScatter
from weft.collectives.language import Ref, chunk
from weft.collectives.library.registry import algorithm, even
from weft.errors import invalid


def _nodes(n: int, per_node: int) -> list[list[int]]:
    """Return the ranks of every node. Raises: Error."""
    if per_node < 1 or n % per_node or n == per_node:
        raise invalid("per_node", per_node, f"ranks per node that cut {n} ranks into two or more nodes")
    return [list(range(first, first + per_node)) for first in range(0, n, per_node)]


def _rails(nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(rail) for rail in zip(*nodes, strict=True)]


def _others(group: Sequence[int], rank: int) -> list[int]:
    """Return the group's other members, the next one first, so that not all send to the same."""
    at = group.index(rank)
    return [*group[at + 1 :], *group[:at]]


def _sum_in_nodes(nodes: Sequence[Sequence[int]], size: int) -> None:
    """Leave the node's sum of part i, ``size`` chunks, on its rank i."""
    for node in nodes:
        for i, owner in enumerate(node):
            acc = chunk(owner, Buffer.input, i * size, size).copy(owner, Buffer.output, i * size)
            for other in _others(node, owner):
                acc = acc.reduce(chunk(other, Buffer.input, i * size, size))


def _gather_in_nodes(nodes: Sequence[Sequence[int]], size: int) -> None:
    for node in nodes:
        for i, owner in enumerate(node):
            for other in _others(node, owner):
                chunk(owner, Buffer.output, i * size, size).copy(other)


@algorithm(AllReduce, factor=lambda n, per_node=2: n, applies=even)
def allreduce_two_level(n: int, per_node: int = 2) -> None:
    """Sum in the node, each part's sum across its rail by all-pairs, and back. Ranks m*per_node."""
    nodes = _nodes(n, per_node)
    size = len(nodes)  # chunks of a rank's part, one for each member of its rail
    _sum_in_nodes(nodes, size)
    for i, rail in enumerate(_rails(nodes)):
        sums = []
        for at, owner in enumerate(rail):
            acc = chunk(owner, Buffer.output, i * size + at)
            for other in _others(rail, owner):
                acc = acc.reduce(chunk(other, Buffer.output, i * size + at))
            sums.append(acc)
        for acc, owner in zip(sums, rail, strict=True):
            for other in _others(rail, owner):
                acc.copy(other)
    _gather_in_nodes(nodes, size)


@algorithm(AllReduce, factor=lambda n, per_node=0: per_node or n // 2, applies=even)
def allreduce_two_level_once(n: int, per_node: int = 0) -> None:
    """Two nodes: sum in the node, each part's sum to the twin, where it is added too, and back. Ranks 2*per_node."""
    nodes = _nodes(n, per_node or n // 2)
    if len(nodes) != 2:  # ranks of a longer rail would add in different orders, and round differently
        raise invalid("per_node", per_node, f"{n // 2}, for two nodes")
    _sum_in_nodes(nodes, 1)
    for i, (a, b) in enumerate(_rails(nodes)):
        there = chunk(a, Buffer.output, i).copy(b, "came", 0)
        back = chunk(b, Buffer.output, i).copy(a, "came", 0)
        chunk(b, Buffer.output, i).reduce(there)
        chunk(a, Buffer.output, i).reduce(back)
    _gather_in_nodes(nodes, 1)


@algorithm(AllGather, applies=even)
def allgather_two_level(n: int, per_node: int = 2) -> None:
    """Every part along its rail, then what came there in the node. Ranks m*per_node."""
    nodes = _nodes(n, per_node)
    rails = _rails(nodes)
    for rail in rails:
        for rank in rail:
            part = chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank)
            for other in _others(rail, rank):
                part.copy(other)
    for node in nodes:
        for i, rank in enumerate(node):
            for other in _others(node, rank):
                for part_of in [rank, *_others(rails[i], rank)]:
                    chunk(rank, Buffer.output, part_of).copy(other)


@algorithm(ReduceScatter, applies=even)
def reducescatter_two_level(n: int, per_node: int = 2) -> None:
    """The node's sum for every rank of a rail, then along the rail. Ranks m*per_node."""
    nodes = _nodes(n, per_node)
    for i, rail in enumerate(_rails(nodes)):
        sums: dict[tuple[int, int], Ref] = {}
        for node, rank in zip(nodes, rail, strict=True):
            for target in [*_others(rail, rank), rank]:
                acc = chunk(rank, Buffer.input, target).copy(rank, f"sums{i}", target // per_node)
                for other in _others(node, rank):
                    acc = acc.reduce(chunk(other, Buffer.input, target))
                sums[rank, target] = acc
        for target in rail:
            acc = sums[target, target].copy(target, Buffer.output, 0)
            for other in _others(rail, target):
                acc = acc.reduce(sums[other, target])
