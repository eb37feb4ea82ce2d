# SPDX-License-Identifier: Apache-2.0
"""Low-latency combine on GPUs with ids that are masked, moved or wrong since the dispatch; NaN and infinities; and
the first combine with overlap in a process, whose partner's kernels are not loaded yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from combine_ids import (
    CHANGES,
    EXPERTS,
    FORMS,
    MOST_TOKENS,
    TOKENS,
    check_other_ids,
    check_said,
    expected,
    given_ids,
    given_weights,
    results,
    rows_of,
)
from gpu_ranks import rank_counts, run_on_gpus
from special_values import FORMATS, REPLIES, check_replies, check_rows

import weft
from weft.errors import Error
from weft.testing.ranks import Rank


def _buffer(rank: Rank) -> weft.Buffer:
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(128, 1024, rank.size, EXPERTS * rank.size)
    return weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True, timeout_s=20.0)


def _other_ids(rank: Rank) -> None:
    buffer = _buffer(rank)
    for form in (name for name in FORMS if name != "overlap"):
        check_other_ids(rank, buffer, form, "combine", torch.int64, "cuda")
    for weights_at in ("dispatch", "both"):
        for form in ("default", "exact", "hook"):
            check_other_ids(rank, buffer, form, weights_at, torch.int32, "cuda")


@pytest.mark.parametrize("num_ranks", rank_counts())
def test_masked_and_moved_slots_give_the_rows_of_their_experts(num_ranks: int) -> None:
    run_on_gpus(num_ranks, _other_ids)


def _replays(rank: Rank) -> None:
    """A graph sees the ids that its memory has at a replay."""
    buffer = _buffer(rank)
    sent, x = given_ids(rank.rank), rows_of(rank.rank, TOKENS)
    weights = given_weights(sent)
    held = sent.cuda()
    on = x.cuda(), sent.cuda(), weights.cuda()

    def call() -> Any:
        recv, _, handle, _, _ = buffer.low_latency_dispatch(*on[:2], MOST_TOKENS, EXPERTS, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(recv, held, on[2], handle)
        return combined

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combined = call()
    for name, change in CHANGES.items():
        ids = change(sent.clone())
        held.copy_(ids)
        graph.replay()
        torch.cuda.synchronize()
        total = (weights * (ids >= 0)).sum(1, keepdim=True)
        assert torch.equal(combined.cpu(), (x.float() * total).bfloat16()), name


@pytest.mark.parametrize("num_ranks", rank_counts())
def test_a_replay_takes_the_ids_of_its_memory(num_ranks: int) -> None:
    run_on_gpus(num_ranks, _replays)


def _stray(rank: Rank) -> str:
    """The error comes with a later call; nobody waits, and the buffer goes on."""
    buffer = _buffer(rank)
    sent, x = given_ids(rank.rank), rows_of(rank.rank, TOKENS)
    weights, said = given_weights(sent), ""
    for is_wrong in (True, False):
        recv, _, handle, _, _ = buffer.low_latency_dispatch(
            x.cuda(), sent.cuda(), MOST_TOKENS, EXPERTS, use_fp8=False
        )
        y = results(recv, handle, rank, [given_ids(r) for r in range(rank.size)])
        ids = sent.clone()
        if is_wrong and rank.rank == 0:
            ids[4, 2] = next(e for e in range(EXPERTS) if e not in sent[4])
        out, _, _ = buffer.low_latency_combine(y, ids.cuda(), weights.cuda(), handle)
        torch.cuda.synchronize()
        if is_wrong and rank.rank == 0:
            with pytest.raises(Error) as error:
                buffer.low_latency_dispatch(x.cuda(), sent.cuda(), MOST_TOKENS, EXPERTS, use_fp8=False)
            said = str(error.value)
        else:
            assert torch.equal(out.cpu(), expected(x, sent, weights, ids, weights))
    return said


@pytest.mark.parametrize("num_ranks", rank_counts())
def test_an_expert_that_a_token_was_not_sent_to_is_named(num_ranks: int) -> None:
    said, *others = run_on_gpus(num_ranks, _stray)
    check_said(said)
    assert not any(others)


def _special_values(rank: Rank) -> None:
    buffer = _buffer(rank)
    for options in FORMATS.values():
        check_rows(buffer, rank, options, "cuda")
    for options in REPLIES.values():
        check_replies(buffer, rank, options, "cuda")


@pytest.mark.parametrize("num_ranks", rank_counts())
def test_nan_stays_and_infinities_keep_their_sign(num_ranks: int) -> None:
    run_on_gpus(num_ranks, _special_values)


def _first_overlap(rank: Rank) -> None:
    """As SGLang overlaps: the combine on a stream of its own before kernels that this process never launched."""
    buffer = _buffer(rank)
    sent = given_ids(rank.rank)
    x, ids, weights = rows_of(rank.rank, TOKENS).cuda(), sent.cuda(), given_weights(sent).cuda()
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(2):
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST_TOKENS, EXPERTS, use_fp8=False)
        y, signals = torch.empty_like(recv), torch.zeros(recv.size(0), dtype=torch.int32, device="cuda")
        side.wait_stream(here)
        with torch.cuda.stream(side):
            combined, _, hook = buffer.low_latency_combine(
                y,
                ids,
                weights,
                handle,
                overlap=True,
                src_signals=signals,
                src_signal_expect_value=4,
                num_sms=3,
                return_recv_hook=True,
            )
        torch.hypot(recv, torch.zeros_like(recv), out=y)  # rows are above 0
        signals.bitwise_or_(4)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            hook()
        here.wait_stream(side)
        total = (weights * (ids >= 0)).sum(1, keepdim=True)
        assert torch.equal(combined, (x.float() * total).bfloat16())


@pytest.mark.parametrize("num_ranks", rank_counts())
def test_the_first_combine_with_overlap_waits_for_no_loading(num_ranks: int) -> None:
    run_on_gpus(num_ranks, _first_overlap)
