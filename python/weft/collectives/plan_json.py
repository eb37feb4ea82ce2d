# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ JSON execution plans, in and out.

    algorithm = from_plan(text, "allreduce.json")              # Error: file, rank, block, operation, what is wrong
    algorithm = from_plan(text, "allreduce.json", reschedule=True)
    text = to_plan(algorithm)

A plan moves data with puts and gets and orders them with signals, waits, barriers, semaphores and packets. An
interpreter plays it: every block runs until it must wait. The play keeps vector clocks and the contents of every slot.
So it refuses, for every timing of the plan, a wait that never ends, two accesses that the plan's synchronisation does
not order, a packet that is written twice, and a wrong result. Relaxed signals order execution, not data. Threads of one
block are taken to be in order.

The compiled program has the plan's own operations, blocks and order: a put is a message of the block's own connection,
and a step waits for earlier steps of its rank that touched its slots. ``reschedule`` takes the data operations alone
and lets our compiler make blocks, channels and order anew.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np

from weft.collectives.compiler import compile_in_order
from weft.collectives.contract import Buffer, Collective, Slots, Stated, is_standard, standard
from weft.collectives.ir import MAX_CHANNELS, Algorithm
from weft.collectives.language import Program
from weft.collectives.memory import Place
from weft.collectives.plan_form import Operand, Plan, PlanOp, read_plan
from weft.collectives.program_lines import ProgramError
from weft.collectives.values import Chunk, Value
from weft.errors import Error

_EXECUTION, _DATA = 0, 1  # rows of a clock: what happened before, and what of it is visible


def from_plan(text: str, file: str = "plan.json", reschedule: bool = False) -> Algorithm:
    """Read a plan; return it verified. Raises: Error, VerificationError."""
    try:
        plan = read_plan(text, file)
    except RecursionError:
        raise Error(f"{file}: pipelines stand in pipelines too deeply") from None
    return _Play(plan, file).run(reschedule)


@dataclasses.dataclass
class _Access:
    block: int
    time: int
    place: str


@dataclasses.dataclass
class _Slot:
    """The last writer of a slot, and its readers since. ``packets``: times that packets were written there."""

    write: _Access | None = None
    reads: list[_Access] = dataclasses.field(default_factory=list)
    packets: int = 0
    clock: np.ndarray | None = None  # of the packets' writer


class _Play:
    def __init__(self, plan: Plan, file: str) -> None:
        self._plan, self._file = plan, file
        self._program = Program(
            *(plan.name, _contract(plan, file)),
            protocol=plan.protocol,
            min_bytes=plan.min_bytes,
            max_bytes=plan.max_bytes,
        )
        self._program.where = file
        self._blocks = plan.blocks
        self._clock = [np.zeros((2, len(plan.blocks)), np.int32) for _ in plan.blocks]
        self._slots: dict[tuple[int, str, int], _Slot] = defaultdict(_Slot)
        self._signals: dict[object, list[np.ndarray]] = defaultdict(list)
        self._ends: dict[object, int] = {}
        self._waited: dict[object, int] = defaultdict(int)
        self._semaphores: dict[tuple[int, int], list[np.ndarray]] = {
            key: [np.zeros((2, len(plan.blocks)), np.int32)] * count for key, count in plan.semaphores.items()
        }
        self._arrived: dict[tuple[int, int], dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
        self._hints: dict[object, int] = {}
        self._first_peer: dict[int, int] = {}
        self._channels: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    def run(self, reschedule: bool) -> Algorithm:
        at = [0] * len(self._blocks)
        moved = True
        while moved:
            moved = False
            for i, block in enumerate(self._blocks):
                while at[i] < len(block.ops) and self._step(i, block.ops[at[i]], at[i]):
                    at[i] += 1
                    moved = True
        for i, block in enumerate(self._blocks):
            if at[i] < len(block.ops):
                raise Error(f"{block.ops[at[i]].place}: deadlock: it waits for what never comes")
        self._check_result()
        algorithm = self._program.compile() if reschedule else compile_in_order(self._program)
        if isinstance(algorithm.contract, _Unknown):
            note = f"{self._file} says collective {self._plan.collective!r}, which is taken for a custom one"
            return dataclasses.replace(algorithm, contract=None, notes=[*algorithm.notes, note])
        return algorithm

    def _step(self, i: int, op: PlanOp, at: int) -> bool:
        """Run one operation; False when it must wait."""
        rank = self._blocks[i].rank
        if op.kind == "barrier":
            return self._barrier(i, op, at)
        if op.kind in ("acquire", "release"):
            return self._semaphore(i, op)
        if op.kind == "wait":
            return self._wait(i, op)
        if op.kind == "move" and not self._packets_are_there(op):
            return False
        if op.kind == "move":
            self._clock[i][:, i] += 1
            self._move(i, op)
        if op.kind == "signal" or op.signals:
            for kind, peer, number in op.ends:
                self._signal(i, (kind, rank, peer, number), op)
        return True

    # -- synchronisation ---------------------------------------------------------------------------------------

    def _join(self, i: int, clock: np.ndarray, is_strong: bool = True) -> None:
        """Let block i know what ``clock`` knew; of a relaxed wait, not what of it is visible."""
        rows = slice(None) if is_strong else slice(_EXECUTION, _DATA)
        np.maximum(self._clock[i][rows], clock[rows], out=self._clock[i][rows])

    def _barrier(self, i: int, op: PlanOp, at: int) -> bool:
        number, count = op.barrier
        arrived = self._arrived[self._blocks[i].rank, number]
        if (i, at) not in arrived:
            arrived[i, at] = self._clock[i].copy()
        turn = sum(1 for block, _ in arrived if block == i)
        if len(arrived) < turn * count:
            return False
        for clock in list(arrived.values())[: turn * count]:
            self._join(i, clock)
        return True

    def _semaphore(self, i: int, op: PlanOp) -> bool:
        keys = [(self._blocks[i].rank, number) for number in op.semaphores]
        held = [self._semaphores.setdefault(key, []) for key in keys]
        if op.kind == "release":
            for one in held:
                one.append(self._clock[i].copy())
            return True
        if not all(held):
            return False
        for one in held:
            self._join(i, np.minimum.reduce(one))  # any of them may be the one that lets it pass
            one.pop(0)
        return True

    def _one_user(self, key: object, i: int, op: PlanOp) -> None:
        if self._ends.setdefault(key, i) != i:
            other = self._blocks[self._ends[key]]
            raise Error(
                f"{op.place}: block {other.number} uses the same end of the channel; allowed: one block"
            )

    def _signal(self, i: int, key: tuple[str, int, int, int], op: PlanOp) -> None:
        self._one_user((*key, "signals"), i, op)
        clock = self._clock[i].copy()
        if not op.is_strong:
            clock[_DATA] = 0
        self._signals[key].append(clock)

    def _wait(self, i: int, op: PlanOp) -> bool:
        rank = self._blocks[i].rank
        keys = [(kind, peer, rank, number) for kind, peer, number in op.ends]
        if any(len(self._signals[key]) <= self._waited[key] for key in keys):
            return False
        for key in keys:
            self._one_user((*key, "waits"), i, op)
            self._join(i, self._signals[key][self._waited[key]], op.is_strong)
            self._waited[key] += 1
        return True

    # -- data --------------------------------------------------------------------------------------------------

    def _keys(self, operand: Operand, op: PlanOp) -> list[tuple[int, str, int]]:
        if operand.buffer not in (Buffer.input, Buffer.output):
            return [(operand.rank, operand.buffer, operand.index + c) for c in range(operand.size)]
        contract = self._program.collective
        is_input = operand.buffer == Buffer.input
        length = (contract.input_chunks if is_input else contract.output_chunks)(operand.rank)
        end = operand.index + operand.size
        if end > length:
            raise Error(
                f"{op.place}: {operand.buffer}[{operand.index}:{end}] of rank {operand.rank}: that buffer has {length} "
                f"chunks{self._cut_note()}"
            )
        own = (contract.alias(operand.rank, operand.buffer, operand.index + c) for c in range(operand.size))
        return [(operand.rank, *slot) for slot in own]

    def _cut_note(self) -> str:
        return f", each cut into {self._plan.cut} for its thread block groups" if self._plan.cut > 1 else ""

    def _packets_are_there(self, op: PlanOp) -> bool:
        return all(
            self._slots[key].packets for one in op.sources if one.is_packets for key in self._keys(one, op)
        )

    def _read(self, i: int, operand: Operand, op: PlanOp) -> None:
        for key in self._keys(operand, op):
            slot = self._slots[key]
            if operand.is_packets and slot.clock is not None:
                self._join(i, slot.clock)
            write = slot.write
            if write and self._clock[i][_DATA][write.block] < write.time:
                raise self._race(op, f"reads {_name(operand)}", f"{write.place} writes it")
            slot.reads.append(_Access(i, int(self._clock[i][_DATA][i]), op.place))

    def _write(self, i: int, operand: Operand, op: PlanOp) -> None:
        for key in self._keys(operand, op):
            slot = self._slots[key]
            for other, row, did in [
                *((read, _EXECUTION, "reads") for read in slot.reads),
                *([(slot.write, _DATA, "writes")] if slot.write else []),
            ]:
                if self._clock[i][row][other.block] < other.time:
                    raise self._race(op, f"writes {_name(operand)}", f"{other.place} {did} it")
            if operand.is_packets and slot.packets:
                raise Error(
                    f"{op.place}: writes packets twice into {_name(operand)}; a reader cannot tell them apart"
                )
            slot.packets = int(operand.is_packets)
            slot.clock = self._clock[i].copy() if operand.is_packets else None
            slot.write, slot.reads = _Access(i, int(self._clock[i][_DATA][i]), op.place), []

    def _race(self, op: PlanOp, what: str, other: str) -> Error:
        return Error(
            f"{op.place}: race: it {what} while {other.removeprefix(f'{self._file}: ')}; nothing orders the two"
        )

    def _move(self, i: int, op: PlanOp) -> None:
        for source in op.sources:
            self._read(i, source, op)
        for target in op.targets:
            self._write(i, target, op)
        sources, targets = op.sources, op.targets
        if op.reduces:
            self._reduce(i, op)
            sources, targets = [targets[0]], targets[1:]
        if len(sources) == 1:
            sources = sources * len(targets)
        for source, target in zip(sources, targets, strict=True):
            self._copy(i, source, target, op)

    def _reduce(self, i: int, op: PlanOp) -> None:
        rest, target = list(op.sources), op.targets[0]
        own = self._keys(target, op)
        same = next((at for at, source in enumerate(rest) if self._keys(source, op) == own), None)
        if same is None:
            self._copy(i, rest.pop(0), target, op)
        else:
            rest.pop(same)
        for source in rest:
            self._trace(i, source, target, op, reduces=True)

    def _copy(self, i: int, source: Operand, target: Operand, op: PlanOp) -> None:
        if self._keys(source, op) != self._keys(target, op):
            self._trace(i, source, target, op, reduces=False)

    def _trace(self, i: int, source: Operand, target: Operand, op: PlanOp, reduces: bool) -> None:
        """Add a copy or sum to the program, in the plan's own blocks."""
        program = self._program
        src, dst = self._ref(source, op), Place(target.rank, target.buffer, target.index)
        hints = self._places(i, source.rank, target.rank)
        program.place = op.place
        try:
            if reduces:
                self._ref(target, op).reduce(src, *hints)
            else:
                src.copy(dst.rank, dst.buffer, dst.index, *hints)
        except ProgramError as error:
            raise Error(f"{op.place}: {str(error).partition(': ')[2]}") from None

    def _ref(self, operand: Operand, op: PlanOp) -> Any:
        ref = self._program.chunk(operand.rank, operand.buffer, operand.index, operand.size)
        if ref is None:
            raise Error(f"{op.place}: {_name(operand)} holds nothing yet")
        return ref

    def _places(self, i: int, source: int, target: int) -> tuple[int, int, int]:
        """Return (sendtb, recvtb, channel) of what block i moves: its own connection, while there are some.

        A block of ours sends to one peer, so puts of a plan's block to other peers go from further blocks. All blocks
        take their steps in the order of the play. The play ended, so this order cannot deadlock.
        """
        own = self._hint((source, "own", i))
        if source == target:
            return own, own, -1
        known = self._channels[source, target]
        channel = known.setdefault(i, len(known) % MAX_CHANNELS)
        is_putting = self._blocks[i].rank == source and self._first_peer.setdefault(i, target) == target
        sender = self._hints.setdefault(
            (source, "to", target, channel), own if is_putting else len(self._hints)
        )
        return sender, self._hint((target, "from", source, channel)), channel

    def _hint(self, key: object) -> int:
        return self._hints.setdefault(key, len(self._hints))

    def _check_result(self) -> None:
        program = self._program
        problem = program.collective.problem(program.state())
        if problem is None:
            return self._check_ends()
        rank, buffer, index, what = problem
        slot = self._slots[(rank, *program.collective.alias(rank, buffer, index))]
        last = slot.write.place.removeprefix(f"{self._file}: ") if slot.write else "nobody"
        raise Error(
            f"{self._file}: the plan does not do {program.collective!r}: rank {rank} {buffer}[{index}] {what}; last "
            f"written by {last}"
        )

    def _check_ends(self) -> None:
        """Check that no rank ends before others have written all of its result."""
        contract = self._program.collective
        for rank in range(self._plan.ranks):
            clocks = [self._clock[i][_DATA] for i, block in enumerate(self._blocks) if block.rank == rank]
            known = np.maximum.reduce([np.zeros(len(self._blocks), np.int32), *clocks])
            for index in range(contract.output_chunks(rank)):
                write = self._slots[(rank, *contract.alias(rank, Buffer.output, index))].write
                if write and known[write.block] < write.time:
                    raise Error(
                        f"{write.place}: race: rank {rank} may end before its o[{index}] is written; nothing tells it"
                    )


def _name(operand: Operand) -> str:
    return f"{operand.buffer}[{operand.index}:{operand.index + operand.size}] of rank {operand.rank}"


def _contract(plan: Plan, file: str) -> Collective:
    """Return what the plan promises. MSCCL++ counts a rank's chunks, of an in-place all_gather those of the output."""
    if plan.contract is not None:
        return _stated(plan, file)
    taken, given = plan.chunks
    name = {"all_gather": "allgather", "all_reduce": "allreduce"}.get(plan.collective, plan.collective)
    if not is_standard(name):
        return _unknown(plan)
    if not plan.inplace and not (taken and given):
        raise Error(f"{file}: got {taken} chunks of input and {given} of output, allowed: 1 or more of each")
    chunks = taken or given
    if name == "allgather":
        never_folds = given == taken or not taken
        chunks = (
            (given or taken) if never_folds and max(given, taken) % plan.ranks == 0 else taken * plan.ranks
        )
    contract = standard(name, plan.ranks, chunks, plan.inplace)
    assert contract is not None
    return contract


class _Unknown(Stated):
    """The contract of a collective that nobody knows: the inputs hold chunks, and outputs may hold anything."""


def _unknown(plan: Plan) -> Collective:
    taken, given = plan.chunks
    before = [[Chunk(rank, c) for c in range(taken)] for rank in range(plan.ranks)]
    after: list[Slots] = [[None] * given for _ in range(plan.ranks)]
    return _Unknown(max(plan.chunks), [list[Value | None](own) for own in before], after, plan.inplace)


def _stated(plan: Plan, file: str) -> Collective:
    """Return a custom contract that to_plan() wrote."""

    def value(parts: Any) -> Value | None:
        return Value(tuple((int(rank), int(chunk)) for rank, chunk in parts)) if parts else None

    try:
        before, after = (
            [[value(v) for v in own] for own in plan.contract[key]] for key in ("before", "after")
        )
        same = {(int(r), str(b), int(at)): (str(to), int(i)) for r, b, at, to, i in plan.contract["same"]}
        chunks = int(plan.contract["chunks"])
    except (KeyError, TypeError, ValueError) as error:
        raise Error(f"{file}: weft_contract: {type(error).__name__}: {error}") from None
    if len(before) != plan.ranks or len(after) != plan.ranks:
        raise Error(f"{file}: weft_contract: got {len(before)} ranks, allowed: {plan.ranks}")
    return Stated(chunks, before, after, plan.inplace, same).scaled(plan.cut)
