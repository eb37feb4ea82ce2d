# SPDX-License-Identifier: Apache-2.0
"""Which rank can reach which: all that a program asks of a machine.

fully_connected(8).link(0, 3)     # True
"""

from __future__ import annotations

from collections.abc import Iterable


class Topology:
    """Directed links between ranks. ``groups`` says which ranks share a node, for the cost model."""

    def __init__(
        self, name: str, ranks: int, links: Iterable[tuple[int, int]], ranks_per_node: int = 0
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.ranks_per_node = ranks_per_node or ranks
        self._links = frozenset(links)

    def __repr__(self) -> str:
        return f"Topology({self.name}, {self.ranks} ranks)"

    def link(self, src: int, dst: int) -> bool:
        """Return whether ``src`` can send to ``dst``."""
        return (src, dst) in self._links

    def num_nodes(self) -> int:
        """Return the ranks, which MSCCL calls the nodes of a topology."""
        return self.ranks

    def nodes(self) -> range:
        return range(self.ranks)


def _both_ways(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    once = list(pairs)
    return once + [(b, a) for a, b in once]


def fully_connected(ranks: int) -> Topology:
    """Every rank reaches every other."""
    return Topology("fully_connected", ranks, ((a, b) for a in range(ranks) for b in range(ranks) if a != b))


def ring(ranks: int) -> Topology:
    """Every rank reaches its two neighbours, around."""
    return Topology("ring", ranks, _both_ways((a, (a + 1) % ranks) for a in range(ranks)))


def line(ranks: int) -> Topology:
    """Every rank reaches its neighbours; the ends have one."""
    return Topology("line", ranks, _both_ways((a, a + 1) for a in range(ranks - 1)))


def star(ranks: int) -> Topology:
    """Rank 0 is joined with every other."""
    return Topology("star", ranks, _both_ways((0, a) for a in range(1, ranks)))


def hub_and_spoke(ranks: int) -> Topology:
    """All ranks hang on one switch, so every rank reaches every other."""
    all_pairs = ((a, b) for a in range(ranks) for b in range(ranks) if a != b)
    return Topology("hub_and_spoke", ranks, all_pairs)


_DGX1_QUADS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def dgx1() -> Topology:
    """Eight V100: two fully joined quads, and a link between the twins i and i + 4."""
    quads = [(a + q, b + q) for q in (0, 4) for a, b in _DGX1_QUADS]
    return Topology("dgx1", 8, _both_ways([*quads, *((a, a + 4) for a in range(4))]))


def dgx_a100() -> Topology:
    """Eight A100 on NVSwitch."""
    pairs = ((a, b) for a in range(8) for b in range(8) if a != b)
    return Topology("dgx_a100", 8, pairs)


def amd4() -> Topology:
    """Four GPUs, all joined."""
    return Topology("amd4", 4, _both_ways(_DGX1_QUADS))


def amd8() -> Topology:
    """Eight GPUs as two rings of four with the twins joined."""
    rings = [(q + a, q + (a + 1) % 4) for q in (0, 4) for a in range(4)]
    return Topology("amd8", 8, _both_ways([*rings, *((a, a + 4) for a in range(4))]))


def nvlink_only(ranks: int = 8) -> Topology:
    """The NVLink links of a DGX-1 alone."""
    return dgx1() if ranks == 8 else fully_connected(ranks)


def distributed_fully_connected(local: Topology, nodes: int, remote_bw: float = 1) -> Topology:
    """``nodes`` copies of ``local``; every rank reaches every rank of the other nodes.

    ``remote_bw`` is taken for MSCCL's scripts; the cost model has figures of its own.
    """
    per_node = local.ranks
    links = []
    for a in range(per_node * nodes):
        for b in range(per_node * nodes):
            same = a // per_node == b // per_node
            if a != b and (not same or local.link(a % per_node, b % per_node)):
                links.append((a, b))
    return Topology(f"distributed_{local.name}", per_node * nodes, links, per_node)


def distributed_hub_and_spoke(local: Topology, nodes: int, remote_bw: float = 1) -> Topology:
    """``nodes`` copies of ``local`` on one switch."""
    return distributed_fully_connected(local, nodes, remote_bw)
