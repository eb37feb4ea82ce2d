# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or stop: every other rank raises, at once or at the deadline, and names the lost one."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch

import weft
from weft import _core
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank, run_ranks

TIMEOUT_S = 4.0  # within which busy machines do make a call
FAR_TIMEOUT_S = 100.0  # where nobody is to wait for it
SOON_S = 30.0  # far below that; busy machines are slow
MOST_TOKENS = 16
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
LOST = 1
CASE = MoeCase((6, 9, 4), 128, 3, 6, empty_share=0)


def make_buffer(rank: Rank, timeout_s: float = TIMEOUT_S, **options: Any) -> weft.Buffer:
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        MOST_TOKENS, CASE.hidden, rank.size, CASE.num_experts
    )
    return weft.Buffer(rank.group, 8 << 20, num_bytes, low_latency_mode=True, timeout_s=timeout_s, **options)


def ht_dispatch(buffer: weft.Buffer, rank: int) -> Any:
    topk_idx = CASE.topk_idx(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, CASE.num_experts)
    weights = CASE.topk_weights(rank)
    return buffer.dispatch(CASE.x(rank), None, per_rank, None, in_rank, per_expert, topk_idx, weights)


def ht_combine(buffer: weft.Buffer, rank: int, state: Any) -> None:
    buffer.combine(state[0], state[4])


def ll_dispatch(buffer: weft.Buffer, rank: int) -> Any:
    return buffer.low_latency_dispatch(
        CASE.x(rank), CASE.topk_idx(rank), MOST_TOKENS, CASE.num_experts, use_fp8=False
    )


def ll_combine(buffer: weft.Buffer, rank: int, state: Any) -> None:
    buffer.low_latency_combine(state[0], CASE.topk_idx(rank), CASE.topk_weights(rank), state[2])


def use_wire(name: str) -> None:
    """Have this process's few tokens of low-latency calls travel as "lines", or followed by "words"."""
    os.environ["WEFT_LOW_LATENCY_LINE_TOKENS"] = "0" if name == "words" else "-1"
    _core.config_reload()


def lose_one(rank: Rank, call: str, number: int, wire: str) -> tuple[str, float]:
    """Every rank makes a round trip; then LOST gets the signal before ``call`` and the others make it."""
    use_wire(wire)
    buffer = make_buffer(rank, FAR_TIMEOUT_S if number == signal.SIGKILL else TIMEOUT_S)
    first, second = (ht_dispatch, ht_combine) if call.startswith("ht") else (ll_dispatch, ll_combine)
    state = first(buffer, rank.rank)
    second(buffer, rank.rank, state)
    if call.endswith("combine"):
        state = first(buffer, rank.rank)
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        os.kill(os.getpid(), number)
    start = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        if call.endswith("combine"):
            second(buffer, rank.rank, state)
        else:
            first(buffer, rank.rank)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("number", SIGNALS, ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("call", "wire"),
    [
        ("ht_dispatch", "words"),
        ("ht_combine", "words"),
        ("ll_dispatch", "words"),
        ("ll_combine", "words"),
        ("ll_dispatch", "lines"),
        ("ll_combine", "lines"),
    ],
)
def test_a_lost_rank_is_named_by_all_others(call: str, wire: str, number: int) -> None:
    results = run_ranks(3, lose_one, call, number, wire, lost={LOST}, deadline_s=60, with_gpus=False)
    for rank, result in enumerate(results):
        if rank != LOST:
            message, waited_s = result
            assert f"rank {LOST} (pid " in message
            assert f"rank {rank}" in message
            assert waited_s < SOON_S
            if number == signal.SIGKILL:
                assert "was killed by signal 9" in message
            else:
                assert "was killed" not in message
                assert waited_s >= TIMEOUT_S


def return_late(rank: Rank) -> None:
    """A rank that is late, but within the deadline, is not lost."""
    buffer = make_buffer(rank)
    if rank.rank == LOST:
        time.sleep(TIMEOUT_S / 2)
    state = ht_dispatch(buffer, rank.rank)
    rows = oracle.ht_dispatch(CASE.routes(), CASE.num_experts, rank.rank)
    assert torch.equal(state[0], rows.take(CASE.all_x()))


def test_a_late_rank_is_waited_for() -> None:
    run_ranks(3, return_late, deadline_s=60, with_gpus=False)


def shrink(rank: Rank, number: int, wire: str) -> None:
    """With shrink enabled the lost rank is masked, which is logged once, and the others go on among themselves."""
    use_wire(wire)
    log = rank.folder / f"log-{rank.rank}"
    logging.getLogger().handlers.clear()  # pytest's, which would get the lines
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    buffer = make_buffer(rank, enable_shrink=True, explicitly_destroy=True)
    ll_combine(buffer, rank.rank, ll_dispatch(buffer, rank.rank))
    survivors = torch.distributed.new_group([r for r in range(rank.size) if r != LOST])
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        os.kill(os.getpid(), number)
    status = torch.zeros(rank.size, dtype=torch.int32)
    expected_status = [int(r == LOST) for r in range(rank.size)]
    lost = oracle.local_experts(CASE.num_experts, rank.size, LOST)
    for _ in range(3):
        start = time.monotonic()
        topk_idx, weights = CASE.topk_idx(rank.rank), CASE.topk_weights(rank.rank)
        recv, _, handle, _, _ = ll_dispatch(buffer, rank.rank)
        combined, _, _ = buffer.low_latency_combine(recv, topk_idx, weights, handle)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == expected_status
        kept_idx = topk_idx.masked_fill((topk_idx >= lost.start) & (topk_idx < lost.stop), -1)
        slot_rows = CASE.x(rank.rank).unsqueeze(1).expand(-1, CASE.top_k, -1)
        assert calc_diff(combined, oracle.ll_combine(slot_rows, kept_idx, weights)) < 1e-5
    assert time.monotonic() - start < 2 * TIMEOUT_S, "a masked rank is not waited for again"
    assert log.read_text().count(f"rank {LOST} stayed silent for {TIMEOUT_S} s in a low-latency call") == 1
    torch.distributed.barrier(group=survivors)
    buffer.destroy()  # by all that are left
    assert buffer.runtime is None


@pytest.mark.parametrize("wire", ["words", "lines"])
@pytest.mark.parametrize("number", SIGNALS, ids=["killed", "stopped"])
def test_with_shrink_a_lost_rank_is_masked_and_work_goes_on(number: int, wire: str) -> None:
    run_ranks(3, shrink, number, wire, lost={LOST}, deadline_s=60, with_gpus=False)


def come_back(rank: Rank) -> str:
    """LOST stays silent until the others have masked it, and is told so when it comes."""
    buffer = make_buffer(rank, enable_shrink=True, explicitly_destroy=True)
    ll_combine(buffer, rank.rank, ll_dispatch(buffer, rank.rank))
    torch.distributed.barrier(group=rank.group)
    said = ""
    if rank.rank != LOST:
        ll_combine(buffer, rank.rank, ll_dispatch(buffer, rank.rank))
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        with pytest.raises(weft.PeerLost) as raised:
            ll_dispatch(buffer, rank.rank)
        said = str(raised.value)
    torch.distributed.barrier(group=rank.group)
    if rank.rank == 0:
        buffer.low_latency_update_mask_buffer(LOST, False)
    if rank.rank == 2:
        buffer.low_latency_clean_mask_buffer()
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        ll_dispatch(buffer, rank.rank)  # nobody refuses it any more
    torch.distributed.barrier(group=rank.group)
    buffer.destroy()
    return said


def test_a_masked_rank_that_comes_back_is_told_so() -> None:
    said = run_ranks(3, come_back, deadline_s=60, with_gpus=False)[LOST]
    assert f"rank {LOST} (this rank) was given up by rank 0 (pid " in said
    assert ", rank 2 (pid " in said and "is masked" in said


def die_before_construction(rank: Rank) -> str:
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((weft.Error, RuntimeError)) as raised:
        make_buffer(rank)
    return str(raised.value)


def test_a_rank_that_dies_before_construction_fails_the_others() -> None:
    results = run_ranks(3, die_before_construction, lost={LOST}, deadline_s=30, with_gpus=False)
    assert results[0]
    assert results[2]


def forget_signals(rank: Rank) -> tuple[str, float]:
    """The kernels of rank LOST never say that their rows are there."""
    buffer = make_buffer(rank)
    recv, counts, handle, _, _ = ll_dispatch(buffer, rank.rank)
    signals = torch.full_like(counts, 0 if rank.rank == LOST else 1)
    start = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        buffer.low_latency_combine(
            torch.zeros_like(recv),
            CASE.topk_idx(rank.rank),
            CASE.topk_weights(rank.rank),
            handle,
            overlap=True,
            src_signals=signals,
            src_signal_expect_value=1,
        )
    return str(raised.value), time.monotonic() - start


def test_signals_that_stay_away_are_named() -> None:
    for rank, (message, waited_s) in enumerate(run_ranks(3, forget_signals, deadline_s=60, with_gpus=False)):
        if rank == LOST:
            assert f"rank {LOST}, low_latency_combine.signal" in message
            assert "expected signal 1, saw 0" in message
        else:
            assert f"for rank {LOST}" in message
        assert waited_s < TIMEOUT_S + 15
