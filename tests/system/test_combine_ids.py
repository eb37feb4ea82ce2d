# SPDX-License-Identifier: Apache-2.0
"""Low-latency combine with slots that are masked, moved or wrong since the dispatch, in every form and way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from combine_ids import (
    CHANGES,
    EXPERTS,
    FORMS,
    HIDDEN,
    MOST_TOKENS,
    TOKENS,
    TOP_K,
    check_other_ids,
    check_said,
    check_stray_ids,
    expected,
    factor,
    given_ids,
    given_weights,
    rows_of,
)
from port_nodes import _settings, nodes  # noqa: F401
from test_moe_ll import ll_buffer, wire

import weft
from weft import _core
from weft.errors import Error
from weft.testing.ranks import Rank, RankPool

# Ranks, and what they reach each other through: memory, with tokens as lines or words; the network, once for each rank
# or once for each node.
MAPPED = ((1, "words"), (2, "lines"), (3, "words"), (3, "lines"))
PORTS = ((3, 1, "direct"), (4, 2, "node"), (4, 2, "direct"))


@pytest.fixture(scope="module", params=(*MAPPED, *PORTS), ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, *way = request.param
    around = wire(way[0]) if len(way) == 1 else nodes(way[0], "fabric:tcp", WEFT_LOW_LATENCY_FANOUT=way[1])
    with around, RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


def _other_ids(rank: Rank, form: str, weights_at: str, dtype: torch.dtype) -> None:
    check_other_ids(rank, ll_buffer(rank), form, weights_at, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_masked_and_moved_slots_give_the_rows_of_their_experts(pool: RankPool, form: str) -> None:
    pool.run(_other_ids, form, "combine", torch.int64)


@pytest.mark.parametrize("weights_at", ("dispatch", "both"))
@pytest.mark.parametrize("form", ("default", "exact", "hook"))
def test_so_they_do_with_weights_of_the_dispatch(pool: RankPool, form: str, weights_at: str) -> None:
    pool.run(_other_ids, form, weights_at, torch.int32)


def _issue(rank: Rank) -> list[float]:
    x = torch.full((1, 128), 0.25, dtype=torch.bfloat16)
    recv, _, handle, _, _ = ll_buffer(rank).low_latency_dispatch(
        x, torch.tensor([[0, 1]]), 1, 2, use_fp8=False
    )
    ids = torch.tensor([[0, -1]])
    combined, _, _ = ll_buffer(rank).low_latency_combine(recv, ids, torch.ones(1, 2), handle)
    return combined[0, :2].tolist()


def test_a_masked_slot_of_one_rank_adds_nothing() -> None:
    with RankPool(1, with_gpus=False) as one:
        assert one.run(_issue) == [[0.25, 0.25]]


def _stray(rank: Rank, hook: bool) -> str:
    return check_stray_ids(rank, ll_buffer(rank), hook)


@pytest.mark.parametrize("hook", [False, True])
def test_an_expert_that_a_token_was_not_sent_to_is_named_at_once(pool: RankPool, hook: bool) -> None:
    said, *others = pool.run(_stray, hook)
    check_said(said)
    assert not any(others)


def _nan_weights(rank: Rank) -> None:
    """Whatever bits a weight has, it counts: none of them means a masked slot."""
    sent, x = given_ids(rank.rank), rows_of(rank.rank, TOKENS)
    weights = torch.full(sent.shape, -1, dtype=torch.int32).view(torch.float32)
    recv, _, handle, _, _ = ll_buffer(rank).low_latency_dispatch(x, sent, MOST_TOKENS, EXPERTS, use_fp8=False)
    combined, _, _ = ll_buffer(rank).low_latency_combine(recv, sent, weights, handle)
    assert bool(combined.isnan().all())


def test_a_weight_that_is_nan_is_not_a_masked_slot(pool: RankPool) -> None:
    pool.run(_nan_weights)


def _split(rank: Rank, exact: bool) -> None:
    """P2PAllToAll, whose kernels these are, with ids of its own in the combine; on few SMs rows go by bulk copies."""
    most = {"max_num_tokens": MOST_TOKENS, "num_experts": EXPERTS, "hidden_dim": HIDDEN}
    sent = given_ids(rank.rank)
    x, weights = rows_of(rank.rank, TOKENS), given_weights(sent)
    with weft.P2PAllToAll(
        rank.group, **most, num_experts_per_token=TOP_K, exact=exact, num_sms=2, max_in_flight=1
    ) as a2a:
        for name, change in CHANGES.items():
            handle = a2a.dispatch_send(x, sent, weights)
            rows = a2a.dispatch_recv(handle)
            y = torch.full_like(rows.x, float("nan"))
            at = 0
            for local, count in enumerate(rows.num_tokens.tolist()):
                expert = rank.rank * -(-EXPERTS // rank.size) + local
                for row in range(at, at + count):
                    source, token = int(rows.src_rank[row]), int(rows.src_token[row])
                    if bool((change(given_ids(source))[token] == expert).any()):
                        y[row] = rows.x[row] * factor(expert)
                at += count
            ids = change(sent.clone())
            own = given_weights(ids).flip(0)
            a2a.combine_send(y, handle, own, ids)
            assert torch.equal(a2a.combine_recv(handle), expected(x, sent, weights, ids, own)), name
            handle = a2a.dispatch_send(x, sent, weights)
            a2a.dispatch_recv(handle)
            with pytest.raises(Error, match="topk_weights: got None"):
                a2a.combine_send(y, handle, topk_idx=ids)
            a2a.combine_send(y, handle)
            a2a.combine_recv(handle)


@pytest.mark.parametrize("bulk", ("always", "never"))
@pytest.mark.parametrize("exact", [False, True])
def test_split_combines_take_other_ids(monkeypatch: pytest.MonkeyPatch, exact: bool, bulk: str) -> None:
    monkeypatch.setenv("WEFT_LOW_LATENCY_BULK", bulk)
    _core.config_reload()
    with RankPool(2, with_gpus=False) as ranks:
        ranks.run(_split, exact)
    monkeypatch.undo()
    _core.config_reload()
