# SPDX-License-Identifier: Apache-2.0
"""AllToAll, AllToAllV, and passing buffers to a neighbour."""

from __future__ import annotations

from weft.collectives.contract import AllToAll, AllToAllV, AllToNext, Buffer, SendRecv
from weft.collectives.language import chunk
from weft.collectives.library.registry import algorithm, any_ranks, even


@algorithm(AllToAll, forms=(False,))
def alltoall_allpairs(n: int) -> None:
    """Every part goes straight to its rank: one step."""
    for rank in range(n):
        chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, rank)
        for step in range(1, n):
            peer = (rank + step) % n
            chunk(rank, Buffer.input, peer).copy(peer, Buffer.output, rank)


@algorithm(AllToAllV, forms=(False,))
def alltoallv_allpairs(n: int) -> None:
    """Every part goes straight to its rank; the parts have sizes of their own.

    Blocks send or receive, so that both go on at once.
    """
    for rank in range(n):
        chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, rank, sendtb=0)
        for step in range(1, n):
            peer = (rank + step) % n
            part = chunk(rank, Buffer.input, peer)
            part.copy(peer, Buffer.output, rank, sendtb=2 * step - 1, recvtb=2 * step, ch=0)


@algorithm(AllToAll, applies=even, forms=(False,))
def alltoall_a100_two_step(n: int, nodes: int = 2) -> None:
    """Regroup in the node by the target's local index, then one message per GPU and remote node. Ranks m*g."""
    per_node = n // nodes
    for rank in range(n):
        node, local = divmod(rank, per_node)
        for target in range(n):
            far, far_local = divmod(target, per_node)
            part = chunk(rank, Buffer.input, target)
            if far == node:
                part.copy(target, Buffer.output, rank)
            else:
                part.copy(node * per_node + far_local, f"to{far}", local)
    for rank in range(n):
        node, local = divmod(rank, per_node)
        for far in range(nodes):
            if far != node:
                whole = chunk(rank, f"to{far}", 0, per_node)
                whole.copy(far * per_node + local, Buffer.output, node * per_node)


@algorithm(AllToAll, applies=even, forms=(False,))
def alltoall_a100_three_step(n: int, nodes: int = 2) -> None:
    """Gather on one GPU for every pair of nodes, send one message, scatter. Ranks m*g."""
    per_node = n // nodes
    for rank in range(n):
        node, local = divmod(rank, per_node)
        for target in range(n):
            far, far_local = divmod(target, per_node)
            part = chunk(rank, Buffer.input, target)
            if far == node:
                part.copy(target, Buffer.output, rank)
            else:
                part.copy(node * per_node + far % per_node, f"to{far}", far_local * per_node + local)
    for node in range(nodes):
        for far in range(nodes):
            if far == node:
                continue
            sender, receiver = node * per_node + far % per_node, far * per_node + node % per_node
            whole = chunk(sender, f"to{far}", 0, per_node * per_node)
            whole.copy(receiver, f"from{node}", 0)
    for far in range(nodes):
        for node in range(nodes):
            if far == node:
                continue
            receiver = far * per_node + node % per_node
            for far_local in range(per_node):
                group = chunk(receiver, f"from{node}", far_local * per_node, per_node)
                group.copy(far * per_node + far_local, Buffer.output, node * per_node)


@algorithm(SendRecv)
def sendrecv(n: int) -> None:
    """Every rank's buffer goes to the next rank; two ranks swap."""
    for rank in range(n):
        chunk(rank, Buffer.input, 0).copy(rank, "outgoing", 0)
    for rank in range(n):
        chunk(rank, "outgoing", 0).copy((rank + 1) % n, Buffer.output, 0)


def _next(ranks: int, chunks: int, inplace: bool) -> AllToNext:
    return AllToNext(ranks, chunks, inplace, 1)


def _previous(ranks: int, chunks: int, inplace: bool) -> AllToNext:
    return AllToNext(ranks, chunks, inplace, -1)


@algorithm(_next, factor=lambda n, per_node=8: min(per_node, n), applies=any_ranks, forms=(False,))
def alltonext_forward(n: int, per_node: int = 8) -> None:
    """Every rank's buffer goes to the next one; between nodes it is spread over all GPUs, so all NICs work."""
    _pass_on(n, min(per_node, n), 1)


@algorithm(_previous, factor=lambda n, per_node=8: min(per_node, n), applies=any_ranks, forms=(False,))
def alltonext_backward(n: int, per_node: int = 8) -> None:
    """Every rank's buffer goes to the previous one; between nodes it is spread over all GPUs, so all NICs work."""
    _pass_on(n, min(per_node, n), -1)


def _pass_on(n: int, per_node: int, step: int) -> None:
    for rank in range(n):
        target = rank + step
        if not 0 <= target < n:
            continue
        if rank // per_node == target // per_node:
            chunk(rank, Buffer.input, 0, per_node).copy(target, Buffer.output, 0)
            continue
        node, far = rank // per_node, target // per_node
        for local in range(per_node):
            near, receiver = (min(own * per_node + local, n - 1) for own in (node, far))
            part = chunk(rank, Buffer.input, local)
            if near != rank:
                part = part.copy(near, "forwarded", local)
            if receiver != target:
                part = part.copy(receiver, "forwarded far", local)
            part.copy(target, Buffer.output, local)
