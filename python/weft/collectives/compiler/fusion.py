# SPDX-License-Identifier: Apache-2.0
"""Pass 2: merge instructions.

    cpy a->b, rrc b+=in       ->  rrc b = a + in        (absorb_copies)
    rrc, s                    ->  rrcs, or rrs if nobody else needs the sum
    r, s                      ->  rcs
    cpy a->b, s b             ->  cpy a->b, s a         (send_originals)

A receive and a send merge when they agree in block, channel and count, the send needs nothing but the received chunks,
and the forwarded chunks land where the receive stores its own: a step has one destination.
"""

from __future__ import annotations

from weft.collectives.compiler.channels import chains_of
from weft.collectives.compiler.graph import Graph, Node, Slot, Use, slots_read, slots_written
from weft.collectives.contract import Buffer
from weft.collectives.ir import Op, Span


def absorb_copies(graph: Graph) -> None:
    """Let a receiving reduction read the source of the copy that prepared its destination."""
    uses = graph.uses
    gone: set[Node] = set()
    for node in graph.nodes:
        if node.op is not Op.RECV_REDUCE_COPY or node.src != node.dst:
            continue
        copy = _only_copy_before(graph, node, uses)
        if copy is not None and copy not in gone:
            node.src = copy.src
            gone.add(copy)
    if gone:
        graph.nodes = [node for node in graph.nodes if node not in gone]
        graph.link()


def _only_copy_before(graph: Graph, node: Node, uses: dict[Slot, list[Use]]) -> Node | None:
    """Return the copy that wrote exactly what ``node`` reduces into, if nothing came between them."""
    copy: Node | None = None
    for key in slots_read(node):
        history = [user for user, _, _ in uses[key]]
        at = history.index(node)
        previous = history[at - 1] if at else None
        if previous is None or previous.op is not Op.COPY or (copy is not None and previous is not copy):
            return None
        copy = previous
    if (
        copy is None
        or copy.count != node.count
        or copy.dst != node.dst
        or copy.block_hint not in (-1, node.block_hint)
    ):
        return None
    for key in slots_read(copy):
        if any(writes and copy.seq < user.seq < node.seq for user, _, writes in uses[key]):
            return None
    return copy


def send_originals(graph: Graph) -> None:
    """Let a send read what a local copy read, where that stays unchanged, so that it need not wait for the copy."""
    uses = graph.uses
    for node in graph.nodes:
        if node.op is not Op.SEND:
            continue
        copies = {writer for writer in node.before if slots_written(writer)}
        copy = next(iter(copies), None)
        if copy is None or len(copies) > 1 or copy.op is not Op.COPY:
            continue
        shift = node.src.index - copy.dst.index
        inside = copy.dst.buffer == node.src.buffer and shift >= 0 and shift + node.count <= copy.count
        if inside and not any(
            writes for key in slots_read(copy) for user, _, writes in uses[key] if user.seq > copy.seq
        ):
            node.src = Span(copy.src.buffer, copy.src.index + shift)
    graph.link()


def fuse_forwards(graph: Graph) -> None:
    """Merge receives with the sends that pass their chunks on."""
    uses = graph.uses
    required = {
        (rank, *graph.program.collective.get_buffer_index(rank, Buffer.output, index))
        for rank, program in zip(graph.ranks, graph.program.buffers, strict=True)
        for index in range(len(program.get(Buffer.output, [])))
    }
    merged: dict[Node, Node] = {}  # receives, and the sends that they do now
    for op in (Op.RECV_REDUCE_COPY, Op.RECV):
        for node in graph.nodes:
            if node.op is op:
                _fuse_one(graph, node, uses, required, merged)
    everything, gone = graph.nodes, set(merged.values())
    graph.nodes = [node for node in everything if node not in gone]
    _part_crossings(graph, merged)
    gone = set(merged.values())
    graph.nodes = [node for node in everything if node not in gone]
    graph.link()


def _part_crossings(graph: Graph, merged: dict[Node, Node]) -> None:
    """Part chains that come through a rank again and turn elsewhere, as no channel could carry both turns."""
    for chain in chains_of(graph):
        after: dict[tuple[int, int], int] = {}
        before: dict[tuple[int, int], int] = {}
        for node in chain.nodes:
            if node.sent_by is None or node.sent_to is None:
                continue
            source, target = (node.rank, node.recv_peer), (node.rank, node.send_peer)
            agrees = after.setdefault(source, target[1]) == target[1]
            if agrees and before.setdefault(target, source[1]) == source[1]:
                continue
            send = merged.pop(node)
            node.op = Op.RECV if node.op is Op.RECV_COPY_SEND else Op.RECV_REDUCE_COPY
            send.sent_to, node.sent_to.sent_by, node.sent_to = node.sent_to, send, None
            after, before = {}, {}


def _fuse_one(
    graph: Graph,
    node: Node,
    uses: dict[Slot, list[Use]],
    required: set[Slot],
    merged: dict[Node, Node],
) -> None:
    for send in _sends_after(node, uses):
        if not _can_merge(graph, node, send):
            continue
        unused = node.op is Op.RECV_REDUCE_COPY and _needed_only_by_send(node, send, uses, required)
        if node.op is Op.RECV:
            node.op = Op.RECV_COPY_SEND
        else:
            node.op = Op.RECV_REDUCE_SEND if unused else Op.RECV_REDUCE_COPY_SEND
        assert send.sent_to is not None
        node.sent_to, node.hop, send.sent_to.sent_by = send.sent_to, send.hop, node
        node.block_hint = max(node.block_hint, send.block_hint)
        node.channel_hint = max(node.channel_hint, send.channel_hint)
        merged[node] = send
        for key in slots_read(send):
            uses[key] = [use for use in uses[key] if use[0] is not send]
        return


def _sends_after(node: Node, uses: dict[Slot, list[Use]]) -> list[Node]:
    """Return the plain sends of what ``node`` stored, before it is overwritten."""
    out = []
    history = uses[slots_written(node)[0]]
    at = next(i for i, use in enumerate(history) if use[0] is node)
    for user, _, writes in history[at + 1 :]:
        if writes:
            break
        if user.op is Op.SEND:
            out.append(user)
    return out


def _can_merge(graph: Graph, node: Node, send: Node) -> bool:
    assert send.sent_to is not None and node.sent_by is not None
    same_place = send.src == node.dst and send.count == node.count
    same_landing = graph.landing(send) == node.dst
    hints = node.block_hint == send.block_hint and node.channel_hint == send.channel_hint
    return same_place and same_landing and hints and send.before <= {node}


def _needed_only_by_send(
    node: Node,
    send: Node,
    uses: dict[Slot, list[Use]],
    required: set[Slot],
) -> bool:
    for key in slots_written(node):
        later = uses[key][[use[0] for use in uses[key]].index(node) + 1 :]
        users = [use for use in later if use[0] is not send]
        if not users:
            if key in required or key[1] != Buffer.scratch:
                return False
            continue
        _, reads, writes = users[0]
        if reads or not writes:
            return False
    return True
