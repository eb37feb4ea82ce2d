# SPDX-License-Identifier: Apache-2.0
"""Programs by the interpreter and in kernels of their own, on CPU or CUDA tensors: exact, and with the same bits.

A step takes NVRTC a second or more, so the programs have few of them on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.collectives import AllReduce, Buffer, Program
from weft.collectives.executor import Call, Executor, Loaded
from weft.collectives.ir import Algorithm
from weft.collectives.library import build
from weft.collectives.rows import ELEMENTS, REDUCTIONS
from weft.collectives.values import Value
from weft.runtime.communicator import Communicator

Place = Callable[[torch.Tensor], torch.Tensor]  # copies a CPU tensor to where the test wants its buffers
SIZES = (1, 1003, 70_001)  # elements of a chunk
_IN_A_ROW = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A library algorithm, or "chain": all_reduce in place along a chain and back, two steps on every rank."""

    name: str
    protocol: str
    dtype: str = "float32"
    op: str = "sum"

    def __str__(self) -> str:
        return f"{self.name}-{self.protocol}-{self.dtype}-{self.op}"

    def algorithm(self, ranks: int) -> Algorithm:
        if self.name == "chain":
            return chain(ranks, self.protocol)
        return build(self.name, ranks, protocol=self.protocol).compile()


def chain(ranks: int, protocol: str) -> Algorithm:
    """Return an all_reduce in place of two steps a rank, with every operation that sends or receives but rrc."""
    with Program("chain", AllReduce(ranks, 1, inplace=True), protocol=protocol) as program:
        ref = program.chunk(0, Buffer.input, 0)
        for rank in range(1, ranks):
            own = program.chunk(rank, Buffer.input, 0)
            assert ref is not None and own is not None
            ref = own.reduce(ref)
        for rank in reversed(range(ranks - 1)):
            assert ref is not None
            ref = ref.copy(rank)
    return program.compile()


@dataclasses.dataclass
class Job:
    """One loaded program, its type and operation, and how its two modes are called."""

    executor: Executor
    loaded: Loaded
    dtype: torch.dtype
    op: str
    place: Place

    @property
    def rank(self) -> int:
        return self.executor.rank

    def buffers(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and output of a call with ``given`` elements of this rank; alike where it works in place."""
        contract = self.loaded.algorithm.contract
        assert contract is not None
        elems = given.numel() // max(len(contract.before(self.rank)), 1)
        tensor = self.place(given)
        if self.loaded.algorithm.inplace:
            return tensor, tensor
        return tensor, self.place(torch.zeros(len(contract.after(self.rank)) * elems, dtype=self.dtype))

    def run(self, tensor: torch.Tensor, out: torch.Tensor, elems: int, compiled: bool) -> None:
        stream = int(torch.cuda.current_stream().cuda_stream) if tensor.is_cuda else 0
        element = ELEMENTS[str(self.dtype).removeprefix("torch.")]
        call = Call(
            *(tensor.data_ptr(), out.data_ptr(), elems * self.loaded.per_part, element, REDUCTIONS[self.op]),
            stream=stream,
            compiled=compiled,
        )
        self.executor.run(self.loaded, call)

    def result(self, given: torch.Tensor, elems: int, compiled: bool) -> torch.Tensor:
        tensor, out = self.buffers(given)
        self.run(tensor, out, elems, compiled)
        return out.cpu()  # after the stream's work

    def wanted(self, values: Callable[[int], torch.Tensor], elems: int) -> torch.Tensor:
        """Return what the contract says that the rank holds, if rank r had values(r)."""
        contract = self.loaded.algorithm.contract
        assert contract is not None
        parts = {r: values(r).double().view(-1, elems) for r in range(contract.num_ranks)}

        def reduced(value: Value | None) -> torch.Tensor:
            assert value is not None
            stacked = torch.stack([parts[r][c] for r, c in value.parts])
            if self.op in ("min", "max"):
                return (stacked.amin if self.op == "min" else stacked.amax)(0)
            total: torch.Tensor = stacked.prod(0) if self.op == "product" else stacked.sum(0)
            if self.op != "average":
                return total
            return (total / contract.num_ranks).float().double()

        whole = torch.cat([reduced(value) for value in contract.after(self.rank)])
        return (whole if self.dtype.is_floating_point else whole.trunc()).to(self.dtype)


def small_numbers(rank: int, elems: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    """Return numbers whose sums and products over 8 ranks are exact in every type."""
    return ((torch.arange(elems) * 7 + rank * 5 + turn) % 13 % 2 + 1).to(dtype)


def check_modes(comm: Communicator, places: list[Place], case: Case) -> None:
    """Run the case on this rank, in memory of every kind: alone, in a row, and on CUDA in a graph."""
    executor = Executor(comm.core, direct_bytes=4096)
    loaded = executor.load(case.algorithm(comm.size))
    assert loaded.algorithm.contract is not None
    chunks = len(loaded.algorithm.contract.before(comm.rank))
    for place in places:
        job = Job(executor, loaded, getattr(torch, case.dtype), case.op, place)
        for elems in SIZES:
            values = functools.partial(small_numbers, elems=chunks * elems, dtype=job.dtype)
            random = torch.randn(chunks * elems, generator=torch.Generator().manual_seed(comm.rank)) * 9
            found = [job.result(random.to(job.dtype), elems, compiled) for compiled in (False, True)]
            assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8)), (case, elems)
            for compiled in (False, True):
                exact = job.result(values(comm.rank), elems, compiled)
                assert torch.equal(exact.float(), job.wanted(values, elems).float()), (case, elems, compiled)
        _check_in_a_row(job, chunks, 1003)
        if executor.core.device != "cpu":
            _check_graph(comm, job, chunks, 1003)


def _check_in_a_row(job: Job, chunks: int, elems: int) -> None:
    """Check calls by both modes that nobody waits for in between."""

    def values(rank: int, turn: int) -> torch.Tensor:
        return small_numbers(rank, chunks * elems, job.dtype, turn)

    turns = [job.buffers(values(job.rank, turn)) for turn in range(_IN_A_ROW)]
    for turn, (tensor, out) in enumerate(turns):
        job.run(tensor, out, elems, compiled=turn % 3 != 0)
    for turn, (_, out) in enumerate(turns):
        wanted = job.wanted(functools.partial(values, turn=turn), elems)
        assert torch.equal(out.cpu().float(), wanted.float()), turn


def _check_graph(comm: Communicator, job: Job, chunks: int, elems: int) -> None:
    """Check replays with new numbers, of both modes in one graph, with calls outside between them."""

    def values(rank: int, turn: int) -> torch.Tensor:
        return small_numbers(rank, chunks * elems, job.dtype, turn)

    given = job.place(values(job.rank, 0))
    buffers = [job.buffers(values(job.rank, 0)) for _ in range(2)]

    def both() -> None:
        for compiled, (tensor, out) in zip((False, True), buffers, strict=True):
            tensor.copy_(given)
            job.run(tensor, out, elems, compiled)

    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for turn in range(4):
        given.copy_(values(job.rank, turn))
        if turn == 2:
            both()
        else:
            graph.replay()
        torch.cuda.synchronize()
        wanted = job.wanted(functools.partial(values, turn=turn), elems)
        for _, out in buffers:
            assert torch.equal(out.cpu().float(), wanted.float()), turn
        comm.barrier()  # nobody starts the next turn before all have compared
