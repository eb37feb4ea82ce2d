# SPDX-License-Identifier: Apache-2.0
"""Which messages need no slot between sender and receiver.

    direct = direct_messages(algorithm)
    direct.sends[rank, block, step]        # a Send: what the sender may do instead of filling a slot

A message may be *referred to* (the receiver reads the sender's memory) when whatever overwrites its source
later happens after the receive. It may be *stored* (the sender writes the receiver's destination) when
whatever touched that destination before happened before the send. "Happens" is the order that dependencies
and messages enforce, taken from the verifier's vector clocks, so both hold under every timing. The executor
decides between slot, reference and store when it knows where the buffers are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque

import numpy as np

from weft.collectives.cached import cached
from weft.collectives.interpreter import Interpreter, Running, Slot
from weft.collectives.ir import Algorithm, Connection, Op, Span, Step
from weft.collectives.structure import BlockId, check_structure

StepId = tuple[int, int, int]  # rank, block, step
Connections = dict[Connection, tuple[BlockId, BlockId]]
_MOST_CLOCKS = 1 << 26  # entries of all vector clocks; larger programs keep their slots


@dataclasses.dataclass(frozen=True)
class Send:
    """The rights of the sender of a step's messages. ``remote`` is where the receiver puts them; None: nowhere."""

    may_refer: bool
    may_store: bool
    remote: Span | None


@dataclasses.dataclass(frozen=True)
class DirectMessages:
    """By (rank, block, step): the sends that may bypass the slots, and the receives that are stored for.

    ``refers_only``: every message of every rank may be referred to, and nothing is reduced.
    """

    sends: dict[StepId, Send]
    stored_receives: frozenset[StepId]
    refers_only: bool = False


@cached
def direct_messages(algorithm: Algorithm) -> DirectMessages:
    """Analyse a verified algorithm, in every form that it claims; without a contract nothing bypasses its slots.

    The answer is cached: the cost model asks for every size, the executor once more. Threads: any.
    """
    algorithm = algorithm.unrotated()
    connections = check_structure(algorithm)
    blocks = sum(1 for _ in algorithm.blocks())
    work = sum(step.count for *_, step in algorithm.steps())
    if algorithm.contract is None or blocks * work > _MOST_CLOCKS:
        return DirectMessages({}, frozenset())
    found = [_Tracer(algorithm, form, connections).messages() for form in algorithm.forms()]
    sends: dict[StepId, Send] = {}
    stored = set()
    for sender, receiver in found[0]:
        may_refer = all(messages[sender, receiver][0] for messages in found)
        may_store = all(messages[sender, receiver][1] for messages in found)
        rank, block, step = receiver
        remote = algorithm.ranks[rank].blocks[block].steps[step].dst if may_store else None
        if may_refer or may_store:
            sends[sender] = Send(may_refer, may_store, remote)
        if may_store:
            stored.add(receiver)
    refers_only = all(
        not step.op.reduces and (not step.op.sends or ((r, b, at) in sends and sends[r, b, at].may_refer))
        for r, b, at, step in algorithm.steps()
    )
    return DirectMessages(sends, frozenset(stored), refers_only)


@dataclasses.dataclass
class _Event:
    """One chunk of a step: its block, when in that block, and what the block knew of the others then."""

    block: int
    time: int
    clock: np.ndarray
    step: StepId

    def before(self, other: _Event) -> bool:
        return bool(other.clock[self.block] >= self.time)


@dataclasses.dataclass
class _Traced:
    """One message: its two ends, and the slots where it comes from and goes to (None: no memory)."""

    sent: _Event
    received: _Event
    source: Slot | None
    target: Slot | None


class _Tracer(Interpreter):
    """Runs the steps and keeps who touched which slot when."""

    def __init__(self, algorithm: Algorithm, inplace: bool, connections: Connections) -> None:
        super().__init__(algorithm, inplace, connections)
        self._accesses: dict[Slot, list[tuple[_Event, bool]]] = defaultdict(list)  # True: it writes
        self._in_flight: dict[Connection, deque[tuple[_Event, Slot | None]]] = defaultdict(deque)
        self._traced: list[_Traced] = []

    def messages(self) -> dict[tuple[StepId, StepId], tuple[bool, bool]]:
        """Return (may be referred to, may be stored) by the steps that send and receive; all chunks must agree."""
        self.run()
        found: dict[tuple[StepId, StepId], tuple[bool, bool]] = {}
        for message in self._traced:
            key = message.sent.step, message.received.step
            refer, store = found.get(key, (True, True))
            found[key] = refer and self._may_refer(message), store and self._may_store(message)
        return found

    def _may_refer(self, message: _Traced) -> bool:
        if message.source is None:
            return False
        writes = (event for event, is_write in self._accesses[message.source] if is_write)
        return all(event.before(message.sent) or message.received.before(event) for event in writes)

    def _may_store(self, message: _Traced) -> bool:
        if message.target is None:
            return False
        accesses = (event for event, _ in self._accesses[message.target])
        return all(event.before(message.sent) or message.received.before(event) for event in accesses)

    def _execute(self, running: Running, step: Step) -> None:
        rank, number = running.identity
        block, op, chunk = running.block, step.op, running.chunk
        super()._execute(running, step)
        event = _Event(
            self._number[running.identity], running.time, running.clock.copy(), (rank, number, running.step)
        )
        src = self._slot(rank, step.src.buffer, step.src.index + chunk) if op.reads_src else None
        dst = self._slot(rank, step.dst.buffer, step.dst.index + chunk) if op.writes_dst else None
        if src is not None:
            self._accesses[src].append((event, False))
        if dst is not None:
            self._accesses[dst].append((event, True))
        if op.receives:
            sent, source = self._in_flight[block.recv, rank, block.channel].popleft()
            target = dst if op in (Op.RECV, Op.RECV_COPY_SEND) else None
            self._traced.append(_Traced(sent, event, source, target))
        if op.sends:
            # A forwarded chunk lies in the step's destination; a chunk that is only passed on (rrs) lies nowhere.
            piece = src if op is Op.SEND else dst
            self._in_flight[rank, block.send, block.channel].append((event, piece))
