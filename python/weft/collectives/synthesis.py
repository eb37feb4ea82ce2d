# SPDX-License-Identifier: Apache-2.0
"""``weft synthesise``: search for an algorithm on a machine whose links are unequal.

    weft synthesise --topology two_boxes.json --collective all_gather --ranks 8 --bytes 1M -o ag.xml

The topology: {"name": "two_boxes", "ranks": 4, "links": [{"src": 0, "dst": 1, "gbs": 25, "us": 1.5, "both": true}]}.
Links that are not listed do not exist. The result is an ordinary program, verified, beside the library's times in the
same model. --bytes is the size of the whole buffer: few bytes give few steps, many give full links.

The search is greedy on a network expanded in time, as TACOS does it (Won et al., MICRO 2024; the sketches of TACCL,
Shah et al., NSDI 2023, and the flows of TE-CCL, Liu et al., SIGCOMM 2024, solve the same problem exactly for fewer
links): of all transfers of a chunk to a rank that lacks it, the next is the one with the least end plus ``weight``
times its duration. A weight of 0 takes what ends first; larger ones keep slow links for what cannot come otherwise.
Chunk counts from few to many stand for SCCL's trade of steps against bandwidth (Cai et al., PPoPP 2021). Several
weights and orders are tried for each, and the least time of the whole is taken, or the first that is within 2 % of
bound_us(), which no schedule is below. Every rank gets every chunk once, so the transfers of a chunk are a tree: turned
around, they reduce.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from weft.collectives.compiler import compile_in_order
from weft.collectives.contract import AllGather, AllReduce, Broadcast, Buffer, Collective, ReduceScatter
from weft.collectives.ir import Algorithm
from weft.collectives.language import Program, Ref
from weft.collectives.library import build, entries
from weft.collectives.xml_write import to_xml
from weft.errors import Error, invalid
from weft.runtime.files import write_file
from weft.runtime.tables import add_wide_argument, integer_from, output_file, size

COLLECTIVES = {
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
}
_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_CHUNKS = (1, 2, 4, 8, 16)
_ORDERS = 8  # of equal choices, where transfers are few
_FEW_TRANSFERS = 400
_ENOUGH = 1.02  # times the bound: nothing better is looked for
_MEASURED = 3  # of the library's algorithms
_IN_PLACE = ("all_reduce", "broadcast")  # the forms that are synthesised
_MOST_CUT = 12  # ranks all of whose cuts are looked at
_MOST_TRANSFERS = 2_000  # of one attempt; larger ones are left out


@dataclasses.dataclass(frozen=True)
class Link:
    """Microseconds until the first byte arrives, and per byte."""

    us: float
    us_per_byte: float

    def takes(self, num_bytes: float) -> float:
        return self.us + num_bytes * self.us_per_byte


@dataclasses.dataclass(frozen=True)
class Network:
    """Directed links of a machine."""

    name: str
    ranks: int
    links: dict[tuple[int, int], Link]

    def reversed(self) -> Network:
        return Network(self.name, self.ranks, {(b, a): link for (a, b), link in self.links.items()})


@dataclasses.dataclass(frozen=True, order=True)
class Transfer:
    """One chunk over one link. ``chunk``: (rank that it belongs to, its number there)."""

    src: int
    dst: int
    chunk: tuple[int, int]
    start_us: float
    end_us: float


def read_network(text: str, file: str) -> Network:
    """Read a topology. Raises: Error, naming the field."""
    try:
        document = json.loads(text)
        ranks = int(document["ranks"])
        links: dict[tuple[int, int], Link] = {}
        for link in document["links"]:
            src, dst, gbs = int(link["src"]), int(link["dst"]), float(link["gbs"])
            if not (0 <= src < ranks and 0 <= dst < ranks and src != dst and gbs > 0):
                raise Error(f"{file}: link {link}: allowed: two ranks below {ranks}, gbs above 0")
            made = Link(float(link.get("us", 1.0)), 1 / (gbs * 1e3))
            links |= {(src, dst): made} | ({(dst, src): made} if link.get("both") else {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error(f"{file}: not a topology: {type(error).__name__}: {error}") from None
    return Network(str(document.get("name", file)), ranks, links)


def synthesise(network: Network, collective: str, num_bytes: int, seed: int = 0) -> Algorithm:
    """Return the best algorithm found for a buffer of ``num_bytes``, verified.

    ``collective``: a key of COLLECTIVES. Raises: Error where some rank cannot be reached.
    """
    if collective not in COLLECTIVES:
        raise invalid("collective", collective, ", ".join(COLLECTIVES))
    best: tuple[float, Algorithm] | None = None
    enough_us = _ENOUGH * bound_us(network, collective, num_bytes)
    for algorithm in _candidates(network, collective, num_bytes, seed):
        us = network_us(algorithm, network, num_bytes)
        if best is None or us < best[0]:
            best = us, algorithm
        if us <= enough_us:
            break
    assert best is not None
    return best[1]


def _candidates(network: Network, collective: str, num_bytes: int, seed: int) -> Iterator[Algorithm]:
    """Yield algorithms of few chunks, which take few steps, and then of more, which fill the links."""
    sources = [0] if collective == "broadcast" else list(range(network.ranks))
    if collective == "all_reduce":
        whole = _shortest(network, sources, 1, num_bytes, seed)[0]
        yield _algorithm(network, "all_reduce at once", 1, whole, whole)
    for chunks in _CHUNKS:
        if chunks > 1 and len(sources) * chunks * network.ranks > _MOST_TRANSFERS:
            return
        chunk_bytes = num_bytes / len(sources) / chunks
        turned = network.reversed()
        gathers = turned if collective == "reduce_scatter" else network
        back = _shortest(turned, sources, chunks, chunk_bytes, seed)[0] if collective == "all_reduce" else ()
        for transfers in _shortest(gathers, sources, chunks, chunk_bytes, seed)[:2]:
            yield _algorithm(network, collective, chunks, transfers, back)


def _shortest(
    network: Network, sources: list[int], chunks: int, chunk_bytes: float, seed: int
) -> list[tuple[Transfer, ...]]:
    """Return what several weights and orders of equal choices give, the first to end first."""
    orders = _ORDERS if len(sources) * chunks * network.ranks <= _FEW_TRANSFERS else 1
    tried = {
        tuple(_gather(network, sources, chunks, chunk_bytes, weight, seed + order))
        for weight in _WEIGHTS
        for order in range(orders)
    }
    return sorted(tried, key=lambda made: (max((t.end_us for t in made), default=0.0), made))


def _gather(
    network: Network, sources: list[int], chunks: int, chunk_bytes: float, weight: float, seed: int
) -> list[Transfer]:
    """Return transfers that bring every source's chunks to all ranks, in order of their start."""
    rng = random.Random(seed)
    arrived: dict[tuple[int, tuple[int, int]], float] = {}
    lacking = {(rank, (s, c)) for rank in range(network.ranks) for s in sources for c in range(chunks)}
    takes = {pair: link.takes(chunk_bytes) for pair, link in network.links.items()}
    busy = {pair: chunk_bytes * link.us_per_byte for pair, link in network.links.items()}
    free: dict[tuple[int, int], float] = defaultdict(float)
    found: list[Transfer] = []
    # The possible next transfers, by the score of their last evaluation; scores only grow, as links fill up.
    heap: list[tuple[float, float, tuple[int, int], tuple[int, int]]] = []
    out: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in sorted(network.links):
        out[pair[0]].append(pair)

    def has(rank: int, chunk: tuple[int, int], at: float) -> None:
        lacking.discard((rank, chunk))
        arrived[rank, chunk] = at
        for pair in out[rank]:
            if (pair[1], chunk) in lacking:
                score = max(at, free[pair]) + takes[pair] * (1 + weight)
                heapq.heappush(heap, (score, rng.random(), pair, chunk))

    for source in sources:
        for c in range(chunks):
            has(source, (source, c), 0.0)
    while heap:
        score, tie, pair, chunk = heapq.heappop(heap)
        if (pair[1], chunk) not in lacking:
            continue
        start = max(arrived[pair[0], chunk], free[pair])
        now = start + takes[pair] * (1 + weight)
        if now > score:
            heapq.heappush(heap, (now, tie, pair, chunk))
            continue
        free[pair] = start + busy[pair]
        found.append(Transfer(*pair, chunk, start, start + takes[pair]))
        has(pair[1], chunk, start + takes[pair])
    if lacking:
        rank, chunk = min(lacking)
        raise Error(f"topology {network.name}: no links lead from rank {chunk[0]} to rank {rank}")
    return sorted(found, key=lambda t: (t.start_us, t.end_us, t.src, t.dst, t.chunk))


def _algorithm(
    network: Network,
    collective: str,
    chunks: int,
    transfers: tuple[Transfer, ...],
    back: tuple[Transfer, ...],
) -> Algorithm:
    """Write the program. ``back``: for all_reduce, transfers on the reversed links, to be turned around."""
    ranks = network.ranks
    contracts: dict[str, Collective] = {
        "all_gather": AllGather(ranks, chunks),
        "reduce_scatter": ReduceScatter(ranks, chunks),
        "all_reduce": AllReduce(ranks, ranks * chunks, inplace=True),
        "all_reduce at once": AllReduce(ranks, chunks, inplace=True),
        "broadcast": Broadcast(ranks, chunks, inplace=True),
    }
    name = f"synthesised_{contracts[collective].name}_{network.name}"
    with Program(name, contracts[collective]) as program:
        if collective == "all_gather":
            for rank in range(ranks):
                _chunk(program, rank, Buffer.input, 0, chunks).copy(
                    *(rank, Buffer.output, rank * chunks), *_local(network)
                )
            _spread(network, program, transfers, Buffer.output, chunks)
        elif collective == "broadcast":
            _spread(network, program, transfers, Buffer.input, chunks)
        elif collective == "all_reduce at once":
            _gather_and_sum(network, program, transfers, chunks)
        elif collective == "reduce_scatter":
            _sum(network, program, transfers, chunks, "sums")
        else:
            _sum(network, program, back, chunks, Buffer.input)
            _spread(network, program, transfers, Buffer.input, chunks)
    return compile_in_order(program)


def _gather_and_sum(network: Network, program: Program, transfers: tuple[Transfer, ...], chunks: int) -> None:
    """Bring every rank's whole buffer to all ranks, which add them up: the fewest steps, and the most bytes."""
    for rank in range(network.ranks):
        own = _chunk(program, rank, Buffer.input, 0, chunks)
        own.copy(rank, "all", rank * chunks, *_local(network))
    _spread(network, program, transfers, "all", chunks)
    for rank in range(network.ranks):
        for other in range(network.ranks):
            if other != rank:
                theirs = _chunk(program, rank, "all", other * chunks, chunks)
                _chunk(program, rank, Buffer.input, 0, chunks).reduce(theirs, *_local(network))


def _spread(
    network: Network, program: Program, transfers: tuple[Transfer, ...], buffer: str, chunks: int
) -> None:
    for t in transfers:
        at = t.chunk[0] * chunks + t.chunk[1]
        _chunk(program, t.src, buffer, at).copy(t.dst, buffer, at, *_hints(network, t.src, t.dst))


def _sum(
    network: Network, program: Program, transfers: tuple[Transfer, ...], chunks: int, buffer: str
) -> None:
    """Turn the trees around: what a rank would have got from its parent it adds to the parent's sum."""
    for t in sorted(transfers, key=lambda t: -t.end_us):
        at = t.chunk[0] * chunks + t.chunk[1]
        place = (t.src, Buffer.output, t.chunk[1]) if t.src == t.chunk[0] else (t.src, buffer, at)
        if buffer == Buffer.input:
            place = t.src, buffer, at
        target = program.chunk(*place)
        if target is None:
            target = _chunk(program, t.src, Buffer.input, at).copy(*place, *_local(network))
        theirs = program.chunk(t.dst, buffer, at) or _chunk(program, t.dst, Buffer.input, at)
        target.reduce(theirs, *_hints(network, t.dst, t.src))


def _chunk(program: Program, rank: int, buffer: str, index: int, count: int = 1) -> Ref:
    ref = program.chunk(rank, buffer, index, count)
    assert ref is not None
    return ref


def _hints(network: Network, src: int, dst: int) -> tuple[int, int, int]:
    """Return the blocks of a link at both ends, and its channel: every link is served on its own."""
    return dst, network.ranks + src, 0


def _local(network: Network) -> tuple[int, int]:
    return 2 * network.ranks, 2 * network.ranks


def network_us(algorithm: Algorithm, network: Network, num_bytes: int) -> float:
    """Return how long an algorithm takes where links alone cost; infinity where it needs one that is missing."""
    return _Traffic(algorithm, network, num_bytes).play()


class _Traffic:
    """An algorithm's steps on a clock that only links move. The step that can start first goes first."""

    def __init__(self, algorithm: Algorithm, network: Network, num_bytes: int) -> None:
        self._links = network.links
        self._chunk_bytes = num_bytes / algorithm.chunks
        self._blocks = {(rank, number): block for rank, number, block in algorithm.blocks()}
        self._ends: dict[tuple[int, int], list[float]] = {identity: [] for identity in self._blocks}
        self._free: dict[tuple[int, int], float] = defaultdict(float)
        self._messages: dict[tuple[int, int, int], deque[float]] = defaultdict(deque)
        self._waiting: dict[object, list[tuple[int, int]]] = defaultdict(list)

    def play(self) -> float:
        ready: list[tuple[float, tuple[int, int]]] = []
        changed = list(self._blocks)
        while changed or ready:
            for identity in changed:
                start = self._start_us(identity)
                if start is not None:
                    heapq.heappush(ready, (start, identity))
            if not ready:
                break
            start, identity = heapq.heappop(ready)
            block = self._blocks[identity]
            if (
                block.steps[len(self._ends[identity])].op.sends
                and (identity[0], block.send) not in self._links
            ):
                return float("inf")
            changed = [identity, *self._take(start, identity)]
        return max((times[-1] for times in self._ends.values() if times), default=0.0)

    def _start_us(self, identity: tuple[int, int]) -> float | None:
        """Return when a block's next step can start; None: it is done, or waits."""
        block, mine = self._blocks[identity], self._ends[identity]
        if len(mine) == len(block.steps):
            return None
        step = block.steps[len(mine)]
        start = mine[-1] if mine else 0.0
        for other, at in step.depends:
            theirs = self._ends[identity[0], other]
            if len(theirs) <= at:
                self._waiting[identity[0], other, "step"].append(identity)
                return None
            start = max(start, theirs[at])
        if step.op.receives:
            key = block.recv, identity[0], block.channel
            if not self._messages[key]:
                self._waiting[key].append(identity)
                return None
            start = max(start, self._messages[key][0])
        return start

    def _take(self, start: float, identity: tuple[int, int]) -> list[tuple[int, int]]:
        """Take a block's next step; return the blocks that may have waited for it."""
        rank, block = identity[0], self._blocks[identity]
        step = block.steps[len(self._ends[identity])]
        if step.op.receives:
            self._messages[block.recv, rank, block.channel].popleft()
        end, woken = start, self._waiting.pop((*identity, "step"), [])
        if step.op.sends:
            pair, key = (rank, block.send), (rank, block.send, block.channel)
            link = self._links[pair]
            begin = max(start, self._free[pair])
            end = self._free[pair] = begin + step.count * self._chunk_bytes * link.us_per_byte
            self._messages[key].append(end + link.us)
            woken = woken + self._waiting.pop(key, [])
        self._ends[identity].append(end)
        return woken


def bound_us(network: Network, collective: str, num_bytes: int) -> float:
    """Return a time that no schedule of these links is below: that of the worst cut between two sets of ranks.

    What the ranks of one set alone hold, or their sum, must cross to the others: over all links of the cut at once,
    and nothing arrives before the least latency. Beside cuts, the farthest rank is as many latencies away as the
    shortest way to it has. All cuts up to 12 ranks; of more ranks, those that part one rank from the others.
    """
    ranks = network.ranks
    sets = range(1, (1 << ranks) - 1) if ranks <= _MOST_CUT else [1 << rank for rank in range(ranks)]
    whole = (1 << ranks) - 1
    members = {*sets, *(whole ^ one for one in sets)}
    return max(
        _farthest_us(network, collective),
        *(_cut_us(network, collective, num_bytes, inside) for inside in members),
    )


def _cut_us(network: Network, collective: str, num_bytes: int, inside: int) -> float:
    """Return the least time in which what the set's ranks (bits) have reaches the others."""
    count = inside.bit_count()
    share = {
        "all_gather": count / network.ranks,  # the inside's parts
        "reduce_scatter": 1 - count / network.ranks,  # the inside's sums of the others' parts
        "all_reduce": 1.0,
        "broadcast": float(inside & 1),
    }[collective]
    across = [
        link for (src, dst), link in network.links.items() if inside >> src & 1 and not inside >> dst & 1
    ]
    if share == 0:
        return 0.0
    if not across:
        return float("inf")
    return min(link.us for link in across) + share * num_bytes / sum(1 / link.us_per_byte for link in across)


def _farthest_us(network: Network, collective: str) -> float:
    """Return the latency of the longest of the shortest ways between ranks."""
    ranks = range(network.ranks)
    away = {pair: link.us for pair, link in network.links.items()} | {(rank, rank): 0.0 for rank in ranks}
    for via in ranks:
        for src in ranks:
            for dst in ranks:
                us = away.get((src, via), float("inf")) + away.get((via, dst), float("inf"))
                away[src, dst] = min(us, away.get((src, dst), float("inf")))
    return max(away[src, dst] for src in ([0] if collective == "broadcast" else ranks) for dst in ranks)


def library_us(network: Network, collective: str, num_bytes: int) -> list[tuple[float, str]]:
    """Return the library's algorithms for a collective and their times, the least first; no time: it cannot run."""
    return [(us, algorithm.name) for us, algorithm in _library(network, collective, num_bytes)]


def _library(network: Network, collective: str, num_bytes: int) -> list[tuple[float, Algorithm]]:
    found = []
    for name, entry in entries().items():
        if entry.collective != COLLECTIVES[collective] or not entry.applies(network.ranks):
            continue
        try:
            algorithm = build(name, network.ranks, inplace=collective in _IN_PLACE).compile()
        except Error:
            continue
        found.append((network_us(algorithm, network, num_bytes), algorithm))
    return sorted(found, key=lambda one: (one[0], one[1].name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--topology", required=True, metavar="FILE", help="JSON: ranks and links")
    parser.add_argument("--collective", choices=sorted(COLLECTIVES), required=True)
    parser.add_argument("--ranks", type=integer_from(1), default=0, help="default: the topology's")
    parser.add_argument("--bytes", type=size, default="1M", help="of the whole buffer")
    parser.add_argument("--seed", type=int, default=0, help="of the order among equal choices")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the algorithm there as XML")
    parser.add_argument(
        "--measure",
        type=integer_from(1),
        default=0,
        metavar="N",
        help="run it and the library's best three N times, in turns, on CPU ranks whose links are as slow as those of "
        "the topology; choose delays that are large against this machine's noise",
    )
    add_wide_argument(parser)
    parser.add_argument(
        "--json", metavar="FILE", type=output_file, help="with --measure: write the result there as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Search, compare and write. Returns 0. Raises: Error."""
    path = Path(args.topology)
    network = read_network(path.read_text(), path.name)
    if args.ranks not in (0, network.ranks):
        raise invalid("ranks", args.ranks, f"{network.ranks}, as {path.name} says")
    algorithm = synthesise(network, args.collective, args.bytes, args.seed)
    if args.output:
        write_file(Path(args.output), to_xml(algorithm))
    steps = sum(1 for _ in algorithm.steps())
    us = network_us(algorithm, network, args.bytes)
    print(f"{algorithm.name}: {us:.1f} us predicted, {algorithm.chunks} chunks, {steps} steps, verified")
    print(
        f"  no schedule of these links takes less than {bound_us(network, args.collective, args.bytes):.1f} us"
    )
    library = _library(network, args.collective, args.bytes)
    for theirs, other in library:
        said = "needs a link that is not there" if theirs == float("inf") else f"{theirs:.1f} us predicted"
        print(f"  {other.name}: {said}")
    if args.measure:
        can_run = [(theirs, other) for theirs, other in library if theirs != float("inf")]
        _measure(network, args, [(us, algorithm), *can_run[:_MEASURED]])
    return 0


def _measure(network: Network, args: argparse.Namespace, rows: list[tuple[float, Algorithm]]) -> None:
    from weft.bench.collective.slow_links import measure, report

    links = {pair: (link.us, link.us_per_byte) for pair, link in network.links.items()}
    samples = measure([algorithm for _, algorithm in rows], links, args.bytes, args.measure)
    measured = [(algorithm.name, us, mine) for (us, algorithm), mine in zip(rows, samples, strict=True)]
    report(network.name, args.collective, args.bytes, measured, args.json, args.wide)
