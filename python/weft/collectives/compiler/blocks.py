# SPDX-License-Identifier: Apache-2.0
"""Pass 5: thread blocks. Walks the schedule and puts every instruction into a block of its rank.

A connection has one block at either end, so an instruction goes where its connections already are. Otherwise a send and
a receive with the same peer share a block, a local instruction joins the block of what it waits for, and the rest opens
new blocks. Blocks that the user names are kept; a second peer or channel in one is an error.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.compiler.graph import Node
from weft.collectives.program_lines import ProgramError


@dataclasses.dataclass(eq=False)
class OpenBlock:
    """A block being filled. ``hint`` is the user's number for it, -1 if it is ours."""

    rank: int
    hint: int = -1
    send: int = -1
    recv: int = -1
    channel: int = -1
    nodes: list[Node] = dataclasses.field(default_factory=list)

    def accepts(self, node: Node) -> bool:
        """Return whether the node's peers and channel are free here or already these."""
        remote = node.sent_to is not None or node.sent_by is not None
        return (
            (node.sent_to is None or self.send in (-1, node.send_peer))
            and (node.sent_by is None or self.recv in (-1, node.recv_peer))
            and (not remote or self.channel in (-1, node.channel))
        )

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.sent_to is not None:
            self.send, self.channel = node.send_peer, node.channel
        if node.sent_by is not None:
            self.recv, self.channel = node.recv_peer, node.channel


def assign_blocks(order: list[Node], ranks: int) -> list[list[OpenBlock]]:
    """Return every rank's blocks, sorted by (send, recv, channel), their nodes in order. Raises: ProgramError."""
    blocks: list[list[OpenBlock]] = [[] for _ in range(ranks)]
    senders: dict[tuple[int, int, int], OpenBlock] = {}
    receivers: dict[tuple[int, int, int], OpenBlock] = {}
    home: dict[Node, OpenBlock] = {}
    turns = {(n.rank, n.recv_peer, n.channel): n.send_peer for n in order if n.sent_by and n.sent_to}
    turns_back = {(n.rank, n.send_peer, n.channel): n.recv_peer for n in order if n.sent_by and n.sent_to}
    for node in order:
        send_key = (node.rank, node.send_peer, node.channel)
        recv_key = (node.rank, node.recv_peer, node.channel)
        owners = {
            senders.get(send_key) if node.sent_to else None,
            receivers.get(recv_key) if node.sent_by else None,
        }
        owner = next(iter(owners - {None}), None)
        if node.block_hint >= 0:
            block = _named_block(blocks[node.rank], node)
        elif owner is not None:
            block = owner
        elif node.sent_to is None and node.sent_by is None:
            block = _block_of_newest(node, home, blocks[node.rank])
        else:
            partner = turns.get(recv_key, -1) if node.sent_by else turns_back.get(send_key, -1)
            block = _block_for_peer(blocks[node.rank], node, partner, turns, turns_back)
        if (owners - {None}) - {block} or not block.accepts(node):
            raise ProgramError(f"{node.where}: {_conflict(node, block)}")
        block.add(node)
        home[node] = block
        if node.sent_to:
            senders[send_key] = block
        if node.sent_by:
            receivers[recv_key] = block
    return [sorted(own, key=lambda b: (b.send, b.recv, b.channel, b.hint)) for own in blocks]


def _named_block(blocks: list[OpenBlock], node: Node) -> OpenBlock:
    for block in blocks:
        if block.hint == node.block_hint:
            return block
    blocks.append(OpenBlock(node.rank, node.block_hint))
    return blocks[-1]


def _block_of_newest(node: Node, home: dict[Node, OpenBlock], blocks: list[OpenBlock]) -> OpenBlock:
    """Return the block of the last instruction that a local one waits for, which saves a wait."""
    newest = max(node.before & home.keys(), key=lambda n: (len(home[n].nodes), n.seq), default=None)
    if newest is not None:
        return home[newest]
    for block in blocks:
        if block.hint < 0 and block.send < 0 and block.recv < 0:
            return block
    blocks.append(OpenBlock(node.rank))
    return blocks[-1]


def _block_for_peer(
    blocks: list[OpenBlock],
    node: Node,
    partner: int,
    turns: dict[tuple[int, int, int], int],
    turns_back: dict[tuple[int, int, int], int],
) -> OpenBlock:
    """Return a block for a connection's first use. ``partner`` is what a fused instruction ties it to, -1 for none."""
    if partner < 0:
        partner = node.send_peer if node.sent_to else node.recv_peer
    for block in blocks:
        if block.hint >= 0 or not block.accepts(node) or (block.send < 0 and block.recv < 0):
            continue
        other = block.recv if node.sent_to else block.send
        tied = turns if node.sent_to else turns_back
        if other == partner and tied.get(
            (node.rank, other, node.channel), node.send_peer if node.sent_to else node.recv_peer
        ) == (node.send_peer if node.sent_to else node.recv_peer):
            return block
    blocks.append(OpenBlock(node.rank))
    return blocks[-1]


def _conflict(node: Node, block: OpenBlock) -> str:
    label = f"block {block.hint}" if block.hint >= 0 else "a block"
    return (
        f"{label} of rank {node.rank} sends to {_peer(block.send)} and receives from {_peer(block.recv)} on channel "
        f"{block.channel}; this operation needs {_peer(node.send_peer)} and {_peer(node.recv_peer)} on channel "
        f"{node.channel}"
    )


def _peer(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "nobody"
