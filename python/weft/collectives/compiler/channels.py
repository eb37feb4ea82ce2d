# SPDX-License-Identifier: Apache-2.0
"""Pass 3: channels. A chain of fused instructions travels on one channel from end to end.

A fused instruction binds the connection it receives from to the one it sends to, in one block; a connection has one
block at either end. So two chains that share a connection but part after it need different channels; chains that agree
at every rank share one. Everything else takes channel 0. The user's channels are kept.
"""

from __future__ import annotations

from weft.collectives.compiler.graph import Graph, Node
from weft.collectives.ir import MAX_CHANNELS
from weft.collectives.program_lines import ProgramError


class Chain:
    """Instructions joined by fused forwards: a send, any number of forwards, a receive."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.channel = 0
        hints = {node.channel_hint for node in nodes} - {-1}
        self.fixed = max(hints) if hints else -1

    def connections(self) -> list[tuple[int, int]]:
        """Return the (sender, receiver) pairs that the chain crosses."""
        return [(node.rank, node.send_peer) for node in self.nodes if node.sent_to]

    def turns(self) -> list[tuple[int, int, int]]:
        """Return (rank, received from, sent to) of every forward."""
        return [(n.rank, n.recv_peer, n.send_peer) for n in self.nodes if n.sent_by and n.sent_to]


class Channels:
    """Which turn each connection takes, by channel: the bookkeeping of the greedy choice."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, int, int], int] = {}
        self._before: dict[tuple[int, int, int], int] = {}
        self._users: dict[tuple[int, int, int], Chain] = {}

    def fits(self, chain: Chain, channel: int) -> bool:
        return all(
            self._after.get((rank, channel, source), target) == target
            and self._before.get((rank, channel, target), source) == source
            for rank, source, target in chain.turns()
        )

    def unused(self, chain: Chain, channel: int) -> bool:
        return all((a, b, channel) not in self._users for a, b in chain.connections())

    def take(self, chain: Chain, channel: int) -> None:
        chain.channel = channel
        for rank, source, target in chain.turns():
            self._after[rank, channel, source] = target
            self._before[rank, channel, target] = source
        for a, b in chain.connections():
            self._users.setdefault((a, b, channel), chain)
        for node in chain.nodes:
            node.channel = channel


def chains_of(graph: Graph) -> list[Chain]:
    """Return all chains; local instructions are in none."""
    chains = []
    for node in graph.nodes:
        if node.sent_by is not None or node.sent_to is None:
            continue
        members = [node]
        while members[-1].sent_to is not None:
            members.append(members[-1].sent_to)
        chains.append(Chain(members))
    return chains


def assign_channels(chains: list[Chain], shifted: set[int]) -> None:
    """Give every chain its channel. ``shifted`` are the chains that scheduling wants on connections of their own."""
    channels = Channels()
    order = sorted(
        range(len(chains)), key=lambda i: (chains[i].fixed < 0, i in shifted, -len(chains[i].turns()), i)
    )
    for i in order:
        chain = chains[i]
        if chain.fixed >= 0:
            if not channels.fits(chain, chain.fixed):
                raise ProgramError(
                    f"{chain.nodes[0].where}: channel {chain.fixed} is taken: a connection of this path already "
                    "continues to another rank there; give the path another ch"
                )
            channels.take(chain, chain.fixed)
            continue
        usable = (c for c in range(MAX_CHANNELS) if channels.fits(chain, c))
        if i in shifted:
            usable = (c for c in usable if channels.unused(chain, c))
        channel = next(usable, None)
        if channel is None:
            raise ProgramError(
                f"{chain.nodes[0].where}: no channel of {MAX_CHANNELS} is free on all hops of this path"
            )
        channels.take(chain, channel)
