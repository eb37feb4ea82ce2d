# SPDX-License-Identifier: Apache-2.0
"""Programs that are broken on purpose, each in one way, with what the verifier must say about it.

for case in broken_programs():
    ...                      # verify(case.algorithm) raises VerificationError of case.kind that contains case.says
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from weft.collectives.contract import AllGather, AllReduce, Buffer, Collective, SendRecv
from weft.collectives.ir import Algorithm, Block, Op, RankProgram, Span, Step
from weft.collectives.library import build

_I, _O, _S = Buffer.input, Buffer.output, Buffer.scratch


@dataclasses.dataclass(frozen=True)
class Broken:
    """One broken program: ``kind`` and a part of the message that the verifier must give."""

    name: str
    algorithm: Algorithm
    kind: str
    says: str


def broken_programs() -> list[Broken]:
    """Return all of them."""
    return [make() for make in _MAKERS]


def _swap_on_two_ranks(contract: Collective | None = None, protocol: str = "Simple") -> Algorithm:
    """Return a correct all-gather on two ranks: each copies its own chunk, sends it, and receives the other."""
    ranks = []
    for rank in range(2):
        own = Step(Op.COPY, Span(_I, 0), Span(_O, rank))
        send = Step(Op.SEND, Span(_I, 0), Span(_O, rank))
        recv = Step(Op.RECV, Span(_I, 0), Span(_O, 1 - rank))
        blocks = [Block(-1, -1, 0, [own]), Block(1 - rank, 1 - rank, 0, [send, recv])]
        ranks.append(RankProgram(rank, 1, 2, 0, blocks))
    contract = contract or AllGather(2)
    return Algorithm("swap", contract.name, protocol, contract.chunks, False, True, ranks, contract)


def _change(algorithm: Algorithm, rank: int, block: int, step: int, **fields: object) -> Algorithm:
    """Return a copy in which one step has other fields."""
    changed = copy.deepcopy(algorithm)
    steps = changed.ranks[rank].blocks[block].steps
    steps[step] = dataclasses.replace(steps[step], **fields)  # type: ignore[arg-type]
    return changed


def _wrong_place() -> Broken:
    broken = _change(_swap_on_two_ranks(), 0, 1, 1, dst=Span(_O, 0))
    return Broken("receives into the wrong chunk", broken, "race", "nothing orders the two")


def _wrong_source() -> Broken:
    library = build("allgather_allpairs", 3).compile()
    rank, number, at = next((r, b, s) for r, b, s, step in library.steps() if step.op is Op.COPY and r == 1)
    broken = _change(library, rank, number, at, dst=Span(_O, 1), src=Span(_I, 0), op=Op.REDUCE)
    return Broken("adds to an output that was never written", broken, "result", "holds nothing")


def _added_twice() -> Broken:
    broken = copy.deepcopy(build("allreduce_1step", 3).compile())
    for block in broken.ranks[0].blocks:
        reduces = [at for at, step in enumerate(block.steps) if step.op is Op.REDUCE]
        if len(reduces) > 1:
            first, second = (block.steps[at] for at in reduces[:2])
            block.steps[reduces[1]] = dataclasses.replace(second, src=first.src)
    return Broken("adds one rank twice and forgets another", broken, "result", "too much")


def _forgotten_chunk() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    broken.ranks[0].blocks[0].steps = []
    return Broken("forgets its own chunk", broken, "result", "holds nothing, should hold C(0,0)")


def _without_waits() -> Broken:
    broken = copy.deepcopy(build("allreduce_1step", 3).compile())
    for program in broken.ranks:
        for block in program.blocks:
            block.steps = [dataclasses.replace(step, depends=()) for step in block.steps]
    return Broken("adds without waiting for what it adds", broken, "race", "nothing orders the two")


def _write_after_read() -> Broken:
    send = Step(Op.SEND, Span(_I, 0), Span(_I, 0))
    recv = Step(Op.RECV, Span(_I, 0), Span(_I, 0))
    ranks = [
        RankProgram(r, 1, 0, 0, [Block(1 - r, -1, 0, [send]), Block(-1, 1 - r, 0, [recv])]) for r in (0, 1)
    ]
    broken = Algorithm("swap", "sendrecv", "Simple", 1, True, False, ranks, SendRecv(2, 1, inplace=True))
    return Broken("overwrites its input while it is being sent", broken, "race", "[0] while")


def _receive_first() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    for program in broken.ranks:
        program.blocks[1].steps.reverse()
    return Broken("both ranks receive before they send", broken, "deadlock", "waits for a message from rank")


def sends_before_receives(chunks: int, count: int = 1, protocol: str = "Simple") -> Algorithm:
    """Return an all-gather on two ranks that send all their chunks, ``count`` a step, before they receive any."""
    ranks = []
    for rank in range(2):
        mine, theirs = rank * chunks, (1 - rank) * chunks
        first = range(0, chunks, count)
        sends = [Step(Op.SEND, Span(_I, c), Span(_O, mine + c), count) for c in first]
        recvs = [Step(Op.RECV, Span(_I, c), Span(_O, theirs + c), count) for c in first]
        copies = [Step(Op.COPY, Span(_I, c), Span(_O, mine + c), count) for c in first]
        blocks = [Block(-1, -1, 0, copies), Block(1 - rank, 1 - rank, 0, sends + recvs)]
        ranks.append(RankProgram(rank, chunks, 2 * chunks, 0, blocks))
    return Algorithm(
        *(f"{chunks} by {count}", "allgather", protocol, 2 * chunks, False, True, ranks, AllGather(2, chunks))
    )


def _nine_sends() -> Broken:
    broken = sends_before_receives(9)
    return Broken("sends nine chunks before it receives", broken, "deadlock", "(8 are taken)")


def _hangs_from_its_least_size() -> Broken:
    broken = dataclasses.replace(sends_before_receives(16, 16), min_bytes=16 << 20)
    return Broken("sends more than fits at every size it is for", broken, "deadlock", "from 4194305 bytes on")


def _in_place(inplace: bool, outofplace: bool, *steps: Step) -> Algorithm:
    """Return a program of one rank without a contract, each step in a block of its own."""
    ranks = [RankProgram(0, 3, 3, 0, [Block(steps=[step]) for step in steps])]
    return Algorithm("custom", "custom", "Simple", 3, inplace, outofplace, ranks)


def _custom_race_in_place() -> Broken:
    broken = _in_place(
        *(True, False, Step(Op.COPY, Span(_I, 0), Span(_O, 1)), Step(Op.COPY, Span(_I, 1), Span(_O, 2)))
    )
    return Broken("overwrites in place, without a contract, what it reads", broken, "race", "nothing orders")


def _custom_overlap_in_place() -> Broken:
    broken = _in_place(True, False, Step(Op.COPY, Span(_I, 0), Span(_O, 1), 2))
    return Broken("shifts its input in place", broken, "structure", "are one memory in place")


def _custom_forms_differ() -> Broken:
    first = Step(Op.COPY, Span(_I, 0), Span(_O, 1))
    second = Step(Op.COPY, Span(_I, 1), Span(_O, 2), depends=((0, 0),))
    broken = _in_place(True, True, first, second)
    return Broken("computes other things in place than out of place", broken, "result", "claims both forms")


def _circle_of_waits() -> Broken:
    first = Step(Op.COPY, Span(_I, 0), Span(_O, 0), depends=((1, 0),))
    second = Step(Op.COPY, Span(_I, 1), Span(_O, 1), depends=((0, 0),))
    ranks = [RankProgram(0, 2, 2, 0, [Block(steps=[first]), Block(steps=[second])])]
    broken = Algorithm("circle", "allreduce", "Simple", 2, False, True, ranks, AllReduce(1, 2))
    return Broken("two blocks wait for each other", broken, "deadlock", "to finish")


def _no_receiver() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    broken.ranks[1].blocks[1].steps.pop()
    return Broken("nobody receives", broken, "structure", "never receives there")


def _two_senders() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    again = Step(Op.SEND, Span(_I, 0), Span(_O, 0))
    broken.ranks[0].blocks.append(Block(1, -1, 0, [again]))
    return Broken("two blocks send on one connection", broken, "structure", "both send on the connection")


def _more_sent() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    broken.ranks[0].blocks[1].steps.append(Step(Op.SEND, Span(_I, 0), Span(_O, 0)))
    return Broken("sends a message too many", broken, "structure", "2 sends, 1 receives")


def _sizes_differ() -> Broken:
    broken = _change(_swap_on_two_ranks(AllGather(2, 2)), 0, 1, 0, count=2)
    for program in broken.ranks:
        program.input_chunks, program.output_chunks = 2, 4
    return Broken("sends two chunks, receives one", broken, "structure", "its receive")


def _out_of_bounds() -> Broken:
    broken = _change(_swap_on_two_ranks(), 1, 1, 1, dst=Span(_O, 2))
    return Broken("receives past the end", broken, "structure", "o[2:3], but that buffer has 2 chunks")


def _last_of_several_out_of_bounds() -> Broken:
    library = build("allgather_recursive_doubling", 4).compile()
    rank, number, at = next(
        (r, b, s) for r, b, s, step in library.steps() if step.op is Op.RECV and step.count == 2
    )
    broken = _change(library, rank, number, at, dst=Span(_O, 3))
    return Broken("only the last of several chunks is past the end", broken, "structure", "o[3:5]")


def _own_peer() -> Broken:
    broken = copy.deepcopy(_swap_on_two_ranks())
    broken.ranks[0].blocks[1].send = 0
    return Broken("sends to itself", broken, "structure", "its send peer is itself")


def _no_peer() -> Broken:
    broken = _change(_swap_on_two_ranks(), 0, 0, 0, op=Op.SEND)
    return Broken("sends without a peer", broken, "structure", "has no send peer")


def _missing_step() -> Broken:
    broken = _change(_swap_on_two_ranks(), 0, 1, 0, depends=((0, 7),))
    return Broken("waits for a step that is not there", broken, "structure", "which does not exist")


def _sender_operand() -> Broken:
    """The published compiler's error: a reduction between different indices adds to the sender's index."""
    steps = (
        [Step(Op.SEND, Span(_I, 0), Span(_O, 0))],
        [Step(Op.RECV_REDUCE_COPY, Span(_I, 1), Span(_O, 0))],
    )
    ranks = [
        RankProgram(r, 2, 1, 0, [Block(1 - r if r == 0 else -1, -1 if r == 0 else 0, 0, steps[r])])
        for r in (0, 1)
    ]
    broken = Algorithm("operand", "custom", "Simple", 2, False, True, ranks, _SumOfFirst(2))
    return Broken("adds the sender's index instead of the receiver's", broken, "result", "C(1,1)")


class _SumOfFirst(AllReduce):
    """Rank 1 gets the sum of both ranks' chunk 0; inputs have two chunks."""

    name = "custom"

    def before(self, rank: int) -> list:  # type: ignore[type-arg]
        return AllReduce(2, 2).before(rank)

    def after(self, rank: int) -> list:  # type: ignore[type-arg]
        return [AllReduce(2, 1).after(1)[0]] if rank == 1 else [None]


def _overlap() -> Broken:
    step = Step(Op.COPY, Span(_S, 0), Span(_S, 1), 2)
    ranks = [RankProgram(0, 1, 1, 3, [Block(steps=[step])])]
    broken = Algorithm("overlap", "allreduce", "Simple", 1, False, True, ranks, AllReduce(1, 1))
    return Broken("copies a span onto itself, shifted", broken, "structure", "overlap over 2 chunks")


_MAKERS: tuple[Callable[[], Broken], ...] = (
    *(_wrong_place, _wrong_source, _added_twice, _forgotten_chunk, _without_waits, _write_after_read),
    *(_receive_first, _nine_sends, _hangs_from_its_least_size, _circle_of_waits),
    *(_custom_race_in_place, _custom_overlap_in_place, _custom_forms_differ),
    *(_no_receiver, _two_senders, _more_sent, _sizes_differ, _out_of_bounds, _last_of_several_out_of_bounds),
    *(_own_peer, _no_peer, _missing_step, _sender_operand, _overlap),
)
