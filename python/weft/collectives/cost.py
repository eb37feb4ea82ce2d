# SPDX-License-Identifier: Apache-2.0
"""The cost model: how long an algorithm should take on a machine, by playing its steps on a clock.

A message takes the link's latency plus its bytes over the link's bandwidth; a block does one thing at a time; all
messages out of a rank share its egress, and on GPUs all into a rank its ingress; slices of a chunk overlap. Where
ranks read each other's memory (the CPU), a message that may be referred to costs its sender the notice alone
(``weft.collectives.direct``). On GPUs that depends on where the buffers are, and ranks need not agree on it. So there
the model takes all messages through their slots. Between nodes (``Machine.per_node``) nothing is referred to, and a
byte costs both ends the work of the network.
The model ranks candidates that nobody has measured, and feeds ``weft show``; measurement decides.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque

from weft.collectives.direct import DirectMessages, direct_messages
from weft.collectives.exchanges import LINES, PLACES
from weft.collectives.ir import Algorithm, Block, Op, Step


@dataclasses.dataclass(frozen=True)
class Machine:
    """Latency in microseconds, bandwidths in GB/s (10^9 bytes)."""

    name: str
    launch_us: float
    message_us: float
    egress_gbs: float
    block_gbs: float  # of one thread block
    local_gbs: float  # copies and reductions inside a rank, of one block
    ll_factor: float  # bytes on the link per byte, with LL
    simple_sync_us: float  # what Simple's separate flag adds
    refer_bytes: int = 0  # least message that is referred to wherever the program allows it; 0: none is
    one_thread: bool = False  # the blocks of a rank take turns
    step_us: float = 0.0  # of a step besides: its look, its barriers, its notices
    per_node: int = 0  # ranks that map each other, one node after the other; 0: all do
    port_message_us: float = 20.0  # between nodes
    # Of the block that sends, and of the one that receives: copies, the network's work; and of a message besides.
    port_gbs: float = 0.75
    port_step_us: float = 10.0

    def is_port(self, rank: int, peer: int) -> bool:
        """Whether a message between the two crosses the network."""
        return self.per_node > 0 and rank // self.per_node != peer // self.per_node


# Fitted by `python -m weft.bench.collective.fit --machine bench/results/tune/cpu-2core-2-ranks.measured.json`;
# port_step_us to all_to_all of 64 KiB to 4 MiB over 2 x 2 ranks and tcp (docs/decisions/0075).
CPU = Machine(
    "cpu", 6.3, 2.0, 6.2, 6.2, 6.2, 5.6, 0.05, refer_bytes=16 << 10, one_thread=True, port_step_us=60.0
)
# Of programs, whose messages go through slots: a block moves 9 GB/s (send_recv and broadcast of 32 MiB on 2 H100,
# bench/results/h100-x2-nccl-tests.json). Exchanges have costs of their own below.
NVLINK = Machine("nvlink", 6.0, 1.3, 260.0, 9.0, 60.0, 2.0, 1.0, step_us=3.0)
MACHINES = {"cpu": CPU, "nvlink": NVLINK}
_LL128_FACTOR = 128 / 120
_SLICE_BYTES = 1 << 18
_REFERRED_SLICE_BYTES = 4 << 20  # of programs that refer to everything and only copy
_NOTHING_DIRECT = DirectMessages({}, frozenset())


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
    """The model's estimate of one call."""

    total_us: float
    events: tuple[Event, ...]
    link_bytes: dict[tuple[int, int], int]
    critical_steps: int


@dataclasses.dataclass(frozen=True)
class _Played:
    """One slice of every chunk: when the last step ends, and how long the busiest block, egress or thread works."""

    algorithm: Algorithm  # what it is kept under is its id()
    first_us: float
    busiest_us: float


_played: dict[tuple[int, int, Machine], _Played] = {}
_MOST_PLAYED = 1024


def predict_us(algorithm: Algorithm, num_bytes: int, machine: Machine) -> float:
    """Return estimate().total_us; what sizes of more than one slice have in common is worked out once."""
    chunk, piece, direct = _pieces(algorithm, num_bytes, machine, _SLICE_BYTES)
    key = id(algorithm), piece, machine
    known = _played.get(key)
    if known is None:
        clock = _Clock(algorithm, piece, machine, direct)
        events = clock.play()
        if len(_played) >= _MOST_PLAYED:
            _played.clear()
        known = _played[key] = _Played(algorithm, _last_us(events), clock.busiest_us())
    return _total_us(machine, known.first_us, known.busiest_us, chunk, piece)


# Of the exchange kernel over NVLink, by algorithm and way: microseconds of the least call, and GB/s of what a rank
# sends beyond it; `python -m weft.bench.collective.fit` makes such figures from results. These are fitted to 4 H200 in
# CUDA graphs (bench/results/h200-x4-exchanges.json): lines up to 2 MiB, places up to 64 MiB, the one-step all_reduce
# around 64 KiB, where it ends; the GB/s of all_reduce's places are from a later run, h200-x4-collective.json. The
# selector never prefers stages: on 2 H200 all_reduce takes longer through them at every size, in one run
# (h200-x2-collective-staged.json).
_EXCHANGE_COSTS = {
    ("allreduce_1step", LINES): (4.3, 65.0),
    ("allreduce_allpairs", LINES): (6.0, 135.0),
    ("allreduce_allpairs", PLACES): (7.9, 326.0),
    ("allgather_allpairs", LINES): (4.3, 115.0),
    ("allgather_allpairs", PLACES): (8.4, 325.0),
    ("reducescatter_allpairs", LINES): (4.2, 115.0),
    ("reducescatter_allpairs", PLACES): (7.4, 300.0),
    ("alltoall_allpairs", LINES): (4.2, 115.0),
    ("alltoall_allpairs", PLACES): (8.5, 325.0),
    # Not fitted: those of the symmetric calls that move data in the same manner, bulk copies or loads.
    ("broadcast_flat", LINES): (4.3, 115.0),
    ("broadcast_flat", PLACES): (8.4, 325.0),
    ("reduce_flat", LINES): (4.2, 115.0),
    ("reduce_flat", PLACES): (7.4, 300.0),
    ("gather_flat", LINES): (4.3, 115.0),
    ("gather_flat", PLACES): (8.4, 325.0),
    ("scatter_flat", LINES): (4.2, 115.0),
    ("scatter_flat", PLACES): (8.5, 325.0),
}


def predict_exchange_us(algorithm: Algorithm, way: int, num_bytes: int) -> float:
    """Return the predicted time of the exchange kernel over NVLink for the collective of ``algorithm``, in that way."""
    least_us, sent_gbs = _EXCHANGE_COSTS[algorithm.name, way]
    return least_us + sent_bytes(algorithm.name, algorithm.num_ranks, num_bytes, way) / (sent_gbs * 1e3)


def sent_bytes(name: str, ranks: int, num_bytes: int, way: int = PLACES) -> float:
    """Return the bytes that the busiest rank sends, or receives, in the exchange for algorithm ``name``.

    ``num_bytes``: of the algorithm's buffer, which is one part of a gather or scatter.
    """
    if name in ("broadcast_flat", "reduce_flat"):  # in shares, but for lines, from or to the root
        return num_bytes * (ranks - 1 if way == LINES else 1)
    if name in ("gather_flat", "scatter_flat"):
        return num_bytes * (ranks - 1)
    share = num_bytes * (ranks - 1) / ranks
    return share * {"allreduce_1step": ranks, "allreduce_allpairs": 2}.get(name, 1)


def estimate(
    algorithm: Algorithm, num_bytes: int, machine: Machine, slice_bytes: int = _SLICE_BYTES
) -> Estimate:
    """Play one slice of ``algorithm`` for an algorithm buffer of ``num_bytes`` and add the slices that follow."""
    chunk, piece, direct = _pieces(algorithm, num_bytes, machine, slice_bytes)
    clock = _Clock(algorithm, piece, machine, direct)
    events = clock.play()
    links: dict[tuple[int, int], int] = defaultdict(int)
    for rank, _, block in algorithm.blocks():
        for step in block.steps:
            if step.op.sends:
                links[rank, block.send] += step.count * chunk
    total = _total_us(machine, _last_us(events), clock.busiest_us(), chunk, piece)
    return Estimate(total, tuple(events), dict(links), clock.critical_steps)


def _pieces(
    algorithm: Algorithm, num_bytes: int, machine: Machine, slice_bytes: int
) -> tuple[int, int, DirectMessages]:
    """Return the bytes of a chunk and of a slice, and which messages are referred to."""
    chunk = max(1, -(-num_bytes // algorithm.chunks))
    direct = _NOTHING_DIRECT
    if machine.refer_bytes and chunk >= machine.refer_bytes and algorithm.protocol == "Simple":
        direct = direct_messages(algorithm)
    # Over ports messages must fit slots.
    has_long_messages = direct.refers_only and not machine.per_node
    return chunk, min(chunk, _REFERRED_SLICE_BYTES if has_long_messages else slice_bytes), direct


def _last_us(events: list[Event]) -> float:
    return max((event.end_us for event in events), default=0.0)


def _total_us(machine: Machine, first_us: float, busiest_us: float, chunk: int, piece: int) -> float:
    return machine.launch_us + first_us + (-(-chunk // piece) - 1) * busiest_us


class _Connection:
    """Messages under way: when each arrives, and how many steps led to it."""

    def __init__(self) -> None:
        self.messages: deque[tuple[float, int]] = deque()


class _BlockState:
    """A block on the clock: its steps that are done, when each ended, and how many steps led to it."""

    def __init__(self, rank: int, number: int, block: Block, out: _Connection, into: _Connection) -> None:
        self.rank, self.number, self.steps = rank, number, block.steps
        self.to, self.come_from = block.send, block.recv
        self.out, self.into = out, into
        self.ends: list[float] = []
        self.depths: list[int] = []
        self.busy_us = 0.0


class _Clock:
    def __init__(self, algorithm: Algorithm, piece: int, machine: Machine, direct: DirectMessages) -> None:
        self._machine = machine
        self._direct = direct
        overhead = {"Simple": 1.0, "LL": machine.ll_factor, "LL128": _LL128_FACTOR}[algorithm.protocol]
        self._sync = machine.simple_sync_us if algorithm.protocol == "Simple" else 0.0
        self._link_us = piece * overhead / (machine.egress_gbs * 1e3)  # of one chunk
        self._local_us = piece / (machine.local_gbs * 1e3)
        self._block_us = piece * overhead / (machine.block_gbs * 1e3)
        self._port_us = piece / (machine.port_gbs * 1e3)
        self._egress = [0.0] * algorithm.num_ranks
        self._sent_us = [0.0] * algorithm.num_ranks
        self._ingress = [0.0] * algorithm.num_ranks
        self._came_us = [0.0] * algorithm.num_ranks
        self._thread = [0.0] * algorithm.num_ranks
        self._worked_us = [0.0] * algorithm.num_ranks
        connections: dict[tuple[int, int, int], _Connection] = defaultdict(_Connection)
        self._blocks = [
            _BlockState(
                *(rank, number, block),
                connections[rank, block.send, block.channel],
                connections[block.recv, rank, block.channel],
            )
            for rank, number, block in algorithm.blocks()
        ]
        self._block_of = {(block.rank, block.number): block for block in self._blocks}
        self.critical_steps = 0

    def play(self) -> list[Event]:
        """Return all steps with their times; ends early where the algorithm deadlocks."""
        events: list[Event] = []
        waiting = self._blocks
        while waiting:
            before = len(events)
            for block in waiting:
                while len(block.ends) < len(block.steps):
                    event = self._try(block, block.steps[len(block.ends)])
                    if event is None:
                        break
                    events.append(event)
            if len(events) == before:
                break
            waiting = [block for block in waiting if len(block.ends) < len(block.steps)]
        self.critical_steps = max((depth for block in self._blocks for depth in block.depths), default=0)
        return events

    def busiest_us(self) -> float:
        """Return how long the busiest block, rank's egress or rank's only thread works on one slice."""
        busy = (block.busy_us for block in self._blocks)
        return max([*busy, *self._sent_us, *self._came_us, *self._worked_us], default=0.0)

    def _try(self, block: _BlockState, step: Step) -> Event | None:
        at = len(block.ends)
        ready, depth = (block.ends[-1], block.depths[-1]) if at else (0.0, 0)
        for number, needed in step.depends:
            other = self._block_of[block.rank, number]
            if len(other.ends) <= needed:
                return None
            ready, depth = max(ready, other.ends[needed]), max(depth, other.depths[needed])
        if step.op.receives:
            if not block.into.messages:
                return None
            arrives, sender_depth = block.into.messages.popleft()
            ready, depth = max(ready, arrives), max(depth, sender_depth)
        send = self._direct.sends.get((block.rank, block.number, at))
        to_port = step.op.sends and self._machine.is_port(block.rank, block.to)
        from_port = step.op.receives and self._machine.is_port(block.rank, block.come_from)
        is_referred = send is not None and send.may_refer and not to_port
        port_us = self._machine.port_step_us + step.count * self._port_us
        work_us = self._work_us(step, is_referred) + (to_port + from_port) * port_us
        if self._machine.one_thread:
            ready = max(ready, self._thread[block.rank])
            self._thread[block.rank] = ready + work_us
            self._worked_us[block.rank] += work_us
        end = ready + work_us
        if step.op.sends:
            came = 0.0
            if not is_referred:
                link_us = step.count * self._link_us
                self._sent_us[block.rank] += link_us
                self._egress[block.rank] = max(self._egress[block.rank], ready) + link_us
                end = max(end, self._egress[block.rank])
                if not self._machine.one_thread:
                    starts = max(self._ingress[block.to], self._egress[block.rank] - link_us)
                    came = self._ingress[block.to] = starts + link_us
                    self._came_us[block.to] += link_us
            travels_us = self._machine.port_message_us if to_port else self._machine.message_us
            block.out.messages.append((max(end, came) + travels_us + self._sync, depth + 1))
        block.busy_us += end - ready
        block.ends.append(end)
        block.depths.append(depth + 1)
        return Event(block.rank, block.number, at, ready, end)

    def _work_us(self, step: Step, is_referred: bool) -> float:
        if is_referred and step.op is Op.SEND:
            return self._sync + self._machine.step_us
        is_local = step.op in (Op.COPY, Op.REDUCE)
        work_us = step.count * (self._local_us if is_local else self._block_us)
        return work_us + self._sync + self._machine.step_us
