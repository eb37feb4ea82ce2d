# SPDX-License-Identifier: Apache-2.0
"""The cost model: how long an algorithm should take on a machine, by playing its steps on a clock.

A message takes the link's latency plus its bytes over the link's bandwidth; a block does one thing at a time; all
messages out of a rank share its egress; slices of a chunk overlap. It ranks candidates that nobody has measured, and
feeds ``weft show``; measurement decides.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from weft.collectives.ir import Algorithm, Op


@dataclasses.dataclass(frozen=True)
class Machine:
    """Latency in microseconds, bandwidths in GB/s (10^9 bytes)."""

    name: str
    launch_us: float
    message_us: float
    egress_gbs: float
    block_gbs: float  # of one thread block
    local_gbs: float  # copies and reductions inside a rank, of one block
    ll_factor: float  # wire bytes per byte with LL
    simple_sync_us: float  # what Simple's separate flag adds


CPU = Machine("cpu", 5.0, 2.0, 4.0, 4.0, 4.0, 2.0, 0.5)
NVLINK = Machine("nvlink", 3.0, 1.3, 330.0, 25.0, 60.0, 2.0, 1.0)
_LL128_FACTOR = 128 / 120


@dataclasses.dataclass(frozen=True)
class Event:
    """A step on the clock, in microseconds from the start of one slice of every chunk."""

    rank: int
    block: int
    step: int
    start_us: float
    end_us: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the model says about one call."""

    total_us: float
    events: tuple[Event, ...]
    link_bytes: dict[tuple[int, int], int]
    critical_steps: int


def estimate(algorithm: Algorithm, num_bytes: int, machine: Machine, slice_bytes: int = 1 << 18) -> Estimate:
    """Play one slice of ``algorithm`` for an algorithm buffer of ``num_bytes`` and add the slices that follow."""
    chunk = max(1, -(-num_bytes // algorithm.chunks))
    piece = min(chunk, slice_bytes)
    clock = _Clock(algorithm, piece, machine)
    events = clock.play()
    first = max((event.end_us for event in events), default=0.0)
    slices = -(-chunk // piece)
    busiest = max((clock.busy_us(rank) for rank in range(algorithm.num_ranks)), default=0.0)
    links: dict[tuple[int, int], int] = defaultdict(int)
    for rank, _, block in algorithm.blocks():
        for step in block.steps:
            if step.op.sends:
                links[rank, block.send] += step.count * chunk
    total = machine.launch_us + first + (slices - 1) * busiest
    return Estimate(total, tuple(events), dict(links), clock.critical_steps)


class _Clock:
    def __init__(self, algorithm: Algorithm, piece: int, machine: Machine) -> None:
        self._algorithm = algorithm
        self._piece = piece
        self._machine = machine
        self._wire = {"Simple": 1.0, "LL": machine.ll_factor, "LL128": _LL128_FACTOR}[algorithm.protocol]
        self._sync = machine.simple_sync_us if algorithm.protocol == "Simple" else 0.0
        self._free: dict[tuple[int, int], float] = defaultdict(float)
        self._egress: dict[int, float] = defaultdict(float)
        self._block_busy: dict[tuple[int, int], float] = defaultdict(float)
        self._done: dict[tuple[int, int, int], float] = {}
        self._depth: dict[tuple[int, int, int], int] = {}
        self._messages: dict[tuple[int, int, int], list[tuple[float, int]]] = defaultdict(list)
        self.critical_steps = 0

    def play(self) -> list[Event]:
        """Return all steps with their times; ends early where the algorithm deadlocks."""
        events: list[Event] = []
        position = {(rank, number): 0 for rank, number, _ in self._algorithm.blocks()}
        taken: dict[tuple[int, int, int], int] = defaultdict(int)
        progress = True
        while progress:
            progress = False
            for rank, number, block in self._algorithm.blocks():
                while position[rank, number] < len(block.steps):
                    event = self._try(rank, number, position[rank, number], taken)
                    if event is None:
                        break
                    events.append(event)
                    position[rank, number] += 1
                    progress = True
        self.critical_steps = max(self._depth.values(), default=0)
        return events

    def busy_us(self, rank: int) -> float:
        """Return how long the busiest resource of a rank works on one slice."""
        blocks = [busy for (owner, _), busy in self._block_busy.items() if owner == rank]
        return max([*blocks, self._egress_work(rank)], default=0.0)

    def _egress_work(self, rank: int) -> float:
        sent = sum(step.count for r, _, _, step in self._algorithm.steps() if r == rank and step.op.sends)
        return sent * self._piece * self._wire / (self._machine.egress_gbs * 1e3)

    def _try(self, rank: int, number: int, at: int, taken: dict[tuple[int, int, int], int]) -> Event | None:
        block = self._algorithm.ranks[rank].blocks[number]
        step = block.steps[at]
        before = [(rank, *dep) for dep in step.depends]
        if any(key not in self._done for key in before):
            return None
        ready = max([self._free[rank, number], *(self._done[key] for key in before)])
        depth = max([self._depth[key] for key in before], default=0)
        if at:
            depth = max(depth, self._depth[rank, number, at - 1])
        if step.op.receives:
            key = (block.recv, rank, block.channel)
            if taken[key] >= len(self._messages[key]):
                return None
            arrives, sender_depth = self._messages[key][taken[key]]
            taken[key] += 1
            ready, depth = max(ready, arrives), max(depth, sender_depth)
        end = ready + self._work_us(step.op, step.count)
        if step.op.sends:
            wire = step.count * self._piece * self._wire / (self._machine.egress_gbs * 1e3)
            self._egress[rank] = max(self._egress[rank], ready) + wire
            end = max(end, self._egress[rank])
            arrival = end + self._machine.message_us + self._sync
            self._messages[rank, block.send, block.channel].append((arrival, depth + 1))
        self._block_busy[rank, number] += end - ready
        self._free[rank, number] = end
        self._done[rank, number, at] = end
        self._depth[rank, number, at] = depth + 1
        return Event(rank, number, at, ready, end)

    def _work_us(self, op: Op, count: int) -> float:
        is_local = op in (Op.COPY, Op.REDUCE)
        rate = self._machine.local_gbs if is_local else self._machine.block_gbs / self._wire
        return count * self._piece / (rate * 1e3) + self._sync
