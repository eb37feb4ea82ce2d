# SPDX-License-Identifier: Apache-2.0
"""Pass 1: from traced operations to instructions and what each must wait for.

A remote operation becomes a send and a matching receive, a local one a copy or a reduce. ``before`` holds the
instructions of the same rank that read or wrote the slots earlier (read after write, write after read, write after
write); a receive also follows its send.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.contract import Buffer
from weft.collectives.ir import MAX_COUNT, Op, Span
from weft.collectives.language import Operation, Place, Program


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One instruction. ``sent_by`` is the node whose message it receives, ``sent_to`` the one that gets its message."""

    seq: int
    rank: int
    op: Op
    src: Span
    dst: Span
    count: int
    where: str
    before: set[Node] = dataclasses.field(default_factory=set)
    sent_by: Node | None = None
    sent_to: Node | None = None
    block_hint: int = -1
    channel_hint: int = -1
    channel: int = 0

    @property
    def send_peer(self) -> int:
        return self.sent_to.rank if self.sent_to else -1

    @property
    def recv_peer(self) -> int:
        return self.sent_by.rank if self.sent_by else -1


Slot = tuple[int, str, int]  # rank, buffer, index
Use = tuple[Node, bool, bool]  # an access: who, whether it reads, whether it writes


class Graph:
    """All instructions in program order, of at most ``step_chunks`` chunks, and the use of every slot."""

    def __init__(self, program: Program, step_chunks: int = MAX_COUNT) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self._bases = [_scratch_bases(program, rank) for rank in range(program.num_ranks)]
        for operation in program.operations:
            for at in range(0, operation.size, step_chunks):
                self._add(operation, at, min(step_chunks, operation.size - at))
        self.link()

    def scratch_chunks(self, rank: int) -> int:
        return sum(self.program.scratch_sizes(rank).values())

    def link(self) -> None:
        """Recompute ``before`` and ``uses`` from the slots, in program order."""
        self.uses: dict[Slot, list[Use]] = {}
        last_write: dict[Slot, Node] = {}
        reads: dict[Slot, list[Node]] = {}
        for node in self.nodes:
            before: set[Node] = set()
            read, written = slots_read(node), slots_written(node)
            for key in read:
                if key in last_write:
                    before.add(last_write[key])
            for key in written:
                if key in reads:
                    before.update(reads.pop(key))
                if key in last_write:
                    before.add(last_write[key])
                last_write[key] = node
                self.uses.setdefault(key, []).append((node, key in read, True))
            for key in read:
                if key not in written:
                    reads.setdefault(key, []).append(node)
                    self.uses.setdefault(key, []).append((node, True, False))
            before.discard(node)
            node.before = before

    def _add(self, operation: Operation, at: int, count: int) -> None:
        src, dst = self._span(operation.src, at), self._span(operation.dst, at)
        where = operation.where
        if operation.src.rank == operation.dst.rank:
            op = Op.REDUCE if operation.reduces else Op.COPY
            node = Node(len(self.nodes), operation.src.rank, op, src, dst, count, where)
            node.block_hint, node.channel_hint = operation.sendtb, operation.channel
            self.nodes.append(node)
            return
        send = Node(len(self.nodes), operation.src.rank, Op.SEND, src, dst, count, where)
        op = Op.RECV_REDUCE_COPY if operation.reduces else Op.RECV
        # The local operand of a receiving reduction is the receiver's own slot.
        recv = Node(
            len(self.nodes) + 1, operation.dst.rank, op, dst if operation.reduces else src, dst, count, where
        )
        send.sent_to, recv.sent_by = recv, send
        send.block_hint, recv.block_hint = operation.sendtb, operation.recvtb
        send.channel_hint = recv.channel_hint = operation.channel
        self.nodes += [send, recv]

    def _span(self, place: Place, at: int) -> Span:
        if place.buffer in (Buffer.input, Buffer.output):
            return Span(place.buffer, place.index + at)
        return Span(Buffer.scratch, self._bases[place.rank][place.buffer] + place.index + at)


def slots_read(node: Node) -> list[Slot]:
    slots = _slots(node, node.src) if node.op.reads_src else []
    return slots + _slots(node, node.dst) if node.op is Op.REDUCE else slots


def slots_written(node: Node) -> list[Slot]:
    if not node.op.writes_dst:
        return []
    return _slots(node, node.dst)


def _slots(node: Node, span: Span) -> list[Slot]:
    rank, buffer, first = node.rank, span.buffer, span.index
    if node.count == 1:
        return [(rank, buffer, first)]
    return [(rank, buffer, at) for at in range(first, first + node.count)]


def _scratch_bases(program: Program, rank: int) -> dict[str, int]:
    bases, total = {}, 0
    for name, size in program.scratch_sizes(rank).items():
        bases[name] = total
        total += size
    return bases
