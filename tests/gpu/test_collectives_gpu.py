# SPDX-License-Identifier: Apache-2.0
"""Collectives on 2, 4 and 8 GPUs against plain torch: every call, odd sizes, types, memory, graphs, programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_ranks import num_ranks_here, run_on_gpus
from program_modes import Case, check_modes

import weft
from weft.collectives import Algorithm
from weft.collectives.calls import Collectives
from weft.collectives.executor import Call, Executor, Loaded
from weft.collectives.library import build, entries
from weft.collectives.variants import Choice, parse_variant
from weft.errors import PeerLost
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
)
EVERY_REDUCTION = (torch.float32, torch.bfloat16, torch.int32)
SIZES = (1, 3, 64, 1000, 5003, 90_001, 1 << 20)  # elements of one rank's part
_WINDOW_BYTES = 512 << 20

Place = Callable[[torch.Tensor], torch.Tensor]  # copies a CPU tensor to where the test wants its buffers


def counts() -> list[int]:
    """Return the rank counts that this machine can run; 2 if it has no GPU, where the tests are skipped."""
    return [n for n in (2, 4, 8) if n <= num_ranks_here()] or [2]


def _comm(rank: Rank, timeout_s: float = 30) -> Communicator:
    return Communicator(
        rank.group, device=torch.device("cuda", torch.cuda.current_device()), timeout_s=timeout_s
    )


def _on_gpu(rank: Rank, comm: Communicator) -> Place:
    return lambda tensor: tensor.cuda()


def _in_window(rank: Rank, comm: Communicator) -> Place:
    window = weft.Window(comm, _WINDOW_BYTES)
    at = [0]

    def place(tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = -(-max(tensor.numel() * tensor.element_size(), 1) // 256) * 256
        if at[0] + num_bytes > _WINDOW_BYTES:
            at[0] = 0
        at[0] += num_bytes
        held = window.tensor(rank.rank, tuple(tensor.shape), tensor.dtype, at[0] - num_bytes)
        return held.copy_(tensor)

    return place


PLACES = [_on_gpu, _in_window]


def _values(rank: int, elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(elems) * 7 + rank * 5) % 13 % 3 + 1).to(dtype)


def _every_call(rank: Rank, memory: Callable[[Rank, Communicator], Place]) -> None:
    comm = _comm(rank)
    call, place = Collectives(comm.core), memory(rank, comm)
    n, me = rank.size, rank.rank
    for elems in SIZES:
        everyone = torch.stack([_values(r, elems * n) for r in range(n)])
        own, parts = everyone[me], everyone.view(n, n, elems)

        def same(found: torch.Tensor, wanted: torch.Tensor, what: str, elems: int = elems) -> None:
            assert torch.equal(found.cpu(), wanted), (what, elems)

        def blank(*shape: int) -> torch.Tensor:
            return place(torch.full(shape, -1.0))

        same(call.all_reduce(place(own)), everyone.sum(0), "all_reduce")
        same(call.all_reduce(place(own), out=blank(elems * n)), everyone.sum(0), "all_reduce out of place")
        same(call.all_gather(place(own), out=blank(n, elems * n)), everyone, "all_gather")
        scattered = call.reduce_scatter(place(own.view(n, elems)), out=blank(1, elems))
        same(scattered, parts.sum(0)[me : me + 1], "reduce_scatter")
        same(call.all_to_all(place(own.view(n, elems)), out=blank(n, elems)), parts[:, me], "all_to_all")
        same(call.send_recv(place(own), out=blank(elems * n)), everyone[me - 1], "send_recv")
        for root in {0, n - 1}:
            same(call.broadcast(place(own), root), everyone[root], "broadcast")
            same(call.reduce(place(own), root), everyone.sum(0) if me == root else own, "reduce")
            gathered = call.gather(place(own), root, out=blank(n, elems * n) if me == root else None)
            if gathered is not None:
                same(gathered, everyone, "gather")
            out = call.scatter(place(own) if me == root else None, blank(elems), root)
            same(out, parts[root, me], "scatter")


@pytest.mark.parametrize("ranks", counts())
@pytest.mark.parametrize("memory", PLACES)
def test_every_call_agrees_with_torch(memory: Callable[[Rank, Communicator], Place], ranks: int) -> None:
    run_on_gpus(ranks, _every_call, memory)


def _exchanges(rank: Rank, memory: Callable[[Rank, Communicator], Place]) -> None:
    """Every way of every exchange, by lines, in place and by stages, whichever the selector would take."""
    comm = _comm(rank)
    call, place = Collectives(comm.core), memory(rank, comm)
    n, me = rank.size, rank.rank
    for elems in (1, 5, 5003, 90_000, 1 << 20):
        everyone = torch.stack([_values(r, elems * n) for r in range(n)])
        own, parts = everyone[me], everyone.view(n, n, elems)
        for way in ("LL exchange", "Simple exchange", "Simple staged"):

            def choice(name: str, inplace: bool = False, way: str = way) -> Choice:
                return parse_variant(f"{name} {way}").choice(n, inplace)

            def same(found: torch.Tensor, wanted: torch.Tensor, what: Any = (way, elems)) -> None:
                assert torch.equal(found.cpu(), wanted), what

            same(call.all_reduce(place(own), algorithm=choice("allreduce_allpairs", True)), everyone.sum(0))
            gathered = place(torch.zeros(n, elems * n))
            same(call.all_gather(place(own), out=gathered, algorithm=choice("allgather_allpairs")), everyone)
            part = place(torch.zeros(1, elems))
            given = place(own.view(n, elems))
            scattered = call.reduce_scatter(given, out=part, algorithm=choice("reducescatter_allpairs"))
            same(scattered, parts.sum(0)[me : me + 1])
            swapped = place(torch.zeros(n, elems))
            same(call.all_to_all(given, out=swapped, algorithm=choice("alltoall_allpairs")), parts[:, me])
            for root in {0, n - 1}:

                def rooted(name: str, inplace: bool = False, way: str = way, root: int = root) -> Choice:
                    return parse_variant(f"{name}_flat {way}").choice(n, inplace, root)

                held = place(own)
                same(call.broadcast(held, root, algorithm=rooted("broadcast", True)), everyone[root])
                held.copy_(own)
                same(
                    call.reduce(held, root, algorithm=rooted("reduce", True)),
                    everyone.sum(0) if me == root else own,
                )
                held.copy_(own)
                into = gathered.zero_() if me == root else None
                call.gather(held, root, out=into, algorithm=rooted("gather"))
                if into is not None:
                    same(into, everyone)
                given_out = held if me == root else None
                same(
                    call.scatter(given_out, part[0], root, algorithm=rooted("scatter")),
                    parts[root, me],
                )
        at_once = parse_variant("allreduce_1step LL exchange").choice(n, True)
        assert torch.equal(call.all_reduce(place(own), algorithm=at_once).cpu(), everyone.sum(0)), elems


@pytest.mark.parametrize("ranks", counts())
@pytest.mark.parametrize("memory", PLACES)
def test_exchanges_agree_with_torch(memory: Callable[[Rank, Communicator], Place], ranks: int) -> None:
    run_on_gpus(ranks, _exchanges, memory)


def _types(rank: Rank) -> None:
    call = Collectives(_comm(rank).core)
    for dtype in DTYPES:
        for elems in (45, 100_003):
            everyone = torch.stack([_values(r, elems, dtype).double() for r in range(rank.size)])
            for op, wanted in (
                ("sum", everyone.sum(0)),
                ("product", everyone.prod(0)),
                ("min", everyone.amin(0)),
                ("max", everyone.amax(0)),
                ("average", everyone.mean(0)),
            ):
                if op not in ("sum", "average") and dtype not in EVERY_REDUCTION:
                    continue  # each is a kernel of its own, which takes a second to compile
                found = call.all_reduce(_values(rank.rank, elems, dtype).cuda(), op)
                exact = wanted if dtype.is_floating_point else wanted.trunc()
                assert torch.equal(found.cpu().double(), exact.to(dtype).double()), (op, dtype, elems)


@pytest.mark.parametrize("ranks", counts())
def test_every_type_and_reduction(ranks: int) -> None:
    run_on_gpus(ranks, _types)


def _uneven(rank: Rank) -> None:
    call = Collectives(_comm(rank).core)
    n, me = rank.size, rank.rank
    for most in (3, 3000, 300_000):
        rows = [[(r * 7 + q * 11 + most) % most for q in range(n)] for r in range(n)]
        tensor = torch.cat([torch.full((rows[me][q], 3), float(me * 100 + q)) for q in range(n)]).cuda()
        came = [rows[q][me] for q in range(n)]
        found = call.all_to_all(tensor, input_splits=rows[me], output_splits=came)
        wanted = torch.cat([torch.full((came[q], 3), float(q * 100 + me)) for q in range(n)])
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("ranks", counts())
def test_all_to_all_with_uneven_splits(ranks: int) -> None:
    run_on_gpus(ranks, _uneven)


def _uneven_in_a_row(rank: Rank) -> None:
    """Many exchanges with other sizes each, none waited for; then one in a graph that others run between."""
    comm = _comm(rank)
    n, width = rank.size, 5000

    def exchange(turn: int, out: torch.Tensor) -> None:
        sent = [(turn + 3 * rank.rank + 5 * q) % 40 for q in range(n)]
        came = [(turn + 3 * q + 5 * rank.rank) % 40 for q in range(n)]
        sent[rank.rank] = came[rank.rank]
        rows = torch.full((sum(sent), width), float(turn * 10 + rank.rank), device="cuda")
        kept.append(rows)  # the allocator must not hand it out while the exchange reads it
        comm.collectives.all_to_all(rows, out=out[: sum(came)], input_splits=sent, output_splits=came)
        wanted.append((out, torch.repeat_interleave(turn * 10.0 + torch.arange(n), torch.tensor(came))))

    kept: list[torch.Tensor] = []
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
    outs = [torch.zeros((40 * n, width), device="cuda") for _ in range(31)]
    for turn in range(30):
        exchange(turn, outs[turn])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange(30, outs[30])
    for turn in range(3):
        graph.replay()
        exchange(turn, outs[turn])
    torch.cuda.synchronize()
    for out, rows in wanted:
        assert torch.equal(out[: rows.numel(), 0].cpu(), rows) and torch.equal(
            out[: rows.numel(), -1].cpu(), rows
        )


@pytest.mark.parametrize("ranks", counts())
def test_uneven_exchanges_in_a_row_and_in_a_graph_keep_their_sizes(ranks: int) -> None:
    run_on_gpus(ranks, _uneven_in_a_row)


def _graph(rank: Rank, memory: Callable[[Rank, Communicator], Place]) -> None:
    """All calls in one captured graph, replayed with other data, between eager calls."""
    comm = _comm(rank)
    call, place = Collectives(comm.core), memory(rank, comm)
    n, me = rank.size, rank.rank
    for elems in (33, 50_001):
        tensor = place(torch.zeros(n, elems))
        total, gathered = place(torch.zeros(n, elems)), place(torch.zeros(n, n, elems))
        part, swapped = place(torch.zeros(1, elems)), place(torch.zeros(n, elems))
        sent, rooted_sum, own_part = (place(torch.zeros(n, elems)) for _ in range(3))

        def step(
            tensor: torch.Tensor = tensor,
            total: torch.Tensor = total,
            gathered: torch.Tensor = gathered,
            part: torch.Tensor = part,
            swapped: torch.Tensor = swapped,
            sent: torch.Tensor = sent,
            rooted_sum: torch.Tensor = rooted_sum,
            own_part: torch.Tensor = own_part,
        ) -> None:
            call.all_reduce(tensor, out=total)
            call.all_gather(tensor, out=gathered)
            call.reduce_scatter(tensor, out=part)
            call.all_to_all(tensor, out=swapped)
            call.broadcast(sent.copy_(tensor), n - 1)
            call.reduce(rooted_sum.copy_(tensor), n - 1)
            call.scatter(tensor if me == 0 else None, own_part[me], 0)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for turn in range(5):
            everyone = torch.stack([_values(r + turn, n * elems).view(n, elems) for r in range(n)])
            tensor.copy_(everyone[me])
            if turn % 3 == 2:
                step()
            else:
                graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(total.cpu(), everyone.sum(0)), (turn, elems)
            assert torch.equal(gathered.cpu(), everyone)
            assert torch.equal(part.cpu(), everyone.sum(0)[me : me + 1])
            assert torch.equal(swapped.cpu(), everyone[:, me])
            assert torch.equal(sent.cpu(), everyone[-1])
            assert torch.equal(rooted_sum.cpu(), everyone.sum(0) if me == n - 1 else everyone[me])
            assert torch.equal(own_part[me].cpu(), everyone[0, me])
            comm.barrier()  # nobody overwrites its input before all have compared


@pytest.mark.parametrize("ranks", counts())
@pytest.mark.parametrize("memory", PLACES)
def test_captured_calls_replay(memory: Callable[[Rank, Communicator], Place], ranks: int) -> None:
    run_on_gpus(ranks, _graph, memory)


def _graphs_that_differ(rank: Rank) -> list[str]:
    """Graphs of two calls whose order differs: no replay gives a number, and the next call says that they differ."""
    comm = _comm(rank, timeout_s=3)
    tensor = torch.full((1000,), float(rank.rank + 1), device="cuda")
    call = Collectives(comm.core)
    totals = {op: torch.full_like(tensor, -7.0) for op in ("sum", "max")}
    for op in totals:
        call.all_reduce(tensor, op)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op in sorted(totals, reverse=rank.rank % 2 == 1):
            call.all_reduce(tensor, op, out=totals[op])
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(weft.Error) as caught:
        call.all_reduce(tensor)
        torch.cuda.synchronize()
        comm.barrier()
    right = {"sum": rank.size * (rank.size + 1) / 2, "max": float(rank.size)}
    strange = [op for op, out in totals.items() if not set(out.tolist()) <= {-7.0, right[op]}]
    return [str(caught.value), *strange]


def test_graphs_whose_calls_differ_give_errors_not_numbers() -> None:
    for message, *strange in run_on_gpus(2, _graphs_that_differ):
        assert not strange, strange
        assert "rank " in message, message


def _on_two_streams(rank: Rank, with_default: bool) -> None:
    """Calls follow one another on several streams as on one, also where their sizes make them differ in length."""
    comm = _comm(rank)
    streams = [torch.cuda.default_stream() if with_default else torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    ranks, kept = rank.size, []
    for turn in range(200):
        elems = (5, 100_000, 3_000_000, 1000)[turn % 4] + turn
        with torch.cuda.stream(streams[turn % 2]):
            values = torch.full((elems,), float(turn + rank.rank), device="cuda")
            comm.all_reduce(values)
            kept.append((values != ranks * turn + ranks * (ranks - 1) / 2).sum())
    torch.cuda.synchronize()
    wrong = {turn: int(count) for turn, count in enumerate(kept) if int(count)}
    assert not wrong, f"elements that are wrong, by call: {wrong}"


@pytest.mark.parametrize("with_default", [False, True])
def test_calls_on_several_streams_follow_one_another(with_default: bool) -> None:
    run_on_gpus(2, _on_two_streams, with_default)


def _expected(algorithm: Algorithm, rank: int) -> tuple[list[float], list[float | None]]:
    """Return a number per input chunk, and what every output chunk must hold (None: anything)."""
    contract = algorithm.contract
    assert contract is not None

    def number(value: Any) -> float:
        return float(sum(1 + r * 31 % 17 + c * 7 % 11 for r, c in value.parts))

    before = [0.0 if v is None else number(v) for v in contract.before(rank)]
    return before, [None if v is None else number(v) for v in contract.after(rank)]


def _replay(function: Callable[[], None]) -> None:
    """Capture two runs, and replay them twice."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
        function()
    graph.replay()
    graph.replay()


def _check_program(executor: Executor, loaded: Loaded, place: Place, elems: int) -> None:
    """Run eagerly, then several times in a graph; every chunk must be what the contract says."""
    before, after = _expected(loaded.algorithm, executor.rank)
    given = torch.tensor(before or [0.0]).repeat_interleave(elems).cuda()
    tensor, out = place(given), place(torch.empty(max(len(after), 1) * elems))

    def run() -> None:
        stream = int(torch.cuda.current_stream().cuda_stream)
        tensor.copy_(given)
        out.fill_(-1.0)
        executor.run(
            loaded, Call(tensor.data_ptr(), out.data_ptr(), elems * loaded.per_part, 0, stream=stream)
        )

    for how in (run, lambda: _replay(run)):
        how()
        found = out.cpu().view(-1, elems)
        for chunk, value in enumerate(after):
            about = (loaded.algorithm.name, loaded.algorithm.protocol, elems, chunk, how is run)
            assert value is None or (found[chunk] == value).all(), about


def _library(rank: Rank, memory: Callable[[Rank, Communicator], Place], names: list[str]) -> None:
    comm = _comm(rank)
    executor, place = Executor(comm.core, direct_bytes=16), memory(rank, comm)
    for name in names:
        if not entries()[name].applies(rank.size):
            continue
        for protocol in ("Simple", "LL", "LL128"):
            loaded = executor.load(build(name, rank.size, protocol=protocol).compile())
            for elems in (1, 41, 20_000):
                _check_program(executor, loaded, place, elems)


@pytest.mark.parametrize("ranks", counts())
@pytest.mark.parametrize("memory", PLACES)
def test_library_algorithms_do_what_their_contracts_say(
    memory: Callable[[Rank, Communicator], Place], ranks: int
) -> None:
    big = {"allreduce_a100_allpairs"} if ranks > 4 else set()
    run_on_gpus(ranks, _library, memory, [name for name in entries() if name not in big])


def _modes(rank: Rank, case: Case) -> None:
    comm = _comm(rank)
    check_modes(comm, [_on_gpu(rank, comm), _in_window(rank, comm)], case)


# NVRTC takes a second or more for every step that a rank has, all ranks at the same time; two have fewest.
CHAINS = [
    Case("chain", "Simple"),
    Case("chain", "LL", "bfloat16", "average"),
    Case("chain", "LL128", "int32", "max"),
]
PAIRS = [
    Case("reducescatter_allpairs_fused", "LL128", "float16", "average"),
    Case("allreduce_1step", "LL", "int64", "product"),
    Case("alltoall_allpairs", "Simple", "int8"),
]


@pytest.mark.parametrize("ranks", counts())
@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_chains_interpreted_and_compiled_are_exact_and_agree(case: Case, ranks: int) -> None:
    run_on_gpus(ranks, _modes, case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs_interpreted_and_compiled_are_exact_and_agree(case: Case) -> None:
    run_on_gpus(2, _modes, case)


def _missing_rank(rank: Rank) -> str:
    comm = Communicator(rank.group, device=torch.device("cuda", torch.cuda.current_device()), timeout_s=30)
    call = Collectives(comm.core, timeout_s=1.0)
    call.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    if rank.rank == rank.size - 1:
        import time

        time.sleep(5)
        return ""
    call.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(PeerLost) as caught:
        call.all_reduce(torch.ones(8, device="cuda"))
    return str(caught.value)


def test_a_rank_that_stays_away_is_named_within_the_deadline() -> None:
    ranks = counts()[-1]
    stories = run_on_gpus(ranks, _missing_rank)
    assert all("collective" in story for story in stories[:-1])
    assert any(f"for rank {ranks - 1}" in story for story in stories)
