# SPDX-License-Identifier: Apache-2.0
"""The second half of the verifier: runs the steps on symbolic contents, and says who raced, hung or was wrong.

Access to memory is ordered by vector clocks: one that came before in this run must come before in every run.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from weft.collectives.contract import Buffer, Collective, State
from weft.collectives.ir import Algorithm, Block, Connection, Op, Step
from weft.collectives.structure import BlockId, VerificationError, block_at, broken
from weft.collectives.values import Chunk, Value

Slot = tuple[int, str, int]
# Who touched a slot: number of the block, its time; the block, its step.
Access = tuple[int, int, BlockId, int]


@dataclasses.dataclass
class _Message:
    value: Value
    clock: np.ndarray


@dataclasses.dataclass
class Running:
    """A block's state: the step and chunk it is at, and what it knows of all blocks (a vector clock)."""

    identity: BlockId
    block: Block
    clock: np.ndarray
    incoming: Connection
    outgoing: Connection
    step: int = 0
    chunk: int = 0
    time: int = 0
    waits_for: str = ""
    waits_on: BlockId | None = None


class Interpreter:
    """Runs the steps, one chunk at a time, with connections of ``slots`` messages; None: as many as are sent.

    Ranks that are alike take every step at the same time, so rank 0's blocks are run for all: what comes from a peer is
    what rank 0 sent, rotated, and a clock has the blocks of all ranks, each named by its distance from rank 0. If no
    block of rank 0 can move, none of any rank can.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        inplace: bool,
        connections: dict[Connection, tuple[BlockId, BlockId]],
        slots: int | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._contract = algorithm.contract.in_form(inplace) if algorithm.contract else None
        self._inplace = inplace
        self._form = "in place" if inplace else "out of place"
        self._connections = connections
        self._capacity = slots
        self._fifo: dict[Connection, deque[_Message]] = {key: deque() for key in connections}
        self._values: dict[Slot, Value] = _initial(algorithm, self._contract, inplace)
        self._written: dict[Slot, Access] = {}
        self._read: dict[Slot, list[Access]] = {}
        self._rotation = algorithm.rotation
        identities = [(rank, number) for rank, number, _ in algorithm.distinct_blocks()]
        self._number = {identity: i for i, identity in enumerate(identities)}
        zero = np.zeros(len(identities) * (algorithm.num_ranks if self._rotation else 1), np.int32)
        self._blocks = {i: self._running(i, zero.copy()) for i in identities}
        self._needed = algorithm.needed_steps()
        self._finished: dict[tuple[int, int, int], np.ndarray] = {}
        self._waiting: dict[object, list[BlockId]] = {}
        self._ready: deque[BlockId] = deque(identities)
        self._messages = 0

    def _running(self, identity: BlockId, clock: np.ndarray) -> Running:
        block, rank = block_at(self._algorithm, identity), identity[0]
        ends = self._algorithm.incoming(rank, block), self._algorithm.outgoing(rank, block)
        return Running(identity, block, clock, *ends)

    def run(self) -> int:
        """Return the number of messages. Raises: VerificationError."""
        story = self.hang()
        if story:
            raise VerificationError("deadlock", story)
        self._check_result()
        return self._messages

    def hang(self) -> str:
        """Run until nothing moves; return which blocks then wait for which, "" if all are done. Raises:
        VerificationError."""
        while self._ready:
            running = self._blocks[self._ready.popleft()]
            while self._advance(running):
                pass
        stuck = [running for running in self._blocks.values() if running.step < len(running.block.steps)]
        return self._story(stuck[0]) if stuck else ""

    def output(self, rank: int, index: int) -> Value | None:
        """Return the value of chunk ``index`` of a rank's output; None if no step wrote it."""
        slot = self._slot(rank, Buffer.output, index)
        return self._values[slot] if slot in self._written else None

    def _advance(self, running: Running) -> bool:
        """Run one chunk of the block's step; False when the block is finished or must wait."""
        if running.step == len(running.block.steps):
            return False
        step = running.block.steps[running.step]
        if running.chunk == 0:
            self._check_overlap(running, step)
            if not self._dependencies_met(running, step):
                return False
        if not self._connections_ready(running, step):
            return False
        running.time += 1
        self._execute(running, step)
        running.chunk += 1
        if running.chunk == step.count:
            self._finish_step(running)
        return True

    def _dependencies_met(self, running: Running, step: Step) -> bool:
        rank = running.identity[0]
        for dep in step.depends:
            clock = self._finished.get((rank, *dep))
            if clock is None:
                what = f"step {dep[1]} of block {dep[0]} to finish"
                return self._wait(running, (rank, *dep), what, (rank, dep[0]))
            np.maximum(running.clock, clock, out=running.clock)
        return True

    def _connections_ready(self, running: Running, step: Step) -> bool:
        block = running.block
        if step.op.receives:
            key = running.incoming
            if not self._fifo[key]:
                what = f"a message from rank {block.recv} on channel {block.channel}"
                return self._wait(running, ("message", key), what, self._connections[key][0])
        if step.op.sends:
            key = running.outgoing
            if self._capacity is not None and len(self._fifo[key]) >= self._capacity:
                what = f"a free place towards rank {block.send} on channel {block.channel} ({self._capacity} are taken)"
                return self._wait(running, ("place", key), what, self._connections[key][1])
        return True

    def _wait(self, running: Running, key: object, what: str, on: BlockId) -> bool:
        running.waits_for, running.waits_on = what, on
        self._waiting.setdefault(key, []).append(running.identity)
        return False

    def _wake(self, key: object) -> None:
        self._ready.extend(self._waiting.pop(key, ()))

    def _execute(self, running: Running, step: Step) -> None:
        me = self._number[running.identity]
        value: Value | None = None
        if step.op.receives:
            message = self._received(running)
            np.maximum(running.clock, message.clock, out=running.clock)
            value = message.value
        running.clock[me] = running.time
        if step.op.reads_src:
            operand = self._load(running, step.src.buffer, step.src.index + running.chunk)
            value = operand if value is None else value + operand
        if step.op is Op.REDUCE:
            assert value is not None
            value = value + self._load(running, step.dst.buffer, step.dst.index + running.chunk)
        assert value is not None
        if step.op.writes_dst:
            self._save(running, step.dst.buffer, step.dst.index + running.chunk, value)
        if step.op.sends:
            key = running.outgoing
            self._fifo[key].append(_Message(value, running.clock.copy()))
            self._messages += 1
            self._wake(("message", key))

    def _received(self, running: Running) -> _Message:
        message = self._fifo[running.incoming].popleft()
        self._wake(("place", running.incoming))
        if self._rotation is None:
            return message
        ahead = running.block.recv
        clock = np.roll(message.clock, ahead * len(self._blocks))
        return _Message(self._rotation.value(message.value, ahead), clock)

    def _finish_step(self, running: Running) -> None:
        key = (*running.identity, running.step)
        if key in self._needed:
            self._finished[key] = running.clock.copy()
            self._wake(key)
        running.step += 1
        running.chunk = 0

    def _slot(self, rank: int, buffer: str, index: int) -> Slot:
        if self._contract is not None and buffer != Buffer.scratch:
            buffer, index = self._contract.alias(rank, buffer, index)
        elif self._inplace and buffer == Buffer.output:
            buffer = Buffer.input
        return rank, buffer, index

    def _check_overlap(self, running: Running, step: Step) -> None:
        """Check that a step of several chunks does not read, in another chunk, memory that it writes."""
        is_apart = step.src.buffer == step.dst.buffer or Buffer.scratch in (step.src.buffer, step.dst.buffer)
        if step.count == 1 or is_apart or not (step.op.reads_src and step.op.writes_dst):
            return
        rank = running.identity[0]
        src, dst = (
            {self._slot(rank, span.buffer, span.index + c): c for c in range(step.count)}
            for span in (step.src, step.dst)
        )
        if any(src[slot] != dst[slot] for slot in src.keys() & dst.keys()):
            raise broken(
                f"{self._place(running)}: {step.src} and {step.dst} are one memory {self._form} and overlap over "
                f"{step.count} chunks"
            )

    def _load(self, running: Running, buffer: str, index: int) -> Value:
        slot = self._slot(running.identity[0], buffer, index)
        if slot in self._written:
            self._check_order(running, self._written[slot], "writes it", f"reads {buffer}[{index}]")
        self._read.setdefault(slot, []).append(self._access(running))
        if slot not in self._values:
            place = self._place(running)
            raise VerificationError(
                "result", f"{place} reads {buffer}[{index}], which holds nothing ({self._form})"
            )
        return self._values[slot]

    def _save(self, running: Running, buffer: str, index: int, value: Value) -> None:
        slot = self._slot(running.identity[0], buffer, index)
        if slot in self._written:
            self._check_order(running, self._written[slot], "writes it", f"writes {buffer}[{index}]")
        for reader in self._read.pop(slot, ()):
            self._check_order(running, reader, "reads it", f"writes {buffer}[{index}]")
        self._written[slot] = self._access(running)
        self._values[slot] = value

    def _access(self, running: Running) -> Access:
        return self._number[running.identity], running.time, running.identity, running.step

    def _check_order(self, running: Running, earlier: Access, did: str, does: str) -> None:
        """Check that an access that came before in this run comes before in every run."""
        number, time, block, step = earlier
        if block != running.identity and running.clock[number] < time:
            place = self._algorithm.place(*block, step)
            raise _race(place, did, f"{self._place(running)} {does}")

    def _place(self, running: Running) -> str:
        return self._algorithm.place(*running.identity, running.step)

    def _story(self, first: Running) -> str:
        """Return the cycle of blocks that wait for each other."""
        seen: list[Running] = []
        at = first
        while at not in seen:
            seen.append(at)
            assert at.waits_on is not None
            at = self._blocks[at.waits_on]
            if at.step == len(at.block.steps):
                break
        circle = seen[seen.index(at) :] if at in seen else seen
        return "; ".join(f"{self._place(r)} waits for {r.waits_for}" for r in circle)

    def _check_result(self) -> None:
        if self._contract is None:
            return
        buffers: list[dict[str, list[Value | None]]] = []
        for program in self._algorithm.distinct:
            sizes = {
                Buffer.input: self._contract.input_chunks(program.rank),
                Buffer.output: self._contract.output_chunks(program.rank),
            }
            buffers.append(
                {b: [self._values.get((program.rank, b, c)) for c in range(n)] for b, n in sizes.items()}
            )
        problem = self._contract.problem(State(buffers))
        if problem is not None:
            rank, buffer, index, what = problem
            slot = self._slot(rank, buffer, index)
            last = "nobody"
            if slot in self._written:
                last = self._algorithm.place(*self._written[slot][2], self._written[slot][3])
            raise VerificationError(
                "result", f"{self._form}, rank {rank}: {buffer}[{index}] {what}; last written by {last}"
            )


def _race(first: str, did: str, second: str) -> VerificationError:
    return VerificationError("race", f"{second} while {first} {did}; nothing orders the two")


def _initial(algorithm: Algorithm, contract: Collective | None, inplace: bool) -> dict[Slot, Value]:
    values: dict[Slot, Value] = {}
    if contract is None:
        for program in algorithm.ranks:
            rank, inputs, outputs = program.rank, program.input_chunks, program.output_chunks
            inputs, outputs = (max(inputs, outputs), 0) if inplace else (inputs, outputs)
            values.update({(rank, Buffer.input, c): Chunk(rank, c) for c in range(inputs)})
            values.update({(rank, Buffer.output, c): Chunk(rank, -1 - c) for c in range(outputs)})
        return values
    start = contract.start().buffers if algorithm.rotation is None else [contract.start_of_first()]
    for rank, buffers in enumerate(start):
        for buffer, slots in buffers.items():
            values.update(
                {(rank, buffer, index): value for index, value in enumerate(slots) if value is not None}
            )
    return values
