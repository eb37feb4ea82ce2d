# SPDX-License-Identifier: Apache-2.0
"""Ports on GPUs: ranks that may not map each other, through pinned memory of the host and proxy threads. One GPU is
enough: ranks that share it take turns on it, so sizes and repeats are small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import num_ranks_here, run_on_gpus
from host_calls import HostCalls
from moe_checks import (
    check_cached,
    check_float32_rows,
    check_no_top_k,
    check_repeats,
    check_round_trip,
    check_scales,
    check_worst_tokens,
)
from p2p_checks import Form
from port_nodes import _settings, use_ports  # noqa: F401
from programs import WEFT, run_program
from test_elastic_gpu import check_layouts, check_ring
from test_low_latency_gpu import _check_graph, _check_shape
from test_p2p_gpu import check_exchanges
from torch.utils.dlpack import from_dlpack

import weft
from weft import Communicator, _core
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank

PROVIDERS = ("fabric:tcp", "fabric:shm")
# With that of GPUs of one host, which reaches their memory.
WITH_GPUS = (*PROVIDERS, "cuda")
# Ranks, and how many make a node: pairs of loners, two nodes of two, four loners.
PLACES = [place for place in ((2, 1), (4, 2), (4, 1)) if place[0] <= max(num_ranks_here(), 2)]
SPLIT_FORMS = (Form(padding=16), Form(torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16, scale_words=4))
ROOM = 1 << 20
SIZES = (1, 33, 1000, 5003, 100_001)
TIMEOUT_S = 120.0
DEADLINE_S = 500.0


@cache
def _is_usable(provider: str) -> bool:
    """Whether a provider has a NIC here; asked of another process, since ranks are forked from this one."""
    code = f"""
from weft import _core
print(any(not nic["unusable_because"] for nic in _core.transfer_find_provider({provider!r}).probe()))"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout.split()[-1] == "True"


def _use(monkeypatch: pytest.MonkeyPatch, ranks_per_node: int, provider: str) -> None:
    use_ports(monkeypatch, ranks_per_node, provider, _is_usable(provider))


def _graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _comm(rank: Rank) -> Communicator:
    comm = Communicator(
        rank.group, device=torch.device("cuda", torch.cuda.current_device()), timeout_s=TIMEOUT_S
    )
    assert comm.core.sharing == "pinned host memory"
    return comm


def _values(rank: int, elems: int) -> torch.Tensor:
    return ((torch.arange(elems) * 7 + rank * 5) % 13).float()


def _channel(rank: Rank) -> None:
    """Every call of a channel, in both directions or one, with places that go around the window."""
    comm = _comm(rank)
    loop = _core.ChannelLoop.create(comm.core, ROOM)
    sent, received = from_dlpack(loop.sent(ROOM)), from_dlpack(loop.received(ROOM))
    adds = 0
    for turn, nbytes in enumerate((16, 448, 464, 4096, 65536 + 16, ROOM)):
        what = _values(turn, nbytes // 4)
        for call, is_round_trip in (("put_with_signal", True), ("put_flush", False), ("put", False)):
            sent[:nbytes].view(torch.float32).copy_(what + rank.rank)
            received.fill_(255)
            torch.cuda.synchronize()
            comm.barrier()
            loop.run(call, is_round_trip, nbytes, 1, 1)
            torch.cuda.synchronize()
            comm.barrier()
            if is_round_trip or rank.rank == 1:
                found = received[:nbytes].view(torch.float32).cpu()
                assert torch.equal(found, what + (1 - rank.rank)), (call, nbytes)
                assert bool((received[nbytes:] == 255).all()), (call, nbytes)
            comm.barrier()
            loop.run(call, is_round_trip, nbytes, 20, 2)
    for call in ("signal", "add"):
        loop.run(call, True, 16, 300, 2)
        adds += 600 if call == "add" else 0
    assert loop.added == adds


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_call_of_a_channel(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, 1, provider)
    run_on_gpus(2, _channel, deadline_s=DEADLINE_S)


def _window(rank: Rank) -> None:
    """Memory that grows: kernels cross the seam of its segments, and mapped ranks see it alike."""
    comm = _comm(rank)
    window = weft.Window(comm, 10_000)
    first = window.num_bytes
    window.tensor(rank.rank, (first,), torch.uint8).fill_(rank.rank + 1)
    torch.cuda.synchronize()
    comm.barrier()
    window.grow(5 * first)
    own = window.tensor(rank.rank, (window.num_bytes,), torch.uint8)
    assert bool((own[:first] == rank.rank + 1).all()) and not own[first:].any()
    own[first - 100 : first + 100] = 77
    torch.cuda.synchronize()
    comm.barrier()
    near = [peer for peer in range(rank.size) if comm.transport_to(peer) == "mapped"]
    for peer in near:
        theirs = window.tensor(peer, (window.num_bytes,), torch.uint8)
        assert bool((theirs[first - 100 : first + 100] == 77).all())
    comm.barrier()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_windows_grow(place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, place[1], "fabric:tcp")
    run_on_gpus(place[0], _window)


def _collectives(rank: Rank) -> None:
    comm = _comm(rank)
    call, n, me = comm.collectives, rank.size, rank.rank
    for elems in SIZES:
        everyone = torch.stack([_values(r, elems * n) for r in range(n)])
        own, parts = everyone[me], everyone.view(n, n, elems)

        def same(found: torch.Tensor, wanted: torch.Tensor, what: str, elems: int = elems) -> None:
            assert torch.equal(found.cpu(), wanted), (what, elems)

        def blank(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1.0, device="cuda")

        for _ in range(3):
            same(call.all_reduce(own.cuda()), everyone.sum(0), "all_reduce")
            same(
                call.all_reduce(own.cuda(), out=blank(elems * n)), everyone.sum(0), "all_reduce, out of place"
            )
            same(call.all_gather(own.cuda(), out=blank(n, elems * n)), everyone, "all_gather")
            scattered = call.reduce_scatter(own.view(n, elems).cuda(), out=blank(1, elems))
            same(scattered, parts.sum(0)[me : me + 1], "reduce_scatter")
            same(call.all_to_all(own.view(n, elems).cuda(), out=blank(n, elems)), parts[:, me], "all_to_all")
        same(call.send_recv(own.cuda(), out=blank(elems * n)), everyone[me - 1], "send_recv")
        for root in {0, n - 1}:
            same(call.broadcast(own.cuda(), root), everyone[root], "broadcast")
            same(call.reduce(own.cuda(), root), everyone.sum(0) if me == root else own, "reduce")
            gathered = call.gather(own.cuda(), root, out=blank(n, elems * n) if me == root else None)
            if gathered is not None:
                same(gathered, everyone, "gather")
            out = call.scatter(own.cuda() if me == root else None, blank(elems), root)
            same(out, parts[root, me], "scatter")


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_collective_agrees_with_torch(
    place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _collectives, deadline_s=DEADLINE_S)


def _calls_in_a_row(rank: Rank) -> None:
    """None waited for: FIFOs, numbers and rings go around while kernels queue up."""
    comm = _comm(rank)
    kept = []
    for turn in range(200):
        values = torch.full((257 + turn,), float(turn + rank.rank), device="cuda")
        comm.all_reduce(values)
        kept.append((values != rank.size * turn + rank.size * (rank.size - 1) / 2).sum())
    torch.cuda.synchronize()
    assert not torch.stack(kept).any()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_many_calls_in_a_row(place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PROXY_FIFO", "16")  # it is full again and again
    _use(monkeypatch, place[1], "fabric:tcp")
    run_on_gpus(place[0], _calls_in_a_row, deadline_s=DEADLINE_S)


def _replays(rank: Rank, replays: int) -> None:
    """Two calls in one graph, whose input changes with every replay; eager calls in between."""
    comm = _comm(rank)
    n, me, elems = rank.size, rank.rank, 333
    tensor = torch.full((n, elems), float(me), device="cuda")
    total, swapped = torch.zeros_like(tensor), torch.zeros_like(tensor)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    turn = torch.zeros((), device="cuda")

    def step() -> None:
        tensor.add_(1)
        turn.add_(1)
        comm.collectives.all_reduce(tensor, out=total)
        comm.collectives.all_to_all(tensor, out=swapped)
        peers = torch.arange(n, device="cuda", dtype=torch.float32).unsqueeze(1)
        wrong.add_((total != n * turn + n * (n - 1) / 2).sum() + (swapped != peers + turn).sum())

    for _ in range(2):  # the second call may bring a runner for more channels, which plans the first anew
        step()
    graph = _graph_of(step)
    for number in range(replays):
        graph.replay()
        if number % 50 == 49:
            step()
            torch.cuda.synchronize()
            assert int(wrong) == 0, number
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert int(turn) == 2 + replays + replays // 50


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_captured_graph_replays_hundreds_of_times(
    place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _replays, 400 if place[0] == 2 else 200, deadline_s=DEADLINE_S)


def _until_one_dies(rank: Rank) -> tuple[str, float]:
    comm = _comm(rank)
    values = torch.ones(1000, device="cuda")
    comm.all_reduce(values)
    torch.cuda.synchronize()
    torch.distributed.barrier(rank.group)
    if rank.rank == rank.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        for _ in range(3):
            comm.all_reduce(values)
            torch.cuda.synchronize()
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_killed_rank_is_named_before_the_deadline(
    place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_PEER_DEAD_S", "3")
    monkeypatch.setenv("WEFT_HEARTBEAT_S", "0.5")
    _use(monkeypatch, place[1], "fabric:tcp")
    lost = place[0] - 1
    results = run_on_gpus(place[0], _until_one_dies, lost={lost})
    for message, waited_s in results[:lost]:
        assert f"rank {lost}" in message, message
        assert waited_s < 60, message


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    "shape", [(33, 512, 3, 4), (1, 512, 1, 1), (0, 512, 2, 3), (64, 1536, 8, 8)], ids=str
)
def test_low_latency_rows_go_out_and_come_back(
    shape: tuple[int, int, int, int], place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format, plain and with hooks; LogFMT, exact and zero-copy combines."""
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _check_shape, shape, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("provider", ("fabric:tcp", "cuda"))
def test_low_latency_graphs_replay_with_new_routes(
    place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _check_graph, deadline_s=DEADLINE_S)


def _replayed_round_trips(rank: Rank, replays: int) -> None:
    """A dispatch and a combine by hooks in one graph: tokens come back as they were, with every replay's rows."""
    tokens, hidden, top_k, experts = 9, 512, 2, 2 * rank.size
    hint = weft.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, rank.size, experts)
    buffer = weft.Buffer(rank.group, 1 << 20, hint, low_latency_mode=True)
    picks = torch.Generator().manual_seed(rank.rank)
    idx = torch.rand(tokens, experts, generator=picks).topk(top_k).indices.cuda()
    weights = torch.full((tokens, top_k), 0.5, device="cuda")
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)

    def step() -> None:
        x.add_(1).remainder_(64)
        recv, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, tokens, experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        combined, _, hook = buffer.low_latency_combine(recv, idx, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        wrong.add_((combined != x).sum())

    step()
    graph = _graph_of(step)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert float(x[0, 0]) == (1 + replays) % 64  # the capture itself runs nothing


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_low_latency_graphs_replay_hundreds_of_times(
    place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _replayed_round_trips, 300 if place[0] == 2 else 150, deadline_s=DEADLINE_S)


# Tokens of ranks by turns, and what is not hidden 64, top 3 of 8.
HIGH_THROUGHPUT: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6, 9), {}),
    ((0, 7), {}),
    ((0,), {}),
    ((5, 8), {"routing": "none"}),
    ((9, 4), {"routing": "one expert", "empty_share": 0.0, "top_k": 1}),
    ((3, 4), {"routing": "any", "top_k": 12}),
    ((1000, 217), {"hidden": 7168, "top_k": 8, "num_experts": 256}),
    ((4, 3), {"hidden": 16384, "top_k": 2, "num_experts": 3}),
    ((700, 40), {"hidden": 2048, "top_k": 2, "routing": "one expert"}),  # many laps of one rail peer's rings
]


def _high_throughput(rank: Rank) -> None:
    """Counts, cached handles, worst tokens, FP8 with scales, float32: what CPU ranks are asked, in one buffer."""
    buffer = weft.Buffer(rank.group, 64 << 20, timeout_s=TIMEOUT_S)
    assert buffer.device.type == "cuda"
    rank.kept["buffer"] = HostCalls(buffer)

    def case(tokens: tuple[int, ...], **more: Any) -> MoeCase:
        of_ranks = tuple(tokens[r % len(tokens)] for r in range(rank.size))
        return MoeCase(of_ranks, **({"hidden": 64, "top_k": 3, "num_experts": 8} | more))

    for tokens, more in HIGH_THROUGHPUT:
        for _ in range(2):
            check_round_trip(rank, case(tokens, **more))
    for made in (case((6, 9)), case((300, 0), hidden=7168, top_k=8, num_experts=64)):
        check_cached(rank, made)
        check_worst_tokens(rank, made, 1000)
        check_scales(rank, made, 56, torch.float32, False)
        check_scales(rank, made, 3, torch.int32, True)
        check_float32_rows(rank, made)
        check_no_top_k(rank, made)
    check_repeats(rank, case((100, 33), hidden=1024))


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_high_throughput_agrees_with_the_oracle(
    place: tuple[int, int], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], _high_throughput, deadline_s=DEADLINE_S)


def _payload_stays_on_gpus(rank: Rank) -> dict[str, int]:
    """Both modes; how many bytes of puts went from or to memory of the host, and in all."""
    buffer = weft.Buffer(rank.group, 64 << 20, timeout_s=TIMEOUT_S)
    placement = str(_comm(rank).core.port_placement)
    assert "words of ports in memory of the host, their payload in memory of cuda" in placement, placement
    rank.kept["buffer"] = HostCalls(buffer)
    tokens = tuple((33, 20, 7, 50)[r % 4] for r in range(rank.size))
    check_round_trip(rank, MoeCase(tokens, hidden=2048, top_k=3, num_experts=8))
    _check_shape(rank, (33, 512, 3, 4))
    moved = {counted["operation"]: int(counted["bytes"]) for counted in _core.tally()["operations"]}
    return {"all": moved["proxy.put"], "host": moved["proxy.put.host"]}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_no_payload_passes_through_memory_of_the_host(
    place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], "cuda")
    for moved in run_on_gpus(place[0], _payload_stays_on_gpus, deadline_s=DEADLINE_S):
        assert moved["all"] > 0
        assert moved["host"] == 0


def _elastic(rank: Rank) -> None:
    case = MoeCase(tuple(60 + 7 * r for r in range(rank.size)), 1024, 4, 8 * rank.size)
    for sync in (True, False):
        check_layouts(rank, case, sync)
    check_ring(rank)


def _split(rank: Rank) -> None:
    for form in SPLIT_FORMS:
        for tokens, num_sms in ((77, 0), (0, 0), (300, 3)):
            check_exchanges(rank, form, tokens, num_sms)


def _hybrid(rank: Rank) -> None:
    """Rows of each expert in the order of ranks and tokens, and the sum of a token's copies, by maps of experts."""
    import deep_ep

    case, me = MoeCase((33,) * rank.size, 256, 3, 4 * rank.size, seed=5), rank.rank
    maps = [
        torch.zeros(33, case.num_experts, dtype=torch.bool).scatter_(1, case.topk_idx(of).clamp(min=0), True)
        for of in range(rank.size)
    ]
    expected = torch.cat(
        [case.x(of)[maps[of][:, expert]] for expert in range(4 * me, 4 * me + 4) for of in range(rank.size)]
    )
    with deep_ep.HybridEPBuffer(
        group=rank.group, hidden_dim=case.hidden, max_num_of_tokens_per_rank=33, num_local_experts=4
    ) as buffer:
        for _ in range(2):
            rows, probs, _, counts, handle = buffer.dispatch_with_permute(
                hidden=case.x(me).cuda(), routing_map=maps[me].cuda(), probs=maps[me].float().cuda()
            )
            assert torch.equal(rows.cpu(), expected)
            assert int(counts.sum()) == len(expected)
            combined, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
            sums = case.x(me).float() * maps[me].sum(1, keepdim=True)
            torch.testing.assert_close(combined.cpu().float(), sums, rtol=2e-2, atol=1e-2)
            assert torch.equal(back.cpu(), maps[me].float())


@pytest.mark.parametrize("provider", WITH_GPUS)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("calls", [_elastic, _split, _hybrid])
def test_every_kind_of_buffer(
    place: tuple[int, int], provider: str, calls: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, place[1], provider)
    run_on_gpus(place[0], calls, deadline_s=DEADLINE_S)


def _fifo(_: Rank) -> None:
    device = f"cuda:{torch.cuda.current_device()}"
    for producers, capacity in ((1, 2), (4, 2048), (64, 2048), (300, 16)):
        assert _core.fifo_seconds(device, producers, 3000, capacity) > 0  # order and number are checked
    round_trips, to_pop, look_us = _core.fifo_trips(device, 200, 2048)
    assert len(round_trips) == len(to_pop) == 200
    # The way to the pop is of two clocks. A look may be shorter than a tick of the GPU's: 1 us on some machines.
    assert min(round_trips) > 0 and look_us >= 0


def test_a_queue_carries_every_command_in_order() -> None:
    run_on_gpus(1, _fifo)


def test_bench_channel_measures_a_gpu(tmp_path: Path) -> None:
    options: list[Any] = ["--calls", "fifo,put_with_signal", "--device", "cuda", "--provider", "tcp"]
    ran = run_program(
        [*WEFT, "bench", "channel", *options, "--quick", "--rounds", "1", "--json", "out.json"], tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["checked"] and row["us"] > 0 for row in rows)
    assert {row["call"] for row in rows} == {"put_with_signal", "fifo", "fifo_push_to_pop"}
    assert {row["device"] for row in rows} == {"cuda"}
