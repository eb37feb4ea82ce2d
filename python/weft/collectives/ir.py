# SPDX-License-Identifier: Apache-2.0
"""The one IR of collective programs: per rank, thread blocks that run steps in order.

    Algorithm -> RankProgram -> Block -> Step

The language compiles to it, MSCCL XML and MSCCL++ plans are read into it, the verifier interprets it, the executor runs
it. It has no nops: a step lists all its dependencies, and the XML writer makes the nops that the format needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import overload

from weft.collectives.contract import Collective
from weft.collectives.rotation import Rotation

PROTOCOLS = ("Simple", "LL", "LL128")
MAX_CHUNKS = 1 << 16  # of a buffer: far more than algorithms have, and few enough to verify
MAX_COUNT = 71  # of chunks in one step, a limit of the XML format
MAX_CHANNELS = 32
MAX_BLOCKS = 1 << 14  # of all ranks: what the verifier keeps of each about every other then takes 1 GiB
FIFO_STEPS = 8  # per connection of MSCCL's executors; a group of chunks takes 1, or 4 with Simple
RING_SLOTS = 8  # messages that a connection of ours holds: kRingSlots of kernels/collective/program_args.h
# What a message may have at least, on CPUs and GPUs: slot_payload_bytes() of src/plan/collective.cc.
SLOT_PAYLOAD_BYTES = {"Simple": 256 << 10, "LL": 8 << 10, "LL128": 15 << 10}

Connection = tuple[int, int, int]  # sender, receiver, channel


class Op(Enum):
    """The operation of a step, by its XML name. ``src`` and ``dst`` are local slots."""

    SEND = "s"  # send src
    RECV = "r"  # receive into dst
    RECV_COPY_SEND = "rcs"  # receive, store in dst, forward
    RECV_REDUCE_SEND = "rrs"  # receive, combine with src, forward; nothing stored
    RECV_REDUCE_COPY = "rrc"  # receive, combine with src, store in dst
    RECV_REDUCE_COPY_SEND = "rrcs"  # the same, and forward the result
    COPY = "cpy"  # dst = src
    REDUCE = "re"  # dst = dst + src

    @property
    def sends(self) -> bool:
        return self in _SENDS

    @property
    def receives(self) -> bool:
        return self in _RECEIVES

    @property
    def reduces(self) -> bool:
        return self in _REDUCES

    @property
    def reads_src(self) -> bool:
        return self not in (Op.RECV, Op.RECV_COPY_SEND)

    @property
    def writes_dst(self) -> bool:
        return self not in (Op.SEND, Op.RECV_REDUCE_SEND)


_RECEIVES = (Op.RECV, Op.RECV_COPY_SEND, Op.RECV_REDUCE_SEND, Op.RECV_REDUCE_COPY, Op.RECV_REDUCE_COPY_SEND)
_SENDS = (Op.SEND, Op.RECV_COPY_SEND, Op.RECV_REDUCE_SEND, Op.RECV_REDUCE_COPY_SEND)
_REDUCES = (Op.RECV_REDUCE_SEND, Op.RECV_REDUCE_COPY, Op.RECV_REDUCE_COPY_SEND, Op.REDUCE)


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive chunks of a local buffer, from ``index``; the step says how many. Index -1: not used."""

    buffer: str
    index: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.index}]"


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction. ``depends`` lists (block, step) pairs of the same rank that must be finished first."""

    op: Op
    src: Span
    dst: Span
    count: int = 1
    depends: tuple[tuple[int, int], ...] = ()
    where: str = ""  # file:line of the user's program, or of the file read

    def reads(self) -> Iterator[tuple[str, int]]:
        """Yield the local slots that the step reads."""
        if self.op.reads_src:
            yield from ((self.src.buffer, self.src.index + c) for c in range(self.count))
        if self.op is Op.REDUCE:
            yield from ((self.dst.buffer, self.dst.index + c) for c in range(self.count))

    def writes(self) -> Iterator[tuple[str, int]]:
        """Yield the local slots that the step writes."""
        if self.op.writes_dst:
            yield from ((self.dst.buffer, self.dst.index + c) for c in range(self.count))


@dataclasses.dataclass
class Block:
    """A thread block: at most one peer to send to and one to receive from, on one channel. -1: no peer."""

    send: int = -1
    recv: int = -1
    channel: int = 0
    steps: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RankProgram:
    """The program of one rank, and the sizes of its buffers in chunks."""

    rank: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    blocks: list[Block] = dataclasses.field(default_factory=list)


class RotatedRanks(Sequence[RankProgram]):
    """The programs of all ranks, each made from ``first``, rank 0's, when it is asked for: what is changed is lost."""

    def __init__(self, first: RankProgram, rotation: Rotation) -> None:
        self.first = first
        self.rotation = rotation

    def __len__(self) -> int:
        return self.rotation.ranks

    @overload
    def __getitem__(self, rank: int) -> RankProgram: ...
    @overload
    def __getitem__(self, rank: slice) -> list[RankProgram]: ...
    def __getitem__(self, rank: int | slice) -> RankProgram | list[RankProgram]:
        if isinstance(rank, slice):
            return [self._made(at) for at in range(len(self))[rank]]
        return self._made(range(len(self))[rank])

    def __iter__(self) -> Iterator[RankProgram]:
        return (self._made(rank) for rank in range(len(self)))

    def _made(self, rank: int) -> RankProgram:
        first = self.first
        if rank == 0:
            return first
        blocks = [self._block(block, rank) for block in first.blocks]
        return dataclasses.replace(first, rank=rank, blocks=blocks)

    def _block(self, block: Block, by: int) -> Block:
        steps = [
            Step(
                step.op,
                self._span(step.src, by),
                self._span(step.dst, by),
                step.count,
                step.depends,
                step.where,
            )
            for step in block.steps
        ]
        return Block(self.peer(block.send, by), self.peer(block.recv, by), block.channel, steps)

    def _span(self, span: Span, by: int) -> Span:
        return (
            Span(span.buffer, self.rotation.index(span.buffer, span.index, by)) if span.index >= 0 else span
        )

    def peer(self, peer: int, by: int) -> int:
        """Return who is to the rank ``by`` further on what ``peer`` is to a rank; -1: nobody."""
        return (peer + by) % len(self) if peer >= 0 else -1


@dataclasses.dataclass(repr=False)
class Algorithm:
    """A fixed schedule that implements one collective on a fixed number of ranks.

    ``contract`` is what it promises; None when a loaded file does not tell (coll="custom").
    ``max_bytes`` is inclusive, None for no limit; bytes count the whole algorithm buffer.
    """

    name: str
    collective: str
    protocol: str
    chunks: int
    inplace: bool
    outofplace: bool
    ranks: Sequence[RankProgram]
    contract: Collective | None = None
    min_bytes: int = 0
    max_bytes: int | None = None
    threads: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        """Say what it is in a line: a thousand ranks' steps are for ``weft show``."""
        places = ((self.inplace, "in place"), (self.outofplace, "out of place"))
        form = " and ".join(name for is_served, name in places if is_served)
        what = f"{self.collective}, {self.num_ranks} ranks, {self.chunks} chunks, {self.protocol}"
        return f"Algorithm({self.name!r}: {what}, {form})"

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def rotation(self) -> Rotation | None:
        """How the ranks' programs come from rank 0's; None where each is its own."""
        return self.ranks.rotation if isinstance(self.ranks, RotatedRanks) else None

    @property
    def distinct(self) -> Sequence[RankProgram]:
        """The programs that stand for all: rank 0's where the others are made from it."""
        return [self.ranks.first] if isinstance(self.ranks, RotatedRanks) else self.ranks

    @property
    def channels(self) -> int:
        return 1 + max((b.channel for p in self.distinct for b in p.blocks), default=0)

    def incoming(self, rank: int, block: Block) -> Connection:
        """Return the connection that a block receives from; of ranks that are alike, by rank 0's name for it."""
        if self.rotation is not None:
            return 0, (rank - block.recv) % self.num_ranks, block.channel
        return block.recv, rank, block.channel

    def outgoing(self, rank: int, block: Block) -> Connection:
        """Return the connection that a block sends on, as incoming() does."""
        return rank, block.send, block.channel

    def forms(self) -> list[bool]:
        """Return the forms of call that it claims to serve: True for in place, False for out of place."""
        claims = ((True, self.inplace), (False, self.outofplace))
        return [form for form, is_claimed in claims if is_claimed]

    def blocks(self) -> Iterator[tuple[int, int, Block]]:
        """Yield (rank, block id, block)."""
        yield from _numbered(self.ranks)

    def distinct_blocks(self) -> Iterator[tuple[int, int, Block]]:
        """Yield those that stand for all, as blocks() does."""
        yield from _numbered(self.distinct)

    def steps(self) -> Iterator[tuple[int, int, int, Step]]:
        """Yield (rank, block id, step number, step)."""
        for rank, number, block in self.blocks():
            for at, step in enumerate(block.steps):
                yield rank, number, at, step

    def needed_steps(self) -> set[tuple[int, int, int]]:
        """Return the (rank, block, step) that some other step depends on (hasdep), of the distinct programs."""
        return {
            (rank, *dep)
            for rank, _, block in self.distinct_blocks()
            for step in block.steps
            for dep in step.depends
        }

    def unrotated(self) -> Algorithm:
        """Return the algorithm with a program of its own for every rank."""
        return dataclasses.replace(self, ranks=list(self.ranks)) if self.rotation else self

    def place(self, rank: int, block: int, step: int) -> str:
        """Name a step in words: 'rank 0, block 1, step 2 (rrc from rank 3)'."""
        owner = self.ranks[rank].blocks[block]
        what = owner.steps[step]
        peers = ""
        if what.op.receives:
            peers += f" from rank {owner.recv}"
        if what.op.sends:
            peers += f" to rank {owner.send}"
        line = f", {what.where}" if what.where else ""
        return f"rank {rank}, block {block}, step {step} ({what.op.value}{peers}{line})"


def _numbered(programs: Sequence[RankProgram]) -> Iterator[tuple[int, int, Block]]:
    for program in programs:
        for number, block in enumerate(program.blocks):
            yield program.rank, number, block


def fifo_units(protocol: str) -> int:
    """Return the groups of chunks that fit a connection of MSCCL's executors, which schedules are made for."""
    return FIFO_STEPS // (4 if protocol == "Simple" else 1)
