# SPDX-License-Identifier: Apache-2.0
"""Pass 1: from traced operations to instructions and what each must wait for.

A remote operation becomes a send and a matching receive, a local one a copy or a reduce. ``before`` holds the
instructions of the same rank that read or wrote the slots earlier (read after write, write after read, write after
write); a receive also follows its send.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.contract import Buffer
from weft.collectives.ir import MAX_COUNT, Connection, Op, Span
from weft.collectives.language import Operation, Program
from weft.collectives.memory import Place
from weft.collectives.rotation import Area


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
    ranks: int = 0  # of the program
    hop: int = 0  # ranks from this to the one that gets its message

    @property
    def send_peer(self) -> int:
        return (self.rank + self.hop) % self.ranks if self.sent_to else -1

    @property
    def recv_peer(self) -> int:
        return (self.rank - self.sent_by.hop) % self.ranks if self.sent_by else -1

    @property
    def outgoing(self) -> Connection:
        """The connection that its message goes on."""
        return self.rank, self.send_peer, self.channel

    @property
    def incoming(self) -> Connection:
        """The connection that its message comes on."""
        return self.sent_by.outgoing if self.sent_by else (-1, self.rank, self.channel)


Slot = tuple[int, str, int]  # rank, buffer, index
Use = tuple[Node, bool, bool]  # an access: who, whether it reads, whether it writes


class Graph:
    """All instructions in program order, of at most ``step_chunks`` chunks, and the use of every slot.

    Of a program that is written with rotations() they are rank 0's, each for one of every rank: a message that rank 0
    sends to the rank ``hop`` further on stands for the one that it gets from as many ranks back.
    """

    def __init__(self, program: Program, step_chunks: int = MAX_COUNT) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self.ranks = [0] if program.rotation else list(range(program.num_ranks))
        self._bases = [_scratch_bases(program, rank) for rank in self.ranks]
        self.rotation = program.rotation and program.rotation.with_scratch(self._rotated_scratch())
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
        sender, receiver = operation.src.rank, operation.dst.rank
        src, dst = self._span(operation.src, at, sender), self._span(operation.dst, at, sender)
        if sender == receiver:
            op = Op.REDUCE if operation.reduces else Op.COPY
            node = self._node(op, sender, src, dst, count, operation.where)
            node.block_hint, node.channel_hint = operation.sendtb, operation.channel
            return
        send = self._node(Op.SEND, sender, src, dst, count, operation.where)
        send.hop = (receiver - sender) % self.program.num_ranks
        op = Op.RECV_REDUCE_COPY if operation.reduces else Op.RECV
        src, dst = self._span(operation.src, at, receiver), self._span(operation.dst, at, receiver)
        # The local operand of a receiving reduction is the receiver's own slot.
        recv = self._node(op, receiver, dst if operation.reduces else src, dst, count, operation.where)
        send.sent_to, recv.sent_by = recv, send
        send.block_hint, recv.block_hint = operation.sendtb, operation.recvtb
        send.channel_hint = recv.channel_hint = operation.channel

    def _node(self, op: Op, rank: int, src: Span, dst: Span, count: int, where: str) -> Node:
        here = 0 if self.rotation else rank
        self.nodes.append(
            Node(len(self.nodes), here, op, src, dst, count, where, ranks=self.program.num_ranks)
        )
        return self.nodes[-1]

    def landing(self, send: Node) -> Span:
        """Return where the message of ``send`` lands, as the sender calls that chunk."""
        assert send.sent_to is not None
        return self._rotated(send.sent_to.dst, send.hop)

    def _rotated(self, span: Span, by: int) -> Span:
        return Span(span.buffer, self.rotation.index(span.buffer, span.index, by)) if self.rotation else span

    def _span(self, place: Place, at: int, rank: int) -> Span:
        """Return the chunk, as the rank that stands for ``rank`` calls it."""
        if place.buffer in (Buffer.input, Buffer.output):
            span = Span(place.buffer, place.index + at)
        else:
            bases = self._bases[0 if self.rotation else place.rank]
            span = Span(Buffer.scratch, bases[place.buffer] + place.index + at)
        return self._rotated(span, -rank)

    def _rotated_scratch(self) -> list[Area]:
        areas = self.program.rotation.areas if self.program.rotation else {}
        bases = self._bases[0]
        own = [(bases[name], area) for name in bases for area in areas.get(name, ())]
        return [Area(base + area.first, base + area.end, area.part) for base, area in own]


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
