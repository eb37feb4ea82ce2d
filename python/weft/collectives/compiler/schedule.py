# SPDX-License-Identifier: Apache-2.0
"""Pass 4: one order for all instructions of all ranks, and channels that allow it.

The order is a list schedule by (depth from the start, longest path to the end, program order). It respects the data,
takes messages from every connection in the order in which they were sent, and never has more groups of chunks in a
connection than fit. Blocks take their steps in this order, so whatever blocks the next pass forms, the order itself
is an execution that finishes: the program cannot deadlock. Where a receive would have to overtake another on its
connection, its chain moves to a channel of its own and the scheduling starts again.
"""

from __future__ import annotations

import heapq
from collections import deque

from weft.collectives.compiler.channels import assign_channels, chains_of
from weft.collectives.compiler.graph import Graph, Node
from weft.collectives.ir import fifo_units
from weft.collectives.program_lines import ProgramError


def schedule(graph: Graph) -> list[Node]:
    """Assign channels and return all nodes in an order that can run. Raises: ProgramError."""
    chains = chains_of(graph)
    chain_of = {node: i for i, chain in enumerate(chains) for node in chain.nodes}
    edges = _Edges(graph.nodes)
    priority = _priorities(edges)
    shifted: set[int] = set()
    while True:
        assign_channels(chains, shifted)
        order, stuck = _ListSchedule(edges, priority, fifo_units(graph.program.protocol)).run()
        if stuck is None:
            return order
        chain = chain_of[stuck]
        if chain in shifted or chains[chain].fixed >= 0:
            raise ProgramError(
                f"{stuck.where}: on channel {stuck.channel} from rank {stuck.recv_peer} to rank {stuck.rank}, messages "
                "are received in another order than they are sent; give this operation another ch"
            )
        shifted.add(chain)


class _Edges:
    """Which nodes come after each, and how many each needs."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.after: dict[Node, list[Node]] = {node: [] for node in nodes}
        self.needed: dict[Node, int] = {}
        for node in nodes:
            count = len(node.before)
            for earlier in node.before:
                self.after[earlier].append(node)
            if node.sent_by is not None and node.sent_by not in node.before:
                self.after[node.sent_by].append(node)
                count += 1
            self.needed[node] = count


def _priorities(edges: _Edges) -> dict[Node, tuple[int, int, int]]:
    """Return (depth, -height, program order) of every node; smaller runs first."""
    order, depth = _topological(edges)
    height: dict[Node, int] = {}
    for node in reversed(order):
        height[node] = max((height[later] + 1 for later in edges.after[node]), default=0)
    return {node: (depth[node], -height[node], node.seq) for node in edges.nodes}


def _topological(edges: _Edges) -> tuple[list[Node], dict[Node, int]]:
    """Return the nodes in an order of their needs, and how many steps lead to each."""
    missing = dict(edges.needed)
    depth = dict.fromkeys(edges.nodes, 0)
    order = [node for node in edges.nodes if not missing[node]]
    for node in order:  # grows
        behind = depth[node] + 1
        for later in edges.after[node]:
            missing[later] -= 1
            depth[later] = max(depth[later], behind)
            if not missing[later]:
                order.append(later)
    assert len(order) == len(edges.nodes), "fusion made a cycle"
    return order, depth


class _ListSchedule:
    """One attempt: issues nodes until all are issued or only receives out of turn are left."""

    def __init__(self, edges: _Edges, priority: dict[Node, tuple[int, int, int]], fifo: int) -> None:
        self._nodes = edges.nodes
        self._priority = priority
        self._fifo = fifo
        self._missing = dict(edges.needed)
        self._after = edges.after
        self._in_flight: dict[tuple[int, int, int], deque[Node]] = {}
        self._order: list[Node] = []

    def run(self) -> tuple[list[Node], Node | None]:
        """Return the order, and a receive that can never take its turn, if there is one."""
        ready = [(self._priority[node], node) for node in self._nodes if not self._missing[node]]
        heapq.heapify(ready)
        waiting: dict[tuple[int, int, int], list[Node]] = {}
        while ready or waiting:
            if ready:
                node = heapq.heappop(ready)[1]
                if not self._in_turn(node):
                    waiting.setdefault(node.incoming, []).append(node)
                    continue
                if not self._fits(node):
                    waiting.setdefault(node.outgoing, []).append(node)
                    continue
            else:
                # Nothing but full connections and receives out of turn: let a send overrun its connection.
                blocked = sorted(
                    (node for nodes in waiting.values() for node in nodes), key=self._priority.__getitem__
                )
                node = next((n for n in blocked if self._in_turn(n)), blocked[0])
                if not self._in_turn(node):
                    return self._order, node
                waiting[node.outgoing].remove(node)
            for later in self._issue(node):
                heapq.heappush(ready, (self._priority[later], later))
            for key in (node.incoming, node.outgoing):
                for other in waiting.pop(key, ()):
                    heapq.heappush(ready, (self._priority[other], other))
        return self._order, None

    def _in_turn(self, node: Node) -> bool:
        if node.sent_by is None:
            return True
        return self._in_flight[node.incoming][0] is node

    def _fits(self, node: Node) -> bool:
        if node.sent_to is None:
            return True
        in_flight = self._in_flight.get(node.outgoing, ())
        # A new message leaves a place for one that is passed on; else a ring of forwards fills up and stops.
        starts_forward = node.sent_by is None and node.sent_to.sent_to is not None
        room = self._fifo - 1 if starts_forward else self._fifo
        return not in_flight or sum(other.count for other in in_flight) + node.count <= room

    def _issue(self, node: Node) -> list[Node]:
        self._order.append(node)
        if node.sent_by is not None:
            self._in_flight[node.incoming].popleft()
        if node.sent_to is not None:
            self._in_flight.setdefault(node.outgoing, deque()).append(node.sent_to)
        ready = []
        for later in self._after[node]:
            self._missing[later] -= 1
            if not self._missing[later]:
                ready.append(later)
        return ready
