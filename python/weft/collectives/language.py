# SPDX-License-Identifier: Apache-2.0
"""The language: an algorithm is Python code that copies and reduces chunks between ranks.

    with Program("ring", AllGather(4)) as ring:
        for rank in range(4):
            c = chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank)
            for step in range(1, 4):
                c = c.copy((rank + step) % 4)

The meaning is program order, as if every operation ran when it is written; the compiler finds what may run at the same
time. References are versioned: one whose slots were overwritten is an error, at the user's line. MSCCL's names
(``MSCCLProgram``, ``Check``) work as they do there; a script that imports msccl finds print_xml() as ``XML``.
Threads: one program at a time per thread.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

from weft.collectives.contract import Buffer, Collective, State
from weft.collectives.ir import MAX_BLOCKS, MAX_CHANNELS, PROTOCOLS, Algorithm
from weft.collectives.memory import Memory, Place
from weft.collectives.program_lines import ProgramError, _error, place_of, user_line
from weft.collectives.rotation import Area, Rotation, rotation_of
from weft.collectives.topology import Topology
from weft.collectives.values import Value

_MAX_OPERATIONS = 1 << 20  # of a program: far more than can be verified
_local = threading.local()


class Operation(NamedTuple):
    """One traced operation: dst = src, or dst = dst + src, over ``size`` chunks. -1: the compiler chooses."""

    reduces: bool
    src: Place
    dst: Place
    size: int
    sendtb: int
    recvtb: int
    channel: int
    where: str


class Ref:
    """A reference to ``size`` chunks, valid until one of its slots is overwritten."""

    def __init__(self, program: Program, place: Place, size: int) -> None:
        self._program = program
        self._place = place
        self._versions = program._memory.versions(place, size)
        self.rank, self.buffer, self.index, self.size = place.rank, place.buffer, place.index, size

    def __repr__(self) -> str:
        return f"rank {self.rank} {self.buffer}[{self.index}:{self.index + self.size}]"

    def copy(
        self,
        dst: int,
        buffer: str | None = None,
        index: int = -1,
        sendtb: int = -1,
        recvtb: int = -1,
        ch: int = -1,
    ) -> Ref:
        """Copy these chunks to ``buffer[index]`` of rank ``dst`` and return the new reference.

        Defaults: the same buffer and index; at the end of the buffer if it is scratch and another one than ours.
        """
        return self._program._copy(self, dst, buffer, index, (sendtb, recvtb, ch))

    def reduce(self, other: Ref, sendtb: int = -1, recvtb: int = -1, ch: int = -1) -> Ref:
        """Add ``other``, of any rank, to these chunks and return the reference to the result."""
        return self._program._reduce(self, other, (sendtb, recvtb, ch))

    def split(self, parts: int) -> list[Ref]:
        """Return ``parts`` references to equal shares of these chunks."""
        self._program._fresh(self)
        if parts < 1 or self.size % parts:
            raise _error(f"split: {self!r} has {self.size} chunks, which do not divide into {parts} parts")
        size = self.size // parts
        place = self._place
        return [
            Ref(self._program, Place(place.rank, place.buffer, place.index + i * size), size)
            for i in range(parts)
        ]

    def group(self, other: Ref) -> Ref:
        """Return a reference to the span that covers both."""
        if (self.rank, self.buffer) != (other.rank, other.buffer):
            raise _error(f"group: {self!r} and {other!r} are not in one buffer of one rank")
        self._program._fresh(self)
        self._program._fresh(other)
        first = min(self.index, other.index)
        end = max(self.index + self.size, other.index + other.size)
        place = Place(self.rank, self.buffer, first)
        self._program._contents(place, end - first)
        return Ref(self._program, place, end - first)

    def get_origin_rank(self, index: int = 0) -> int:
        """Return the rank that chunk ``index`` of the reference came from (of a sum: the lowest)."""
        return self._value(index).parts[0][0]

    def get_origin_index(self, index: int = 0) -> int:
        """Return the index that chunk ``index`` of the reference had where it came from."""
        return self._value(index).parts[0][1]

    def get_dst_rank(self, index: int = 0) -> int:
        """Return the rank that the chunk is meant for; -1 if it was made without one."""
        return int(getattr(self._value(index), "dst_rank", -1))

    def get_dst_index(self, index: int = 0) -> int:
        """Return the index that the chunk is meant for; -1 if it was made without one."""
        return int(getattr(self._value(index), "dst_index", -1))

    def _value(self, index: int) -> Value:
        self._program._fresh(self)
        return self._program._contents(self._place, self.size)[index]


class Program:
    """A program being written; a context manager that chunk(), print_xml() and Check() refer to.

    Args:
        name: what the algorithm is called.
        collective: the contract that it implements.
        topology: which links exist; None joins all ranks.
        instances: replicas that share every chunk between them, each with its own blocks and channels.
        protocol: "Simple", "LL" or "LL128".
        fuse: let the compiler merge a receive with the send that follows.
        interleaved: how instances share chunks; None chooses by the collective.
        min_bytes, max_bytes: sizes that it is meant for, inclusive, of the whole algorithm buffer.
    """

    def __init__(
        self,
        name: str,
        collective: Collective,
        topology: Topology | None = None,
        instances: int = 1,
        protocol: str = "Simple",
        fuse: bool = True,
        interleaved: bool | None = None,
        dependence_nop: bool = False,
        min_bytes: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise _error(f"protocol: got {protocol!r}, allowed: {', '.join(PROTOCOLS)}")
        if instances < 1:
            raise _error(f"instances: got {instances}, allowed: 1 or more")
        if collective.num_ranks > MAX_BLOCKS:  # before start() lays out all ranks' buffers
            raise _error(f"ranks: got {collective.num_ranks}, allowed: up to {MAX_BLOCKS}, one block on each")
        if topology is not None and topology.ranks != collective.num_ranks:
            raise _error(f"topology: has {topology.ranks} ranks, the collective has {collective.num_ranks}")
        self.name = name
        self.collective = collective
        self.topology = topology
        self.instances = instances
        self.protocol = protocol
        self.fuse = fuse
        self.interleaved = interleaved
        self.dependence_nop = dependence_nop
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.num_ranks = collective.num_ranks
        self.where = user_line()
        self.operations: list[Operation] = []
        self.rotation: Rotation | None = None  # of a program written with rotations()
        self._is_rotating = False
        if rotation_of(collective) is None:
            _ = self._memory  # what the user's contract says is wrong is told now
        self._connections: set[tuple[int, int]] = set()
        self._follows_msccl = False
        self.notes: list[str] = []
        self.place = ""  # of what is being read, where that is not the caller's line
        self._outer: Program | None = None
        self._last_empty = ""

    def __repr__(self) -> str:
        return f"Program({self.name!r}: {self.collective!r}, {len(self.operations)} operations)"

    @functools.cached_property
    def _memory(self) -> Memory:
        return Memory(self.collective, self.rotation)

    @property
    def buffers(self) -> list[dict[str, list[Value | None]]]:
        """The contents of every slot now, by rank; with rotations() those of rank 0, which stands for all."""
        return self._memory.buffers

    def __enter__(self) -> Program:
        self._outer = getattr(_local, "program", None)
        _local.program = self
        for listener in getattr(_local, "listeners", []):
            listener.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _local.program = self._outer
        if isinstance(error, AttributeError) and error.obj is None and self._last_empty:
            place = place_of(trace) or self.where
            raise ProgramError(f"{place}: no chunk to {error.name}: {self._last_empty}") from error

    def rotations(self) -> Iterator[int]:
        """What rotations() of this module does."""
        if self.rotation is None:
            if self.operations:
                raise _error("rotations: there are operations of single ranks, allowed: all inside or none")
            self.rotation = rotation_of(self.collective)
            if self.rotation is None:
                raise _error(f"rotations: no rotation is known of {self.collective!r}")
            self.__dict__.pop("_memory", None)
        self._is_rotating = True
        try:
            yield 0
        finally:
            self._is_rotating = False

    def create_scratch(self, rank: int, name: str, per_rank: int = 0) -> None:
        """What create_scratch() of this module does."""
        if per_rank:
            if not self._is_rotating or self.rotation is None or self._memory.length(0, name):
                raise _error(f"per_rank of {name}: allowed: inside of rotations(), before it is written")
            size = self.num_ranks * per_rank
            self.rotation.areas[name] = [Area(0, size, per_rank)]
            self._memory.buffers[0][name] = [None] * size
        self.buffers[0 if self.rotation else rank].setdefault(name, [])

    def chunk(self, rank: int, buffer: str, index: int, size: int = 1) -> Ref | None:
        """Return a reference to ``size`` chunks of ``buffer``; None if one of the slots is empty."""
        place = self._place(rank, buffer, index, size)
        slots = self._memory.read(place, size)
        if len(slots) < size or None in slots:
            slot = f"chunk({rank}, {buffer!r}, {index}" + (f", {size})" if size > 1 else ")")
            self._last_empty = f"{slot} of {user_line()} is None, since nothing was written there yet"
            return None
        return Ref(self, place, size)

    def compile(self) -> Algorithm:
        """Compile and verify. Raises: ProgramError, VerificationError."""
        from weft.collectives.compiler import compile_program

        return compile_program(self)

    def scratch_sizes(self, rank: int) -> dict[str, int]:
        """Return the chunks of each scratch buffer of ``rank``, in the order in which they were first written."""
        own = (Buffer.input, Buffer.output)
        held = self.buffers[0 if self.rotation else rank]
        return {name: len(slots) for name, slots in held.items() if name not in own}

    def _place(self, rank: int, buffer: str, index: int, size: int) -> Place:
        if self.rotation is not None and not self._is_rotating:
            raise _error("outside of rotations(), where this program is written; allowed: all inside or none")
        if not 0 <= rank < self.num_ranks:
            raise _error(f"rank {rank} is not one of the {self.num_ranks} ranks")
        if size < 1:
            raise _error(f"size: got {size}, allowed: 1 or more")
        if buffer in (Buffer.input, Buffer.output):
            kind = "input" if buffer == Buffer.input else "output"
            length = self._memory.length(rank, buffer)
            if index < 0 or index + size > length:
                raise _error(
                    f"{kind}[{index}:{index + size}] of rank {rank}: that buffer has {length} chunks"
                )
            buffer, index = self.collective.get_buffer_index(rank, buffer, index)
        elif index < 0:
            raise _error(f"{buffer}[{index}] of rank {rank}: an index is 0 or more")
        return Place(rank, buffer, index)

    def _copy(self, ref: Ref, dst: int, buffer: str | None, index: int, hints: tuple[int, int, int]) -> Ref:
        self._fresh(ref)
        if buffer is None:
            buffer = ref.buffer
            index = ref.index if index == -1 else index
        if index == -1:
            is_user = buffer in (Buffer.input, Buffer.output)
            in_range = 0 <= dst < self.num_ranks
            index = ref.index if is_user or not in_range else self._memory.length(dst, buffer)
        place = self._target(ref, dst, buffer, index)
        if place == ref._place:
            return ref
        self._record(False, ref._place, place, ref.size, hints)
        self._memory.write(place, list(self._contents(ref._place, ref.size)))
        return Ref(self, place, ref.size)

    def _target(self, ref: Ref, dst: int, buffer: str, index: int) -> Place:
        if self._follows_msccl and 0 <= dst < self.num_ranks:
            # MSCCL takes an in-place index of the receiver for one of the sender's.
            buffer, index = self.collective.get_buffer_index(ref.rank, buffer, index)
            is_moved = buffer not in (Buffer.input, Buffer.output)
            if not is_moved and 0 <= index <= self._memory.length(dst, buffer) - ref.size:
                return Place(dst, buffer, index)
        return self._place(dst, buffer, index, ref.size)

    def _reduce(self, ref: Ref, other: Ref, hints: tuple[int, int, int]) -> Ref:
        self._fresh(ref)
        if not isinstance(other, Ref):
            empty = f": {self._last_empty}" if other is None and self._last_empty else ""
            raise _error(f"reduce: got {other!r}, allowed: what chunk() or copy() returned{empty}")
        self._fresh(other)
        if ref.size != other.size:
            raise _error(f"reduce: {ref!r} and {other!r} have different sizes")
        values = [
            mine + theirs
            for mine, theirs in zip(
                self._contents(ref._place, ref.size), self._contents(other._place, ref.size), strict=True
            )
        ]
        self._record(True, other._place, ref._place, ref.size, hints)
        self._memory.write(ref._place, values)
        return Ref(self, ref._place, ref.size)

    def _record(self, reduces: bool, src: Place, dst: Place, size: int, hints: tuple[int, int, int]) -> None:
        where = self.place or user_line()
        overlap = abs(src.index - dst.index) < size and (src.rank, src.buffer) == (dst.rank, dst.buffer)
        if overlap:
            raise _error(
                f"source and destination overlap: {src.buffer}[{src.index}], {dst.buffer}[{dst.index}]"
            )
        if self.rotation is not None:
            self._check_rotation(self.rotation, src, dst, size)
        if self.topology is not None:
            for by in range(self.num_ranks if self.rotation else 1):
                self._check_link(
                    self.topology, (src.rank + by) % self.num_ranks, (dst.rank + by) % self.num_ranks
                )
        if hints[2] >= MAX_CHANNELS:
            raise _error(f"ch: got {hints[2]}, allowed: 0 to {MAX_CHANNELS - 1}")
        if src.rank != dst.rank:
            self._connect(src.rank, dst.rank)
        if len(self.operations) == _MAX_OPERATIONS:
            raise _error(f"the program has more than {_MAX_OPERATIONS} operations")
        self.operations.append(Operation(reduces, src, dst, size, *hints, where))

    def _check_rotation(self, rotation: Rotation, src: Place, dst: Place, size: int) -> None:
        """Check that all ranks can do this at the same time, each with its own chunks."""
        for place in (src, dst):
            if not rotation.keeps_together(place.buffer, place.index, size):
                slots = f"{place.buffer}[{place.index}:{place.index + size}]"
                raise _error(f"rotations: {slots} belong to several ranks; allowed: chunks of one at a time")
        mine, theirs = self._memory.own(src), self._memory.own(dst)
        if mine.buffer == theirs.buffer and abs(mine.index - theirs.index) < size:
            raise _error(
                f"rotations: every rank would overwrite {src.buffer}[{src.index}] while another one reads it"
            )

    def _check_link(self, topology: Topology, src: int, dst: int) -> None:
        if src != dst and not topology.link(src, dst):
            raise _error(f"no link from rank {src} to rank {dst} in topology {topology.name}")

    def _connect(self, src: int, dst: int) -> None:
        """Count the sender's block that every connection needs, as verify() would after minutes of compiling."""
        self._connections.add((src, dst) if self.rotation is None else (0, (dst - src) % self.num_ranks))
        most = MAX_BLOCKS // self.instances // (1 if self.rotation is None else self.num_ranks)
        if len(self._connections) > most:
            each = f", each in {self.instances} instances" if self.instances > 1 else ""
            raise _error(
                f"connections: got more than {most} of a sender and a receiver{each}, "
                f"allowed: {MAX_BLOCKS} blocks of all {self.num_ranks} ranks, and each takes one"
            )

    def _contents(self, place: Place, size: int) -> list[Value]:
        found = self._memory.read(place, size)
        if len(found) < size or None in found:
            raise _error(
                f"rank {place.rank} {place.buffer}[{place.index}:{place.index + size}] has an empty slot"
            )
        return [value for value in found if value is not None]

    def _fresh(self, ref: Ref) -> None:
        if ref._program is not self:
            raise _error(f"{ref!r} belongs to program {ref._program.name!r}, not to {self.name!r}")
        if not self._follows_msccl and ref._versions != self._memory.versions(ref._place, ref.size):
            raise _error(f"{ref!r} is stale: it was overwritten since this reference was made")

    def state(self) -> State:
        """Return what every slot holds after the program."""
        return State(self.buffers)


def chunk(rank: int, buffer: str, index: int, size: int = 1) -> Any:
    """Return a reference into the current program; None if one of the slots is empty."""
    return _current().chunk(rank, buffer, index, size)


def rotations() -> Iterator[int]:
    """Say once what all ranks do: ``for rank in rotations():`` runs its body once, for rank 0.

    Every operation in it is done by all ranks at the same time, rank r's with all ranks moved on by r and all chunks by
    r ranks' parts. A program has all its operations in rotations(), or none, and compiles in the time of one rank.

    Raises: ProgramError where the contract's ranks are not alike (weft.collectives.rotation), at operations outside.
    """
    return _current().rotations()


def create_scratch(rank: int, name: str, per_rank: int = 0) -> None:
    """Make an empty scratch buffer; writing to any new buffer name does the same.

    ``per_rank``: in rotations(), its chunks belong to the ranks in turn, so many to each, and move on with them; else
    chunk i of rank r is what chunk i of rank 0 is.
    """
    _current().create_scratch(rank, name, per_rank)


def print_xml() -> None:
    """Compile the current program and print it as MSCCL XML, as ``XML()`` of MSCCL's language does."""
    from weft.collectives.xml_write import to_xml

    sys.stdout.write(to_xml(_current().compile()))


def Check() -> bool:
    """Compile and verify the current program; return True. Raises: ProgramError, VerificationError."""
    _current().compile()
    return True


def MSCCLProgram(
    name: str,
    topo: Topology | None,
    collective: Collective,
    instances: int,
    protocol: str = "Simple",
    threadblock_policy: object = None,
    interleaved_replication: bool = True,
    instr_fusion: bool = True,
    check_xml: bool = True,
    dependence_nop: bool = False,
) -> Program:
    """Make a Program from MSCCL's argument list. Placement is manual wherever an operation names it.

    As in MSCCL, a reference stands for its slots, whatever they hold by now, and an in-place index of another rank is
    taken for one of the sender's. A custom collective that says in place, but whose init_buffers() makes an output of
    its own, is checked and served out of place.
    """
    is_apart = collective.inplace and not collective.shares_buffers()
    if is_apart:
        collective = collective.in_form(False)
    program = Program(
        name, collective, topo, instances, protocol, instr_fusion, interleaved_replication, dependence_nop
    )
    if is_apart:
        program.notes.append("init_buffers() makes an output of its own: serves out-of-place calls only")
    program._follows_msccl = True
    return program


@contextlib.contextmanager
def collect() -> Iterator[list[Program]]:
    """Collect the programs that are entered inside the ``with``."""
    programs: list[Program] = []
    listeners = _local.__dict__.setdefault("listeners", [])
    listeners.append(programs)
    try:
        yield programs
    finally:
        listeners.remove(programs)


Builder = Callable[..., Program]


def _current() -> Program:
    program: Program | None = getattr(_local, "program", None)
    if program is None:
        raise _error("no program: this must stand inside 'with Program(...)'")
    return program
