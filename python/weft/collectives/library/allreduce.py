# SPDX-License-Identifier: Apache-2.0
"""AllReduce on one node."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.contract import AllReduce, Buffer
from weft.collectives.language import chunk, rotations
from weft.collectives.library.allgather import double, halve
from weft.collectives.library.registry import algorithm, power_of_two


def _to_output(n: int, chunks: int) -> None:
    """Copy every rank's input to its output; nothing to do in place."""
    for rank in range(n):
        chunk(rank, Buffer.input, 0, chunks).copy(rank, Buffer.output, 0)


@algorithm(AllReduce)
def allreduce_1step(n: int) -> None:
    """The whole buffer goes to everyone, who adds all in the order of ranks: one exchange, n-1 times the bytes."""
    came = {}
    for rank in range(n):
        for step in range(1, n):
            source = (rank + step) % n
            came[rank, source] = chunk(source, Buffer.input, 0).copy(rank, "incoming", step - 1)
    for rank in range(n):
        own = chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, 0)
        # Everyone adds for itself. In another order the sums would round to other bits than those of the other ranks.
        for source in range(1, rank):
            came[rank, 0] = came[rank, 0].reduce(came[rank, source])
        for source in [0] * (rank > 0) + list(range(rank + 1, n)):
            own = own.reduce(came[rank, source])


@algorithm(AllReduce, factor=lambda n: n)
def allreduce_allpairs(n: int) -> None:
    """Every part goes to its owner, who adds what comes; then every owner sends the sum to all: two exchanges."""
    sums = []
    for owner in range(n):
        acc = chunk(owner, Buffer.input, owner).copy(owner, Buffer.output, owner)
        for step in range(1, n):
            acc = acc.reduce(chunk((owner + step) % n, Buffer.input, owner))
        sums.append(acc)
    for owner in range(n):
        for step in range(1, n):
            sums[owner].copy((owner + step) % n)


@algorithm(AllReduce, factor=lambda n: n * n)
def allreduce_a100_allpairs(n: int) -> None:
    """All-pairs with n*n chunks: scatter to scratch, n blocks each add n sources in one pass, gather."""
    for rank in range(n):
        for step in range(1, n):
            owner = (rank + step) % n
            chunk(rank, Buffer.input, owner * n, n).copy(
                owner, "incoming", (n - 1 - step) * n, sendtb=owner, recvtb=rank, ch=0
            )
    for owner in range(n):
        for part in range(n):
            at = owner * n + part
            acc = chunk(owner, Buffer.input, at).copy(owner, Buffer.output, at, sendtb=n + part)
            for source in range(n - 1):
                acc = acc.reduce(chunk(owner, "incoming", source * n + part), sendtb=n + part)
    for owner in range(n):
        for step in range(1, n):
            peer = (owner + step) % n
            chunk(owner, Buffer.output, owner * n, n).copy(peer, sendtb=peer, recvtb=owner, ch=0)


@algorithm(AllReduce, factor=lambda n: n)
def allreduce_a100_allpairs_v2(n: int) -> None:
    """All-pairs with n chunks; the owner adds them as a binary tree."""
    for rank in range(n):
        for step in range(1, n):
            owner = (rank + step) % n
            chunk(rank, Buffer.input, owner).copy(owner, "incoming", n - 1 - step)
    for owner in range(n):
        slots = [("incoming", i) for i in range(n - 1)]
        chunk(owner, Buffer.input, owner).copy(owner, Buffer.output, owner)
        slots.insert(0, (Buffer.output, owner))
        while len(slots) > 1:
            for a, b in zip(slots[0::2], slots[1::2], strict=False):
                chunk(owner, *a).reduce(chunk(owner, *b))
            slots = slots[0::2]
    for owner in range(n):
        for step in range(1, n):
            chunk(owner, Buffer.output, owner).copy((owner + step) % n)


@algorithm(AllReduce, factor=lambda n, channels=1: n * channels)
def allreduce_a100_ring(n: int, channels: int = 1) -> None:
    """The classic ring: reduce-scatter, then all-gather, 2(n-1) steps; ``channels`` rings side by side."""
    for channel in range(channels):
        for owner in rotations():
            at = owner * channels + channel
            acc = chunk(owner, Buffer.input, at)
            for step in range(1, n):
                rank = (owner + step) % n
                acc = chunk(rank, Buffer.input, at).copy(rank, Buffer.output, at).reduce(acc, ch=channel)
            for step in range(n, 2 * n - 1):
                acc = acc.copy((owner + step) % n, ch=channel)


@algorithm(AllReduce, factor=lambda n: 2, applies=lambda n: n == 4)
def allreduce_a100_ncv4(n: int) -> None:
    """Two chunks: pair sum, cross exchange, pair copy. Ranks: 4."""
    _to_output(n, 2)
    for pair in (0, 2):
        for side in (0, 1):
            owner, other = pair + side, pair + 1 - side
            chunk(owner, Buffer.output, side).reduce(chunk(other, Buffer.input, side))
    for side in (0, 1):
        low, high = side, 2 + side
        there = chunk(low, Buffer.output, side).copy(high, "crossed", 0)
        back = chunk(high, Buffer.output, side).copy(low, "crossed", 0)
        chunk(high, Buffer.output, side).reduce(there)
        chunk(low, Buffer.output, side).reduce(back)
    for pair in (0, 2):
        for side in (0, 1):
            chunk(pair + side, Buffer.output, side).copy(pair + 1 - side)


@algorithm(AllReduce, factor=lambda n: 2, applies=lambda n: n == 4)
def allreduce_a100_ncv4_v2(n: int) -> None:
    """Two chunks on two chains, each up and down again. Ranks: 4."""
    for index, chain in enumerate(([0, 1, 2, 3], [3, 2, 1, 0])):
        _up_and_down(chain, index)


def _up_and_down(chain: Sequence[int], index: int) -> None:
    """Sum chunk ``index`` along a chain of ranks and copy the total back along it."""
    acc = chunk(chain[0], Buffer.input, index)
    for rank in chain[1:]:
        acc = chunk(rank, Buffer.input, index).copy(rank, Buffer.output, index).reduce(acc)
    for rank in reversed(chain[:-1]):
        acc = acc.copy(rank, Buffer.output, index)


@algorithm(AllReduce, factor=lambda n: n, applies=power_of_two)
def allreduce_recursive_doubling_halving(n: int) -> None:
    """Vector halving, then doubling: 2 log2(n) steps, ranks a power of two."""
    _to_output(n, n)
    halve(n, Buffer.output)
    double(n, Buffer.output)


@algorithm(AllReduce, factor=lambda n, orders=3: 8 * orders, applies=lambda n: n == 8)
def allreduce_a100_recursive_doubling_halving(n: int, orders: int = 3) -> None:
    """Halving and doubling over one to three concurrent orders of the pairs, each on its share. Ranks: 8."""
    _to_output(n, n * orders)
    for order in range(orders):
        dims = [(order + d) % 3 for d in range(3)]
        _halve_and_double(n, dims, order * n, order)


def _halve_and_double(n: int, dims: Sequence[int], base: int, channel: int) -> None:
    """All-reduce chunks base..base+n, pairing ranks by the bits ``dims`` in this order."""

    def block(rank: int, depth: int) -> tuple[int, int]:
        """Return (first chunk, chunks) that ``rank`` is left with after ``depth`` halvings."""
        first, width = base, n
        for bit in dims[:depth]:
            width //= 2
            first += width * (rank >> bit & 1)
        return first, width

    for depth, bit in enumerate(dims, 1):
        for rank in range(n):
            partner = rank ^ (1 << bit)
            first, width = block(partner, depth)
            chunk(rank, Buffer.output, first, width).copy(partner, f"half{channel}.{depth}", 0, ch=channel)
        for rank in range(n):
            first, width = block(rank, depth)
            chunk(rank, Buffer.output, first, width).reduce(chunk(rank, f"half{channel}.{depth}", 0, width))
    for depth in range(len(dims), 0, -1):
        for rank in range(n):
            first, width = block(rank, depth)
            chunk(rank, Buffer.output, first, width).copy(rank ^ (1 << dims[depth - 1]), ch=channel)


@algorithm(AllReduce, factor=lambda n, trees=2: trees, applies=power_of_two)
def allreduce_binomial_tree(n: int, trees: int = 2) -> None:
    """Sum up a binomial tree and copy down it; a second, mirrored tree takes the other chunk. Ranks 2^k."""
    _to_output(n, trees)
    for tree in range(trees):
        mirrored = [n - 1 - rank if tree else rank for rank in range(n)]
        _binomial(n, mirrored, tree)


def _binomial(n: int, names: Sequence[int], index: int) -> None:
    width = 1
    while width < n:
        for rank in range(0, n, 2 * width):
            acc = chunk(names[rank], Buffer.output, index)
            acc.reduce(chunk(names[rank + width], Buffer.output, index))
        width *= 2
    while width > 1:
        width //= 2
        for rank in range(0, n, 2 * width):
            chunk(names[rank], Buffer.output, index).copy(names[rank + width])


@algorithm(AllReduce, applies=lambda n: n == 8)
def allreduce_ndv2(n: int) -> None:
    """Two sockets of four: sum in the socket, exchange between its heads, copy in the socket. Ranks: 8."""
    _to_output(n, 1)
    for head in (0, 4):
        for rank in range(head + 1, head + 4):
            chunk(head, Buffer.output, 0).reduce(chunk(rank, Buffer.input, 0))
    there = chunk(0, Buffer.output, 0).copy(4, "crossed", 0)
    back = chunk(4, Buffer.output, 0).copy(0, "crossed", 0)
    chunk(4, Buffer.output, 0).reduce(there)
    chunk(0, Buffer.output, 0).reduce(back)
    for head in (0, 4):
        for rank in range(head + 1, head + 4):
            chunk(head, Buffer.output, 0).copy(rank)
