# SPDX-License-Identifier: Apache-2.0
"""``weft synthesise``: search for an algorithm on a machine whose links are unequal.

    weft synthesise --topology two_boxes.json --collective all_gather --ranks 8 --bytes 1M -o ag.xml

The topology: {"name": "two_boxes", "ranks": 4, "links": [{"src": 0, "dst": 1, "gbs": 25, "us": 1.5, "both": true}]}.
Links that are not listed do not exist. What comes out is an ordinary program, verified, beside the library's times in
the same model; --bytes says for which size of the whole buffer: few bytes give few steps, many give full links.

The search is greedy on a clock: of all transfers of a chunk to a rank that lacks it, the next is the one with the least
end plus ``weight`` times its duration. A weight of 0 takes what ends first; larger ones keep slow links for what cannot
come otherwise. Several weights and chunk counts are tried, and the least time of the whole is taken. Every rank gets
every chunk once, so the transfers of a chunk are a tree: turned around, they reduce. A heuristic; no bound is proven.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections import defaultdict
from pathlib import Path

from weft.bench.collective import size
from weft.collectives.compiler import compile_in_order
from weft.collectives.contract import AllGather, AllReduce, Broadcast, Buffer, Collective, ReduceScatter
from weft.collectives.ir import Algorithm, Block
from weft.collectives.language import Program, Ref
from weft.collectives.library import build, entries
from weft.collectives.xml import to_xml
from weft.errors import Error, invalid

COLLECTIVES = {
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
}
_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_CHUNKS = (1, 2, 4)
_MEASURED = 3  # of the library's algorithms
_IN_PLACE = ("all_reduce", "broadcast")  # the forms that are synthesised
_MOST_TRANSFERS = 20_000  # of one attempt; larger ones are left out


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


@dataclasses.dataclass(frozen=True)
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
    sources = [0] if collective == "broadcast" else list(range(network.ranks))
    gathers = network.reversed() if collective == "reduce_scatter" else network
    for chunks in _CHUNKS:
        if len(sources) * chunks * network.ranks > _MOST_TRANSFERS and chunks > 1:
            continue
        chunk_bytes = num_bytes / len(sources) / chunks
        tried = {tuple(_gather(gathers, sources, chunks, chunk_bytes, weight, seed)) for weight in _WEIGHTS}
        for transfers in sorted(tried, key=lambda made: max(t.end_us for t in made))[:3]:
            back = transfers
            if collective == "all_reduce":
                back = tuple(_gather(network.reversed(), sources, chunks, chunk_bytes, 1.0, seed))
            algorithm = _algorithm(network, collective, chunks, transfers, back)
            us = network_us(algorithm, network, num_bytes)
            if best is None or us < best[0]:
                best = us, algorithm
    assert best is not None
    return best[1]


def _gather(
    network: Network, sources: list[int], chunks: int, chunk_bytes: float, weight: float, seed: int
) -> list[Transfer]:
    """Return transfers that bring every source's chunks to all ranks, in order of their start."""
    rng = random.Random(seed)
    arrived = {(rank, (rank, c)): 0.0 for rank in sources for c in range(chunks)}
    lacking = {(rank, (s, c)) for rank in range(network.ranks) for s in sources for c in range(chunks)}
    lacking -= arrived.keys()
    tie = {(pair, chunk): rng.random() for pair in network.links for _, chunk in arrived}
    takes = {pair: link.takes(chunk_bytes) for pair, link in network.links.items()}
    busy = {pair: chunk_bytes * link.us_per_byte for pair, link in network.links.items()}
    free: dict[tuple[int, int], float] = defaultdict(float)
    found: list[Transfer] = []
    while lacking:
        best: tuple[float, float, tuple[int, int], tuple[int, int], float] | None = None
        for rank, chunk in lacking:
            for pair in _into(network, rank):
                at = arrived.get((pair[0], chunk))
                if at is None:
                    continue
                start = max(at, free[pair])
                score = start + takes[pair] * (1 + weight)
                if best is None or (score, tie[pair, chunk]) < best[:2]:
                    best = score, tie[pair, chunk], pair, chunk, start
        if best is None:
            rank, chunk = min(lacking)
            raise Error(f"topology {network.name}: no links lead from rank {chunk[0]} to rank {rank}")
        _, _, pair, chunk, start = best
        end = start + takes[pair]
        free[pair] = start + busy[pair]
        arrived[pair[1], chunk] = end
        lacking.discard((pair[1], chunk))
        found.append(Transfer(*pair, chunk, start, end))
    return sorted(found, key=lambda t: (t.start_us, t.end_us, t.src, t.dst, t.chunk))


def _into(network: Network, rank: int) -> list[tuple[int, int]]:
    return [(src, rank) for src in range(network.ranks) if (src, rank) in network.links]


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
        "broadcast": Broadcast(ranks, chunks, inplace=True),
    }
    with Program(f"synthesised_{COLLECTIVES[collective]}_{network.name}", contracts[collective]) as program:
        if collective == "all_gather":
            for rank in range(ranks):
                _chunk(program, rank, Buffer.input, 0, chunks).copy(
                    *(rank, Buffer.output, rank * chunks), *_local(network)
                )
            _spread(network, program, transfers, Buffer.output, chunks)
        elif collective == "broadcast":
            _spread(network, program, transfers, Buffer.input, chunks)
        elif collective == "reduce_scatter":
            _sum(network, program, transfers, chunks, "sums")
        else:
            _sum(network, program, back, chunks, Buffer.input)
            _spread(network, program, transfers, Buffer.input, chunks)
    return compile_in_order(program)


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
    chunk_bytes = num_bytes / algorithm.chunks
    lanes = [(rank, number, block) for rank, number, block in algorithm.blocks()]
    ends: dict[tuple[int, int], list[float]] = {(rank, number): [] for rank, number, _ in lanes}
    free: dict[tuple[int, int], float] = defaultdict(float)
    messages: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    taken: dict[tuple[int, int, int], int] = defaultdict(int)
    while True:
        # The step that can start first goes first, as links serve whoever comes.
        ready = [
            (start, rank, number, block)
            for rank, number, block in lanes
            if (start := _ready_us(rank, number, block, ends, messages, taken)) is not None
        ]
        if not ready:
            break
        start, rank, number, block = min(ready, key=lambda one: one[:3])
        step = block.steps[len(ends[rank, number])]
        if step.op.receives:
            taken[block.recv, rank, block.channel] += 1
        end = start
        if step.op.sends:
            pair = rank, block.send
            link = network.links.get(pair)
            if link is None:
                return float("inf")
            begin = max(start, free[pair])
            end = free[pair] = begin + step.count * chunk_bytes * link.us_per_byte
            messages[rank, block.send, block.channel].append(end + link.us)
        ends[rank, number].append(end)
    return max((times[-1] for times in ends.values() if times), default=0.0)


def _ready_us(
    rank: int,
    number: int,
    block: Block,
    ends: dict[tuple[int, int], list[float]],
    messages: dict[tuple[int, int, int], list[float]],
    taken: dict[tuple[int, int, int], int],
) -> float | None:
    """Return when a block's next step can start; None: it is done, or waits."""
    mine = ends[rank, number]
    if len(mine) == len(block.steps):
        return None
    step = block.steps[len(mine)]
    start = mine[-1] if mine else 0.0
    for other, at in step.depends:
        if len(ends[rank, other]) <= at:
            return None
        start = max(start, ends[rank, other][at])
    if step.op.receives:
        key = block.recv, rank, block.channel
        if len(messages[key]) <= taken[key]:
            return None
        start = max(start, messages[key][taken[key]])
    return start


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
    parser.add_argument("--ranks", type=int, default=0, help="default: the topology's")
    parser.add_argument("--bytes", type=size, default="1M", help="of the whole buffer")
    parser.add_argument("--seed", type=int, default=0, help="of the order among equal choices")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the algorithm there as XML")
    parser.add_argument(
        "--measure",
        type=int,
        default=0,
        metavar="N",
        help="run it and the library's best three N times, in turns, on CPU ranks whose links are as slow as those of "
        "the topology; choose delays that are large against this machine's noise",
    )
    parser.add_argument("--json", metavar="FILE", help="with --measure: write the result there as JSON")


def run(args: argparse.Namespace) -> int:
    """Search, compare and write. Returns 0. Raises: Error."""
    path = Path(args.topology)
    network = read_network(path.read_text(), path.name)
    if args.ranks not in (0, network.ranks):
        raise invalid("ranks", args.ranks, f"{network.ranks}, as {path.name} says")
    algorithm = synthesise(network, args.collective, args.bytes, args.seed)
    if args.output:
        Path(args.output).write_text(to_xml(algorithm))
    steps = sum(1 for _ in algorithm.steps())
    us = network_us(algorithm, network, args.bytes)
    print(f"{algorithm.name}: {us:.1f} us predicted, {algorithm.chunks} chunks, {steps} steps, verified")
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
    report(network.name, args.collective, args.bytes, measured, args.json)
