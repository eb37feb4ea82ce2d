# SPDX-License-Identifier: Apache-2.0
"""The split all-to-all on GPUs: every type and layout, micro-batches on two streams, graphs, overlap."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu_ranks import num_ranks_here, run_on_gpus
from p2p_checks import Form, check_received, check_sums, exchange, make, on_cpu, results_of, sent_of

import weft
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank

REPLAYS = int(os.environ.get("P2P_REPLAYS", "2000"))  # a graph's; 100000 for a long run
BF16, FP8, HALF, FLOAT = torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32
FORMS = (
    Form(),
    Form(padding=16),
    Form(FP8, BF16, BF16, scale_words=4, padding=8),
    Form(FLOAT, FLOAT, FLOAT, padding=3, exact=True),
    Form(HALF, HALF, FLOAT, exact=True),
    Form(BF16, BF16, HALF, per_expert=400),
)


def _case(num_ranks: int, tokens: int, hidden: int = 512, per_rank: int = 3, seed: int = 0) -> MoeCase:
    return MoeCase(
        tuple(max(0, tokens - 7 * rank) for rank in range(num_ranks)),
        hidden,
        3,
        per_rank * num_ranks,
        seed=seed,
    )


def check_exchanges(rank: Rank, form: Form, tokens: int, num_sms: int = 0) -> None:
    case = _case(rank.size, tokens)
    with make(rank, case, form, max(tokens, 1), device="cuda", num_sms=num_sms) as a2a:
        for accumulate in (False, True, False):
            exchange(rank, a2a, case, form, accumulate)


@pytest.mark.parametrize("tokens", [0, 1, 77, 300])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_every_type_and_layout(form: Form, tokens: int) -> None:
    run_on_gpus(num_ranks_here(), check_exchanges, form, tokens)


@pytest.mark.parametrize("num_sms", [1, 3, 16])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("form", FORMS[1:3], ids=str)
def test_rows_of_few_sms(form: Form, tokens: int, num_sms: int) -> None:
    run_on_gpus(num_ranks_here(), check_exchanges, form, tokens, num_sms)


def _large(rank: Rank, num_sms: int) -> None:
    case, form = MoeCase((128,) * rank.size, 7168, 8, 32 * rank.size), Form(padding=8)
    with make(rank, case, form, 128, device="cuda", num_sms=num_sms) as a2a:
        exchange(rank, a2a, case, form)


@pytest.mark.parametrize("num_sms", [0, 8])
def test_a_model_of_its_size(num_sms: int) -> None:
    run_on_gpus(num_ranks_here(), _large, num_sms)


def _on_two_streams(rank: Rank, rounds: int, num_sms: int) -> None:
    """Two exchanges of other sizes each round, their phases taking turns; wrong tokens are counted on the GPU."""
    form, most = Form(), 64
    first = _case(rank.size, most)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with make(rank, first, form, most, device="cuda", num_sms=num_sms) as a2a:
        for turn in range(rounds):
            cases = [
                _case(rank.size, 1 + (turn * 13 + half * 29) % most, seed=2 * turn + half)
                for half in range(2)
            ]
            outs = _one_round(rank, a2a, cases, form, streams)
            for case, out in zip(cases, outs, strict=True):
                check_sums(case, form, rank.rank, out.cpu())


def _one_round(
    rank: Rank, a2a: weft.P2PAllToAll, cases: list[MoeCase], form: Form, streams: list[Any]
) -> list[Any]:
    me, ranks = rank.rank, rank.size
    handles, rows, outs = [], [], []
    for case, stream in zip(cases, streams, strict=True):
        with torch.cuda.stream(stream):
            handles.append(a2a.dispatch_send(*sent_of(case, form, me, "cuda")))
    for case, stream, handle in zip(cases, streams, handles, strict=True):
        with torch.cuda.stream(stream):
            rows.append(a2a.dispatch_recv(handle))
            got = on_cpu(rows[-1])
            check_received(case, form, me, ranks, got)
            a2a.combine_send(results_of(case, form, me, ranks, got).cuda(), handle)
    for stream, handle in zip(streams, handles, strict=True):
        with torch.cuda.stream(stream):
            outs.append(a2a.combine_recv(handle))
    torch.cuda.synchronize()
    return outs


@pytest.mark.parametrize("num_sms", [0, 8])
def test_two_micro_batches_on_two_streams(num_sms: int) -> None:
    run_on_gpus(num_ranks_here(), _on_two_streams, 40, num_sms)


def _graph(rank: Rank, replays: int, num_sms: int) -> None:
    """All phases in one graph, a matrix product between them; tokens change from replay to replay.

    Experts return rows as they came, and values have few digits, so sums are exact: a token comes back as itself times
    the sum of its weights.
    """
    tokens, hidden, top_k, experts = 48, 512, 4, 5 * rank.size
    a2a = weft.P2PAllToAll(
        rank.group,
        max_num_tokens=tokens,
        num_experts=experts,
        hidden_dim=hidden,
        num_experts_per_token=top_k,
        expert_padding=4,
        num_sms=num_sms,
        device="cuda",
    )
    x = torch.zeros(tokens, hidden, dtype=BF16, device="cuda")
    ids = torch.zeros(tokens, top_k, dtype=torch.int64, device="cuda")
    weights = torch.full((tokens, top_k), 0.25, device="cuda")
    bound = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    product = torch.ones(512, 512, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def run() -> torch.Tensor:
        handle = a2a.dispatch_send(x, ids, weights, bound_m=bound)
        torch.mm(product, product)
        rows = a2a.dispatch_recv(handle)
        a2a.combine_send(rows.x, handle)
        torch.mm(product, product)
        return a2a.combine_recv(handle)

    values = torch.Generator("cuda").manual_seed(rank.rank)

    def draw(turn: int) -> None:
        x.copy_(torch.randint(-8, 9, x.shape, generator=values, device="cuda"))
        scores = torch.rand(tokens, experts, generator=values, device="cuda")
        ids.copy_(scores.topk(top_k).indices)
        bound.fill_((turn * 7) % (tokens + 1))

    def check(out: torch.Tensor) -> None:
        counts = torch.arange(tokens, device="cuda") < bound
        wrong.add_(((out != x * counts.unsqueeze(1)).any(1)).sum())

    draw(0)
    check(run())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run()
    for turn in range(replays):
        draw(turn)
        graph.replay()
        check(out)
        if turn % 200 == 199 or turn == replays - 1:
            assert int(wrong) == 0, f"rank {rank.rank}: wrong tokens by replay {turn}: {int(wrong)}"
    check(run())  # outside of the graph again
    assert int(wrong) == 0
    a2a.destroy()


@pytest.mark.parametrize("num_sms", [0, 8])
def test_a_graph_of_all_phases_is_replayed(num_sms: int) -> None:
    run_on_gpus(num_ranks_here(), _graph, REPLAYS, num_sms, deadline_s=240.0 + REPLAYS / 50)


def _eager_beside(rank: Rank, rounds: int) -> None:
    """Products between the phases, outside of graphs; rows and sums of earlier rounds die while later ones run."""
    case, form = _case(rank.size, 64, 1024), Form()
    product = torch.ones(1024, 1024, device="cuda", dtype=BF16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    x, ids, weights, _ = sent_of(case, form, rank.rank, "cuda")
    weights.fill_(0.25)
    sums = (ids >= 0).sum(1, keepdim=True) * 0.25
    x = (x * 4).round().clamp(-8, 8)  # few digits: sums are exact
    with make(rank, case, form, 64, device="cuda", num_sms=4) as a2a:
        for turn in range(rounds):
            sent = x + turn % 5
            handle = a2a.dispatch_send(sent, ids, weights)
            for _ in range(3):
                product @ product
            rows = a2a.dispatch_recv(handle)
            y = rows.x * 2
            a2a.combine_send(y, handle)
            product @ product
            out = a2a.combine_recv(handle)
            wrong += (out != (sent.float() * 2 * sums).to(BF16)).sum()
            del sent, rows, y, out
        assert int(wrong) == 0


def test_phases_beside_products_outside_of_graphs() -> None:
    run_on_gpus(num_ranks_here(), _eager_beside, 300)
