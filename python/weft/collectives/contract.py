# SPDX-License-Identifier: Apache-2.0
"""Collectives as contracts: what every rank holds before, what it must hold after, and which slots are one memory.

    AllReduce(8, chunk_factor=8, inplace=True)
    class Swap(Collective): ...                  # a custom one: before() and after(), or init_buffers() and check()

A slot is (rank, buffer, index). ``chunk_factor`` counts the chunks of one rank's part; for AllReduce, Broadcast, Reduce
and SendRecv it counts all chunks. ``chunks`` is what MSCCL calls nchunksperloop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from weft.collectives.values import Chunk, Value, difference, total
from weft.errors import invalid

Slots = list["Value | None"]


class Buffer:
    """Names of the three buffers of a rank; any other name used in a program makes a scratch buffer."""

    input = "i"
    output = "o"
    scratch = "s"


class State:
    """Symbolic contents of all ranks: ``buffers[rank][buffer][index]`` is a Value or None."""

    def __init__(self, buffers: list[dict[str, Slots]]) -> None:
        self.buffers = buffers


class Collective:
    """Base of all contracts. A custom one overrides before() and after(), or MSCCL's init_buffers() and check().

    Args:
        num_ranks: ranks that take part, at least 1.
        chunk_factor: chunks per rank part, at least 1.
        inplace: the input and the output share memory, as alias() says.
        root: the rank that gives (Broadcast, Scatter) or gets (Reduce, Gather).
    """

    name: ClassVar[str] = "custom"
    is_of_pairs: ClassVar[bool] = False  # not all ranks run it, so it has no call number

    def __init__(self, num_ranks: int, chunk_factor: int = 1, inplace: bool = False, root: int = 0) -> None:
        if num_ranks < 1:
            raise invalid("num_ranks", num_ranks, "1 or more")
        if chunk_factor < 1:
            raise invalid("chunk_factor", chunk_factor, "1 or more")
        if not 0 <= root < num_ranks:
            raise invalid("root", root, f"0 to {num_ranks - 1}")
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace
        self.root = root
        self._sizes: dict[int, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_ranks}, {self.chunk_factor}, inplace={self.inplace})"

    @property
    def chunks(self) -> int:
        """Chunks of the algorithm buffer (nchunksperloop)."""
        return self.chunk_factor

    def scaled(self, instances: int) -> Collective:
        """Return the same contract with ``instances`` times as many chunks."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.chunk_factor = self.chunk_factor * instances
        other._sizes = {}
        return other

    def in_form(self, inplace: bool) -> Collective:
        """Return the same contract, in place or out of place."""
        other = self.scaled(1)
        other.inplace = inplace
        return other

    def input_chunks(self, rank: int) -> int:
        return self._lengths(rank)[0]

    def output_chunks(self, rank: int) -> int:
        return self._lengths(rank)[1]

    def _lengths(self, rank: int) -> tuple[int, int]:
        if rank not in self._sizes:
            if type(self).init_buffers is Collective.init_buffers:
                self._sizes[rank] = len(self.before(rank)), len(self.after(rank))
            else:
                ends = (Buffer.input, Buffer.output)
                for at, own in enumerate(self.init_buffers()):
                    self._sizes[at] = len(own.get(ends[0], [])), len(own.get(ends[1], []))
        return self._sizes[rank]

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        """Return the slot that stands for this one; two names of one memory get the same answer."""
        if type(self).get_buffer_index is not Collective.get_buffer_index:
            return self.get_buffer_index(rank, buffer, index)
        if self.inplace and buffer == Buffer.output:
            return Buffer.input, index
        return buffer, index

    def init_buffers(self) -> list[dict[str, Slots]]:
        """Return every rank's input and output before the collective."""
        buffers = []
        for rank in range(self.num_ranks):
            inputs, outputs = self.before(rank), [None] * len(self.after(rank))
            buffers.append({Buffer.input: inputs, Buffer.output: list[Value | None](outputs)})
        return buffers

    def start(self) -> State:
        """Return the initial contents of all ranks, every value in the slot that stands for it."""
        return State([self._placed(rank, own) for rank, own in enumerate(self.init_buffers())])

    def start_of_first(self) -> dict[str, Slots]:
        """Return what start() says of rank 0, of a contract that has before() and after()."""
        return self._placed(0, {Buffer.input: self.before(0), Buffer.output: [None] * len(self.after(0))})

    def _placed(self, rank: int, own: dict[str, Slots]) -> dict[str, Slots]:
        for index, value in enumerate(list(own.get(Buffer.input, []))):
            buffer, at = self.alias(rank, Buffer.input, index)
            if value is not None and buffer != Buffer.input:
                own[buffer][at] = value
        return own

    def before(self, rank: int) -> Slots:
        """Return what the input of ``rank`` holds; None where it holds nothing."""
        raise NotImplementedError(
            f"{type(self).__name__} needs before() and after(), or init_buffers() and check()"
        )

    def after(self, rank: int) -> Slots:
        """Return what the output of ``rank`` must hold; None where anything will do."""
        raise NotImplementedError(
            f"{type(self).__name__} needs before() and after(), or init_buffers() and check()"
        )

    def check(self, state: State) -> bool:
        """Return whether ``state`` fulfils the contract."""
        return self.problem(state) is None

    def problem(self, state: State) -> tuple[int, str, int, str] | None:
        """Return (rank, buffer, index, what is wrong) of the first slot that breaks the contract, or None.

        ``state`` may be that of the first ranks only.
        """
        if type(self).after is Collective.after:
            return (
                None
                if self.check(self._as_seen(state))
                else (-1, Buffer.output, -1, "check() of the collective says no")
            )
        for rank in range(len(state.buffers)):
            for index, wanted in enumerate(self.after(rank)):
                buffer, at = self.alias(rank, Buffer.output, index)
                slots = state.buffers[rank].get(buffer, [])
                found = slots[at] if at < len(slots) else None
                if wanted is not None and found != wanted:
                    return rank, Buffer.output, index, difference(found, wanted)
        return None

    def shares_buffers(self) -> bool:
        """Return whether init_buffers() lets alias() say what is one memory, and makes no two buffers itself."""
        kind = type(self)
        if kind.after is not Collective.after or kind.get_buffer_index is not Collective.get_buffer_index:
            return True
        return all(own.get(Buffer.output) is own.get(Buffer.input) for own in self.init_buffers())

    def _as_seen(self, state: State) -> State:
        """Return the state as a program sees it: outputs that share memory with inputs hold the same."""
        seen = []
        for rank, own in enumerate(state.buffers):
            places = [self.alias(rank, Buffer.output, c) for c in range(self.output_chunks(rank))]
            outputs = [own[buffer][at] if at < len(own[buffer]) else None for buffer, at in places]
            seen.append({**own, Buffer.output: outputs})
        return State(seen)

    # MSCCL's name for alias(), kept so that its custom collectives run.
    def get_buffer_index(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        return self.alias(rank, buffer, index)


def _own(rank: int, count: int) -> Slots:
    return [Chunk(rank, c) for c in range(count)]


class AllReduce(Collective):
    """Every rank gets the reduction of all ranks' buffers."""

    name = "allreduce"

    def before(self, rank: int) -> Slots:
        return _own(rank, self.chunk_factor)

    def after(self, rank: int) -> Slots:
        return [total(self.num_ranks, c) for c in range(self.chunk_factor)]


class Reduce(AllReduce):
    """Rank ``root`` gets the reduction of all ranks' buffers."""

    name = "reduce"

    def after(self, rank: int) -> Slots:
        return super().after(rank) if rank == self.root else [None] * self.chunk_factor


class Broadcast(Collective):
    """Every rank gets the root's buffer."""

    name = "broadcast"

    def before(self, rank: int) -> Slots:
        return _own(rank, self.chunk_factor) if rank == self.root else [None] * self.chunk_factor

    def after(self, rank: int) -> Slots:
        return _own(self.root, self.chunk_factor)


class AllGather(Collective):
    """Every rank gets all ranks' buffers, in rank order. In place, the input is slice ``rank`` of the output."""

    name = "allgather"

    @property
    def chunks(self) -> int:
        return self.num_ranks * self.chunk_factor

    def before(self, rank: int) -> Slots:
        return _own(rank, self.chunk_factor)

    def after(self, rank: int) -> Slots:
        return [Chunk(q, c) for q in range(self.num_ranks) for c in range(self.chunk_factor)]

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        if self.inplace and buffer == Buffer.input:
            return Buffer.output, rank * self.chunk_factor + index
        return buffer, index


class Gather(AllGather):
    """Rank ``root`` gets all ranks' buffers, in rank order."""

    name = "gather"

    @property
    def chunks(self) -> int:
        return self.chunk_factor

    def after(self, rank: int) -> Slots:
        return super().after(rank) if rank == self.root else []

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        return super().alias(rank, buffer, index) if rank == self.root else (buffer, index)


class ReduceScatter(Collective):
    """Rank r gets part r of the reduction. In place, the output is slice ``rank`` of the input."""

    name = "reducescatter"

    @property
    def chunks(self) -> int:
        return self.num_ranks * self.chunk_factor

    def before(self, rank: int) -> Slots:
        return _own(rank, self.num_ranks * self.chunk_factor)

    def after(self, rank: int) -> Slots:
        return [total(self.num_ranks, rank * self.chunk_factor + c) for c in range(self.chunk_factor)]

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        if self.inplace and buffer == Buffer.output:
            return Buffer.input, rank * self.chunk_factor + index
        return buffer, index


class Scatter(ReduceScatter):
    """Rank r gets part r of the root's buffer."""

    name = "scatter"

    @property
    def chunks(self) -> int:
        return self.chunk_factor

    def before(self, rank: int) -> Slots:
        return super().before(rank) if rank == self.root else []

    def after(self, rank: int) -> Slots:
        return [Chunk(self.root, rank * self.chunk_factor + c) for c in range(self.chunk_factor)]

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        return super().alias(rank, buffer, index) if rank == self.root else (buffer, index)


class AllToAll(Collective):
    """Part q of rank r's input becomes part r of rank q's output."""

    name = "alltoall"

    @property
    def chunks(self) -> int:
        return self.num_ranks * self.chunk_factor

    def before(self, rank: int) -> Slots:
        k = self.chunk_factor
        return [Chunk(rank, c, c // k, c % k + rank * k) for c in range(self.num_ranks * k)]

    def after(self, rank: int) -> Slots:
        k = self.chunk_factor
        return [Chunk(q, rank * k + c) for q in range(self.num_ranks) for c in range(k)]


class AllToAllV(AllToAll):
    """AllToAll whose parts have sizes given at run time. Scratch cannot be used: its size would not be known."""

    name = "alltoallv"


class AllToOthers(AllToAllV):
    """AllToAllV without the parts of a rank for itself, which stay out of its output."""

    def after(self, rank: int) -> Slots:
        parts = super().after(rank)
        return [None if at // self.chunk_factor == rank else part for at, part in enumerate(parts)]


class SendRecv(Collective):
    """Every rank gets the buffer of the rank before it (rank - ``shift``, modulo the ranks); two ranks swap."""

    name = "sendrecv"

    def __init__(self, num_ranks: int, chunk_factor: int = 1, inplace: bool = False, shift: int = 1) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.shift = shift

    def before(self, rank: int) -> Slots:
        return _own(rank, self.chunk_factor)

    def after(self, rank: int) -> Slots:
        return _own((rank - self.shift) % self.num_ranks, self.chunk_factor)


class AllToNext(Collective):
    """Rank r gets rank r-1's buffer (``step`` 1) or rank r+1's (``step`` -1); the rank at the end gets nothing."""

    name = "custom"

    def __init__(self, num_ranks: int, chunk_factor: int = 1, inplace: bool = False, step: int = 1) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.step = step

    def before(self, rank: int) -> Slots:
        return _own(rank, self.chunk_factor)

    def after(self, rank: int) -> Slots:
        source = rank - self.step
        if not 0 <= source < self.num_ranks:
            return [None] * self.chunk_factor
        return _own(source, self.chunk_factor)


Slot = tuple[int, str, int]  # rank, buffer, index


class Stated(Collective):
    """A custom contract as tables: what a file says, or what another contract says of one size.

    ``before`` and ``after`` are by rank; ``same`` names the slot that stands for one in place, where it is not the
    input's chunk of the same index.
    """

    def __init__(
        self,
        chunks: int,
        before: list[Slots],
        after: list[Slots],
        inplace: bool = False,
        same: Mapping[Slot, tuple[str, int]] | None = None,
    ) -> None:
        super().__init__(len(before), chunks, inplace)
        self._before, self._after, self._same = before, after, dict(same or {})

    def before(self, rank: int) -> Slots:
        return list(self._before[rank])

    def after(self, rank: int) -> Slots:
        return list(self._after[rank])

    def alias(self, rank: int, buffer: str, index: int) -> tuple[str, int]:
        if self.inplace and (rank, buffer, index) in self._same:
            return self._same[rank, buffer, index]
        return super().alias(rank, buffer, index)

    def scaled(self, instances: int) -> Collective:
        def cut(of_ranks: list[Slots]) -> list[Slots]:
            return [[_part(v, instances, i) for v in slots for i in range(instances)] for slots in of_ranks]

        same = {
            (rank, buffer, index * instances + i): (to, at * instances + i)
            for (rank, buffer, index), (to, at) in self._same.items()
            for i in range(instances)
        }
        chunks = self.chunk_factor * instances
        return Stated(chunks, cut(self._before), cut(self._after), self.inplace, same)


def _part(value: Value | None, parts: int, number: int) -> Value | None:
    if value is None:
        return None
    return Value(tuple((rank, index * parts + number) for rank, index in value.parts))


_BY_NAME: Mapping[str, Callable[..., Collective]] = {
    kind.name: kind
    for kind in (
        AllReduce,
        Reduce,
        Broadcast,
        AllGather,
        Gather,
        ReduceScatter,
        Scatter,
        AllToAll,
        AllToAllV,
        SendRecv,
    )
}


def is_standard(name: str) -> bool:
    """Return whether MSCCL's ``coll`` names a contract."""
    return name in _BY_NAME or name == "reduce_scatter"


def standard(name: str, ranks: int, chunks: int, inplace: bool, **options: Any) -> Collective | None:
    """Return the contract that MSCCL's ``coll`` names, for an algorithm buffer of ``chunks``; None if it has none.

    Raises: Error when ``chunks`` does not divide by the ranks where it must.
    """
    name = "reducescatter" if name == "reduce_scatter" else name
    if not is_standard(name):
        return None
    per_rank = name in ("allgather", "reducescatter", "alltoall", "alltoallv")
    if per_rank and chunks % ranks:
        raise invalid("nchunksperloop", chunks, f"a multiple of the {ranks} ranks for {name}")
    return _BY_NAME[name](ranks, chunks // ranks if per_rank else chunks, inplace, **options)
