# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer among ranks that cannot all map each other: one host, cut into nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_elastic_engram as engram
import test_elastic_ring as ring
import torch
from port_nodes import nodes
from test_elastic import (
    ALIGNMENT,
    cached_buffer,
    case_for,
    check_expanded,
    check_handle_outlives_its_buffer,
    check_refusals,
    check_repeats,
    check_rows,
    check_scales,
    check_sessions,
    check_sessions_fit,
    check_stats_and_copies,
    dispatch,
    logical_size,
    node_of_rank,
)
from test_ports_experts import PLACES

import deep_ep
import weft
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool

# (allow_multiple_reduction, allow_hybrid_mode)
RECIPES = ((True, True), (False, True), (True, False), (False, False))


@pytest.fixture(scope="module", params=PLACES, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, ranks_per_node, provider = request.param
    if request.param not in PLACES[:2] and not request.config.getoption("--thorough"):
        pytest.skip("--thorough: more nodes")
    with nodes(ranks_per_node, provider), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


def _both_layouts(rank: Rank, case: MoeCase, multiple: bool, hybrid: bool, sync: bool | None) -> None:
    for check in (check_rows, check_expanded):
        check(rank, case, multiple, hybrid, expert_alignment=ALIGNMENT, do_cpu_sync=sync)


@pytest.mark.parametrize("sync", [None, False])
@pytest.mark.parametrize(("multiple", "hybrid"), RECIPES)
def test_both_layouts_and_every_recipe(
    pool: RankPool, multiple: bool, hybrid: bool, sync: bool | None
) -> None:
    for options in ({}, {"top_k": 8, "num_experts": 8 * pool.num_ranks, "hidden": 1024}):
        pool.run(_both_layouts, case_for(pool.num_ranks, **options), multiple, hybrid, sync)


@pytest.mark.parametrize(
    "options",
    [
        {"routing": "none"},
        {"routing": "one expert", "top_k": 1, "empty_share": 0.0},
        {"empty_share": 0.9},
        {"tokens": (0,)},
        {"tokens": (0, 0, 9)},  # none on a whole node
        {"tokens": (300, 40), "hidden": 2048},  # many laps of a rail peer's rings
    ],
    ids=str,
)
def test_the_edges(pool: RankPool, options: dict[str, Any]) -> None:
    tokens = options.get("tokens", (7, 0, 12, 5))
    of_ranks = tuple(tokens[rank % len(tokens)] for rank in range(pool.num_ranks))
    case = case_for(pool.num_ranks, **{**options, "tokens": of_ranks})
    for sync in (None, False):
        pool.run(_both_layouts, case, True, True, sync)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (check_scales, (False, False)),
        (check_scales, (True, True)),
        (check_repeats, ()),
        (check_stats_and_copies, ()),
        (check_handle_outlives_its_buffer, (False, True)),
        (check_handle_outlives_its_buffer, (True, True)),
        (check_handle_outlives_its_buffer, (True, False)),
        (check_refusals, ()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_whatever_a_call_can_do(
    pool: RankPool, check: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    of_ranks = tuple((6, 9, 4)[rank % 3] for rank in range(pool.num_ranks))
    pool.run(check, case_for(pool.num_ranks, hidden=384, tokens=of_ranks), *arguments)


def _modes_do_not_mix(rank: Rank, case: MoeCase) -> None:
    """A handle keeps where rows go: once per node, or once per rank."""
    x, _, _, handle, _ = dispatch(cached_buffer(rank, hybrid=True), case)
    buffer = cached_buffer(rank, hybrid=False)
    if len(set(node_of_rank(rank.size))) == rank.size:  # nodes of one: there is no difference
        assert buffer.combine(x, handle)[0].shape == (case.tokens[rank.rank], case.hidden)
        return
    with pytest.raises(weft.Error, match=r"^handle: got the handle of other ranks"):
        buffer.combine(x, handle)


def _domains(rank: Rank) -> None:
    for hybrid in (True, False):
        buffer = cached_buffer(rank, hybrid=hybrid)
        per_node = [node_of_rank(rank.size).count(node) for node in set(node_of_rank(rank.size))]
        assert buffer.get_physical_domain_size() == (len(per_node), max(per_node))
        assert deep_ep.get_physical_domain_size(rank.group) == buffer.get_physical_domain_size()
        assert buffer.get_logical_domain_size() == logical_size(rank.size, hybrid)
        assert deep_ep.get_logical_domain_size(rank.group, hybrid) == buffer.get_logical_domain_size()
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size()


def test_domains_and_whose_handles_are_taken(pool: RankPool) -> None:
    pool.run(_domains)
    pool.run(_modes_do_not_mix, case_for(pool.num_ranks))


@pytest.mark.parametrize("check", [check_sessions, check_sessions_fit])
def test_sessions_and_barriers(pool: RankPool, check: Callable[..., None]) -> None:
    pool.run(check)


@pytest.mark.parametrize(("num_bytes", "offset"), [(0, 0), (1, 1), (4097, 4), (ring.MAX_BYTES, 0)])
def test_messages_to_neighbours(pool: RankPool, num_bytes: int, offset: int) -> None:
    pool.run(ring.pass_around, num_bytes, offset)


def test_any_schedule_of_messages_within_the_slots(pool: RankPool) -> None:
    pool.run(ring.follow_schedule, 1)
    pool.run(ring.send_more_than_slots)


def test_messages_of_the_wrong_size_and_new_slots(pool: RankPool) -> None:
    pool.run(ring.refuse)
    pool.run(ring.configure)


@pytest.mark.parametrize(
    ("num_entries", "hidden", "dtype"),
    [(1, 1, torch.uint8), (7, 5, torch.bfloat16), (33, 3, torch.float32), (64, 4096, torch.bfloat16)],
    ids=str,
)
def test_engram_entries_of_any_rank(
    pool: RankPool, num_entries: int, hidden: int, dtype: torch.dtype
) -> None:
    pool.run(engram.read_back, num_entries, hidden, dtype, torch.int64)


def test_engram_scales_and_refusals(pool: RankPool) -> None:
    pool.run(engram.read_fp8, torch.float32, True)
    pool.run(engram.refuse)
