# SPDX-License-Identifier: Apache-2.0
"""Up to which size a program's messages fit its connections.

    size_limit(algorithm)                   # None: at every size; else a SizeLimit

A connection holds RING_SLOTS messages. The executor sends the chunks of a step in groups, as many as fit a slot, and
one by one where chunks are unequal or larger than half a slot (plan_program of src/plan/collective.cc). So a program
whose blocks send steps of many chunks before they receive may run while chunks are small and hang when they grow.
This module only counts messages; what they carry is the verifier's. Of ranks that are alike it counts rank 0's.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from weft.collectives.cached import cached
from weft.collectives.ir import (
    MAX_COUNT,
    RING_SLOTS,
    SLOT_PAYLOAD_BYTES,
    Algorithm,
    Block,
    Connection,
)

_UNIT_BYTES = 16  # chunks of one group start at multiples of it


@dataclasses.dataclass(frozen=True)
class SizeLimit:
    """A program runs while ``group`` chunks fit one message; 0: it hangs at every size.

    ``most_bytes`` of the whole buffer, inclusive; chunks are equal multiples of 16 bytes up to there.
    """

    group: int
    most_bytes: int
    says: str

    def refuses(self, num_bytes: int, chunks: int, slice_bytes: int = 0) -> str | None:
        """Return why a run of ``num_bytes`` in ``chunks`` chunks would hang, or None."""
        is_even = num_bytes % (chunks * _UNIT_BYTES) == 0
        is_cut = bool(slice_bytes) and num_bytes // chunks * self.group > slice_bytes
        return self.says if num_bytes > self.most_bytes or not is_even or is_cut else None


@cached
def run_limit(algorithm: Algorithm) -> SizeLimit | None:
    """Return what size_limit() says of the executor's own connections. The answer is cached."""
    return size_limit(algorithm)


def size_limit(algorithm: Algorithm, slots: int = RING_SLOTS) -> SizeLimit | None:
    """Return up to which size a program whose structure was checked does not hang; None: it never does."""
    if not _hangs(algorithm, 1, slots):
        return None
    most = min(
        MAX_COUNT, max(step.count for *_, block in algorithm.distinct_blocks() for step in block.steps)
    )
    group = most + 1
    while group > 1 and not _hangs(algorithm, group - 1, slots):
        group -= 1
    if group > most:
        return SizeLimit(0, -1, "")
    payload = SLOT_PAYLOAD_BYTES[algorithm.protocol]
    most_bytes = algorithm.chunks * (payload // group // _UNIT_BYTES * _UNIT_BYTES)
    return SizeLimit(
        group,
        most_bytes,
        f"it would hang from {most_bytes + 1} bytes on, and where chunks are not equal multiples of {_UNIT_BYTES} "
        f"bytes: a connection holds {slots} messages, so {group} chunks must fit one message of {payload} bytes",
    )


class _Counted:
    """A block's state: which step it is at, and which of that step's messages."""

    def __init__(self, rank: int, block: Block, ends: tuple[Connection, Connection], group: int) -> None:
        self.rank = rank
        self.steps = block.steps
        self.incoming, self.outgoing = ends
        self.messages = [-(-step.count // group) for step in block.steps]
        self.step = 0
        self.message = 0


def _hangs(algorithm: Algorithm, group: int, slots: int) -> bool:
    """Return whether some block never ends, with ``group`` chunks in a message."""
    blocks = {
        (r, number): _Counted(r, block, (algorithm.incoming(r, block), algorithm.outgoing(r, block)), group)
        for r, number, block in algorithm.distinct_blocks()
    }
    in_flight: dict[Connection, int] = {}
    waiting: dict[object, list[tuple[int, int]]] = {}
    ready = deque(blocks)
    while ready:
        identity = ready.popleft()
        block = blocks[identity]
        while block.step < len(block.steps):
            lack = _lack(block, blocks, in_flight, slots)
            if lack is not None:
                waiting.setdefault(lack, []).append(identity)
                break
            for woken in _advance(block, identity, in_flight):
                ready.extend(waiting.pop(woken, ()))
    return any(block.step < len(block.steps) for block in blocks.values())


def _lack(
    block: _Counted, blocks: dict[tuple[int, int], _Counted], in_flight: dict[Connection, int], slots: int
) -> object:
    """Return what the block's next message waits for; None: nothing."""
    step = block.steps[block.step]
    if block.message == 0:
        for number, at in step.depends:
            if blocks[block.rank, number].step <= at:
                return block.rank, number, "step", at
    if step.op.receives and not in_flight.get(block.incoming):
        return block.incoming, "message"
    if step.op.sends and in_flight.get(block.outgoing, 0) >= slots:
        return block.outgoing, "slot"
    return None


def _advance(block: _Counted, identity: tuple[int, int], in_flight: dict[Connection, int]) -> list[object]:
    """Move one message on; return what others may have waited for."""
    step = block.steps[block.step]
    woken: list[object] = []
    if step.op.receives:
        in_flight[block.incoming] -= 1
        woken.append((block.incoming, "slot"))
    if step.op.sends:
        in_flight[block.outgoing] = in_flight.get(block.outgoing, 0) + 1
        woken.append((block.outgoing, "message"))
    block.message += 1
    if block.message == block.messages[block.step]:
        woken.append((*identity, "step", block.step))
        block.step, block.message = block.step + 1, 0
    return woken
