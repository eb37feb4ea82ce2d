# SPDX-License-Identifier: Apache-2.0
"""The verifier: proves an Algorithm, or says in words how it goes wrong.

    verify(algorithm)                 # a Report; VerificationError with .kind and a counterexample otherwise

It checks the structure, then interprets the lowered steps with finite connections and follows, for every slot, its
symbolic contents and who accessed it. Kinds: "structure" (peers, bounds, dependencies, sends without receives), "race"
(two accesses to a slot, one a write, that nothing orders), "deadlock", "result" (an empty slot is read, or the contract
is broken).

One pass over the steps stands for all slices: slices touch disjoint parts of every chunk, connections are empty after
each, and a blocking execution that can finish finishes under every timing. Groups of one chunk are the worst case: any
larger group sends fewer messages through the same connections and orders more. A program that only hangs with groups
of few chunks passes, and ``Report.limit`` says up to which size it runs (weft.collectives.flow).

In place, input and output are one memory everywhere: as the contract's alias() says, chunk by chunk without one.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from weft.collectives.contract import Buffer, Collective, Slots, State
from weft.collectives.flow import SizeLimit, size_limit
from weft.collectives.ir import (
    MAX_BLOCKS,
    MAX_CHANNELS,
    MAX_COUNT,
    RING_SLOTS,
    Algorithm,
    Block,
    Connection,
    Op,
    Step,
)
from weft.collectives.values import Chunk, Value
from weft.errors import Error

BlockId = tuple[int, int]  # rank, block number
Slot = tuple[int, str, int]
Access = tuple[
    int, int, BlockId, int
]  # who touched a slot: number of the block, its time; the block, its step


class VerificationError(Error):
    """The algorithm is wrong. ``kind`` is structure, race, deadlock or result; the message is the counterexample."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Report:
    """What was proven. ``result_checked`` is False when the collective is unknown (coll="custom" of a file).

    ``limit``: up to which size it was proven not to hang; None for every size.
    """

    steps: int
    messages: int
    forms: tuple[str, ...]
    result_checked: bool
    warnings: tuple[str, ...]
    limit: SizeLimit | None = None

    @property
    def proven(self) -> str:
        """Say what was proven, and what was not."""
        if self.result_checked:
            return "result, races and deadlock"
        alike = "; both forms give the same" if len(self.forms) > 1 else ""
        return f"races and deadlock{alike}; not proven: what it computes, as it has no contract"


def verify(algorithm: Algorithm, slots: int = RING_SLOTS) -> Report:
    """Check structure, races, deadlock and results, in every form that it claims. Raises: VerificationError.

    ``slots``: messages that a connection holds before the receiver takes one; the executor's rings hold RING_SLOTS.
    """
    connections = check_structure(algorithm)
    warnings = _size_warnings(algorithm)
    forms = [
        name
        for name, claimed in (("in place", algorithm.inplace), ("out of place", algorithm.outofplace))
        if claimed
    ]
    if not forms:
        raise VerificationError(
            "structure", f"{algorithm.name} serves neither in-place nor out-of-place calls"
        )
    limit = _limit(algorithm, connections, slots)
    found = [Interpreter(algorithm, form, connections) for form in algorithm.forms()]
    messages = [interpreter.run() for interpreter in found]
    if algorithm.contract is None and len(found) == 2:
        _check_forms_agree(algorithm, *found)
    alike = algorithm.num_ranks // len(algorithm.distinct)
    steps = sum(len(block.steps) for *_, block in algorithm.distinct_blocks()) * alike
    if limit is not None:
        warnings.append(limit.says)
    return Report(
        *(steps, messages[-1] * alike, tuple(forms), algorithm.contract is not None, tuple(warnings)),
        limit=limit,
    )


def _limit(
    algorithm: Algorithm, connections: dict[Connection, tuple[BlockId, BlockId]], slots: int
) -> SizeLimit | None:
    """Return up to which size connections of ``slots`` messages suffice. Raises: VerificationError where for none."""
    limit = size_limit(algorithm, slots)
    is_any_left = limit is None or algorithm.min_bytes <= limit.most_bytes
    if is_any_left:
        return limit
    story = Interpreter(algorithm, algorithm.forms()[0], connections, slots).hang()
    assert limit is not None
    raise VerificationError("deadlock", story if limit.group == 0 else f"{story}; {limit.says}")


def _check_forms_agree(algorithm: Algorithm, inplace: Interpreter, apart: Interpreter) -> None:
    """Check that a program without a contract computes in place what it computes out of place."""
    for program in algorithm.ranks:
        for index in range(program.output_chunks):
            together, alone = (each.output(program.rank, index) for each in (inplace, apart))
            if alone is not None and together != alone:
                raise VerificationError(
                    "result",
                    f"rank {program.rank}: o[{index}] gets {together!r} in place and {alone!r} out of place, "
                    "and the program claims both forms",
                )


def check_structure(algorithm: Algorithm) -> dict[Connection, tuple[BlockId, BlockId]]:
    """Check peers, bounds and dependencies; return the (sending, receiving) block of every connection used.

    Of ranks that are alike it checks and names rank 0's, by its names for the connections.

    Raises: VerificationError of kind structure.
    """
    alike = algorithm.num_ranks // len(algorithm.distinct)
    blocks = sum(len(program.blocks) for program in algorithm.distinct) * alike
    if blocks > MAX_BLOCKS:
        raise _broken(f"{blocks} blocks on {algorithm.num_ranks} ranks, allowed: up to {MAX_BLOCKS}")
    for rank, number, block in algorithm.distinct_blocks():
        _check_block(algorithm, rank, number, block)
        for at, step in enumerate(block.steps):
            _check_step(algorithm, rank, number, at, step)
    senders, receivers = _ends(algorithm)
    for key in sorted(senders.keys() | receivers.keys()):
        _check_connection(algorithm, key, senders.get(key), receivers.get(key))
    return {key: (senders[key], receivers[key]) for key in senders}


def _broken(message: str) -> VerificationError:
    return VerificationError("structure", message)


def _check_block(algorithm: Algorithm, rank: int, number: int, block: Block) -> None:
    where = f"rank {rank}, block {number}"
    for role, peer in (("send", block.send), ("receive", block.recv)):
        if peer == rank:
            raise _broken(f"{where}: its {role} peer is itself")
        if not -1 <= peer < algorithm.num_ranks:
            raise _broken(f"{where}: {role} peer {peer} is not one of the {algorithm.num_ranks} ranks")
    if not 0 <= block.channel < MAX_CHANNELS:
        raise _broken(f"{where}: channel {block.channel}, allowed: 0 to {MAX_CHANNELS - 1}")


def _check_step(algorithm: Algorithm, rank: int, number: int, at: int, step: Step) -> None:
    program = algorithm.distinct[rank]
    block = program.blocks[number]
    where = algorithm.place(rank, number, at)
    if step.op.sends and block.send < 0:
        raise _broken(f"{where}: its block has no send peer")
    if step.op.receives and block.recv < 0:
        raise _broken(f"{where}: its block has no receive peer")
    if not 1 <= step.count <= MAX_COUNT:
        raise _broken(f"{where}: cnt {step.count}, allowed: 1 to {MAX_COUNT}")
    length = {
        Buffer.input: program.input_chunks,
        Buffer.output: program.output_chunks,
        Buffer.scratch: program.scratch_chunks,
    }
    used = ([step.src] if step.op.reads_src else []) + ([step.dst] if step.op.writes_dst else [])
    for span in used:
        end = span.index + step.count
        if span.buffer not in length:
            raise _broken(f"{where}: buffer {span.buffer!r}, allowed: i, o, s")
        size = _usable(algorithm, rank, span.buffer, length[span.buffer])
        if span.index < 0 or end > size:
            raise _broken(f"{where}: {span.buffer}[{span.index}:{end}], but that buffer has {size} chunks")
        turning = algorithm.turning
        if turning is not None and not turning.keeps_together(span.buffer, span.index, step.count):
            raise _broken(f"{where}: {span.buffer}[{span.index}:{end}] are no neighbours on some rank")
    if len(used) == 2 and step.src.buffer == step.dst.buffer and step.src != step.dst:
        overlaps = abs(step.src.index - step.dst.index) < step.count
        if overlaps:
            raise _broken(f"{where}: {step.src} and {step.dst} overlap over {step.count} chunks")
    for dep_block, dep_step in step.depends:
        exists = 0 <= dep_block < len(program.blocks) and 0 <= dep_step < len(program.blocks[dep_block].steps)
        if not exists:
            raise _broken(f"{where}: waits for step {dep_step} of block {dep_block}, which does not exist")
        if dep_block == number:
            raise _broken(f"{where}: waits for a step of its own block")


def _usable(algorithm: Algorithm, rank: int, buffer: str, declared: int) -> int:
    """Return the chunks a step may touch: what the contract gives where the program declares none (in-place forms)."""
    if declared or buffer == Buffer.scratch or algorithm.contract is None:
        return declared
    contract = algorithm.contract
    return contract.input_chunks(rank) if buffer == Buffer.input else contract.output_chunks(rank)


def _ends(algorithm: Algorithm) -> tuple[dict[Connection, BlockId], dict[Connection, BlockId]]:
    senders: dict[Connection, BlockId] = {}
    receivers: dict[Connection, BlockId] = {}
    for rank, number, block in algorithm.distinct_blocks():
        if any(step.op.sends for step in block.steps):
            _claim(senders, algorithm.outgoing(rank, block), (rank, number), "send on")
        if any(step.op.receives for step in block.steps):
            _claim(receivers, algorithm.incoming(rank, block), (rank, number), "receive from")
    return senders, receivers


def _claim(ends: dict[Connection, BlockId], key: Connection, block: BlockId, verb: str) -> None:
    if key in ends:
        src, dst, channel = key
        raise _broken(
            f"rank {block[0]}: blocks {ends[key][1]} and {block[1]} both {verb} the connection from rank {src} to rank "
            f"{dst}, channel {channel}"
        )
    ends[key] = block


def _check_connection(
    algorithm: Algorithm, key: Connection, sender: BlockId | None, receiver: BlockId | None
) -> None:
    src, dst, channel = key
    name = f"connection from rank {src} to rank {dst}, channel {channel}"
    if sender is None:
        assert receiver is not None
        at = next(i for i, s in enumerate(_block(algorithm, receiver).steps) if s.op.receives)
        raise _broken(f"{name}: {algorithm.place(*receiver, at)} receives, but rank {src} never sends there")
    if receiver is None:
        at = next(i for i, s in enumerate(_block(algorithm, sender).steps) if s.op.sends)
        raise _broken(f"{name}: {algorithm.place(*sender, at)} sends, but rank {dst} never receives there")
    sends = [(i, s) for i, s in enumerate(_block(algorithm, sender).steps) if s.op.sends]
    recvs = [(i, s) for i, s in enumerate(_block(algorithm, receiver).steps) if s.op.receives]
    for (i, send), (j, recv) in zip(sends, recvs, strict=False):
        if send.count != recv.count:
            raise _broken(
                f"{name}: {algorithm.place(*sender, i)} sends {send.count} chunks, its receive "
                f"{algorithm.place(*receiver, j)} takes {recv.count}"
            )
    if len(sends) != len(recvs):
        raise _broken(f"{name}: {len(sends)} sends, {len(recvs)} receives")


def _block(algorithm: Algorithm, block: BlockId) -> Block:
    return algorithm.distinct[block[0]].blocks[block[1]]


def _size_warnings(algorithm: Algorithm) -> list[str]:
    contract = algorithm.contract
    if contract is None:
        return []
    out = []
    for program in algorithm.distinct:
        rank = program.rank
        sizes = (
            ("i", program.input_chunks, contract.input_chunks),
            ("o", program.output_chunks, contract.output_chunks),
        )
        for name, declared, wanted in sizes:
            if declared and declared != wanted(rank):
                out.append(
                    f"rank {rank}: {name}_chunks is {declared}, {algorithm.collective} has {wanted(rank)}"
                )
    return out


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
    what rank 0 sent, turned, and a clock has the blocks of all ranks, each named by its distance from rank 0. If no
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
        self._turning = algorithm.turning
        identities = [(rank, number) for rank, number, _ in algorithm.distinct_blocks()]
        self._number = {identity: i for i, identity in enumerate(identities)}
        zero = np.zeros(len(identities) * (algorithm.num_ranks if self._turning else 1), np.int32)
        self._blocks = {i: self._running(i, zero.copy()) for i in identities}
        self._needed = algorithm.needed_steps()
        self._finished: dict[tuple[int, int, int], np.ndarray] = {}
        self._waiting: dict[object, list[BlockId]] = {}
        self._ready: deque[BlockId] = deque(identities)
        self._messages = 0

    def _running(self, identity: BlockId, clock: np.ndarray) -> Running:
        block, rank = _block(self._algorithm, identity), identity[0]
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
        """Run until nothing moves; return who waits for whom then, "" where all is done. Raises: VerificationError."""
        while self._ready:
            running = self._blocks[self._ready.popleft()]
            while self._advance(running):
                pass
        stuck = [running for running in self._blocks.values() if running.step < len(running.block.steps)]
        return self._story(stuck[0]) if stuck else ""

    def output(self, rank: int, index: int) -> Value | None:
        """Return what chunk ``index`` of a rank's output got; None where nobody wrote it."""
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
        if self._turning is None:
            return message
        ahead = running.block.recv
        clock = np.roll(message.clock, ahead * len(self._blocks))
        return _Message(self._turning.value(message.value, ahead), clock)

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
            raise _broken(
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
        """Follow who waits for whom until it closes, and tell that circle."""
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


def promised(algorithm: Algorithm, contract: Collective) -> list[Slots]:
    """Return what every output must hold: what after() says or, where there is check() alone, what is computed."""
    ranks = range(algorithm.num_ranks)
    if type(contract).after is not Collective.after:
        return [contract.after(rank) for rank in ranks]
    algorithm = algorithm.unturned()
    interpreter = Interpreter(algorithm, algorithm.forms()[0], check_structure(algorithm))
    interpreter.run()
    return [[interpreter.output(r, c) for c in range(contract.output_chunks(r))] for r in ranks]


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
    start = contract.start().buffers if algorithm.turning is None else [contract.start_of_first()]
    for rank, buffers in enumerate(start):
        for buffer, slots in buffers.items():
            values.update(
                {(rank, buffer, index): value for index, value in enumerate(slots) if value is not None}
            )
    return values
