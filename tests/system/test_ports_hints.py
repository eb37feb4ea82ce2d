# SPDX-License-Identifier: Apache-2.0
"""Buffers over nodes, as large as DeepEP's hints say: no call is refused, and where sizes are known nothing grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from port_nodes import _settings, nodes  # noqa: F401
from test_moe_ll import check_ll_round_trip

import weft
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool
from weft.testing.round_trips import FORMATS, Format

PLACES = ((4, 2, "fabric:shm"), (5, 3, "fabric:tcp"))


@pytest.fixture(scope="module", params=PLACES, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, ranks_per_node, provider = request.param
    with nodes(ranks_per_node, provider), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


@st.composite
def shapes(draw: st.DrawFn, num_ranks: int, step: int = 8) -> MoeCase:
    most = draw(st.sampled_from((1, 2, 7, 16, 33, 130)))
    tokens = [most] + [draw(st.integers(0, most)) for _ in range(num_ranks - 1)]
    experts = draw(st.integers(1, 48))
    return MoeCase(
        tokens=tuple(draw(st.permutations(tokens))),
        hidden=step * draw(st.integers(1, 2048 // step)),
        top_k=draw(st.integers(1, min(experts, 32))),
        num_experts=experts,
        routing=draw(st.sampled_from(("distinct", "none"))),
        empty_share=draw(st.sampled_from((0.0, 0.3))),
        seed=draw(st.integers(0, 1000)),
    )


def _low_latency(rank: Rank, case: MoeCase, form: Format, hooks: bool) -> None:
    most = max(*case.tokens, 1)
    hint = weft.Buffer.get_low_latency_rdma_size_hint(most, case.hidden, rank.size, case.num_experts)
    with weft.Buffer(rank.group, 0, hint, low_latency_mode=True, explicitly_destroy=True) as buffer:
        rank.kept["buffer"] = buffer
        engine = buffer.runtime
        assert engine is not None
        room = engine.core.window_bytes
        for _ in range(2):
            check_ll_round_trip(rank, case, form, most, hooks)
        assert engine.core.window_bytes == room
    del rank.kept["buffer"]


@drawn(max_examples=12)
@given(data=st.data())
def test_low_latency_calls_fit_their_hint(pool: RankPool, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMATS))
    step = 512 if form.use_ue8m0 else 128 if form.use_fp8 else 8
    pool.run(_low_latency, data.draw(shapes(pool.num_ranks, step)), form, data.draw(st.booleans()))


def _elastic(rank: Rank, case: MoeCase, options: dict[str, Any], grows: bool) -> None:
    """Dispatches that wait for no counts, as graphs have them, each with a cached one and a combine."""
    most, me = max(*case.tokens, 1), rank.rank
    hint = weft.ElasticBuffer.get_buffer_size_hint(rank.group, most, case.hidden, case.top_k, **options)
    sizes = (
        {"num_bytes": hint}
        if grows
        else {"num_max_tokens_per_rank": most, "hidden": case.hidden, "num_topk": case.top_k}
    )
    with weft.ElasticBuffer(rank.group, **sizes, **options, explicitly_destroy=True) as buffer:
        assert buffer.num_bytes == hint
        engine = buffer.runtime
        assert engine is not None
        room = engine.core.window_bytes
        for sync in (False, None):
            for expand in (False, True):
                rows, _, weights, handle, _ = buffer.dispatch(
                    case.x(me),
                    case.topk_idx(me),
                    case.topk_weights(me),
                    num_experts=case.num_experts,
                    num_max_tokens_per_rank=most,
                    do_cpu_sync=sync,
                    do_expand=expand,
                )
                back = None if expand and not options["allow_multiple_reduction"] else weights
                combined, _, _ = buffer.combine(torch.zeros_like(rows), handle, topk_weights=back)
                assert not combined.any()
                if not grows and not expand:
                    assert engine.core.window_bytes == room, (sync, expand)


@drawn(max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("grows", [False, True], ids=["sizes", "num_bytes"])
def test_elastic_calls_fit_their_hint(pool: RankPool, grows: bool, data: st.DataObject) -> None:
    """From sizes nothing grows; a buffer that knows only bytes may grow, and refuses nothing."""
    options = {
        "allow_hybrid_mode": data.draw(st.booleans()),
        "allow_multiple_reduction": data.draw(st.booleans()),
    }
    pool.run(_elastic, data.draw(shapes(pool.num_ranks)), options, grows)


def _high_throughput(rank: Rank, case: MoeCase) -> None:
    """With the bytes of DeepEP's configurations."""
    configs = weft.Buffer.get_dispatch_config(rank.size), weft.Buffer.get_combine_config(rank.size)
    nvl = max(config.get_nvl_buffer_size_hint(case.hidden * 2, rank.size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(case.hidden * 2, rank.size) for config in configs)
    idx = case.topk_idx(rank.rank)
    with weft.Buffer(rank.group, nvl, rdma, explicitly_destroy=True) as buffer:
        for _ in range(2):
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.num_experts)
            rows, _, weights, _, handle, _ = buffer.dispatch(
                case.x(rank.rank),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=case.topk_weights(rank.rank),
            )
            assert handle is not None and isinstance(rows, torch.Tensor)
            combined, _, _ = buffer.combine(torch.zeros_like(rows), handle, topk_weights=weights)
            assert not combined.any()


@drawn(max_examples=6)
@given(data=st.data())
def test_high_throughput_refuses_nothing_with_its_hints(pool: RankPool, data: st.DataObject) -> None:
    pool.run(_high_throughput, data.draw(shapes(pool.num_ranks)))
