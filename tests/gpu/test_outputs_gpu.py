# SPDX-License-Identifier: Apache-2.0
"""What calls return on GPUs is safe on streams that recorded it, can be changed in place, and outlives its buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_ranks import num_ranks_here, run_on_gpus

import weft
from weft.moe import autograd
from weft.testing.ranks import Rank

_TOKENS, _HIDDEN, _EXPERTS = 256, 2048, 8
_LONG_CYCLES = 200_000_000  # a tenth of a second and more


def _dispatch(buffer: weft.Buffer, value: float, **options: Any) -> Any:
    """Every token goes to every rank, with ``value`` in all its channels."""
    size = buffer.group_size
    x = torch.full((_TOKENS, _HIDDEN), value, dtype=torch.bfloat16, device="cuda")
    idx = (torch.arange(size, device="cuda") * (_EXPERTS // size)).expand(_TOKENS, size).contiguous()
    weights = torch.ones(idx.shape, device="cuda")
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, _EXPERTS)
    routes = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **routes, **options)


def _check_recorded(rank: Rank, how: str) -> None:
    """A slow stream still reads what was received after it is gone and other rows came."""
    room = {"plenty": 1 << 30, "scarce": 4 * rank.size * _TOKENS * _HIDDEN * 2}[how]
    buffer = weft.Buffer(rank.group, num_nvl_bytes=room)
    side = torch.cuda.Stream()
    for round_number in range(4):
        recv_x, _, recv_weights, _, _, _ = _dispatch(buffer, 1.0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(_LONG_CYCLES)
            seen, seen_weights = recv_x[:, 8:].clone(), recv_weights.clone()
        recv_x[:, 8:].record_stream(side)
        recv_weights.record_stream(side)
        del recv_x, recv_weights
        for value in (2.0, 3.0, 4.0):
            _dispatch(buffer, value)
        side.synchronize()
        assert bool((seen == 1).all()), f"round {round_number}"
        assert bool((seen_weights.sum(1) == 1).all()), f"round {round_number}"  # one expert of a row is here


@pytest.mark.one_gpu
@pytest.mark.parametrize("how", ["plenty", "scarce"])
def test_record_stream_protects_what_was_received(how: str) -> None:
    run_on_gpus(min(num_ranks_here(), 4), _check_recorded, how)


def _check_home_stream(rank: Rank) -> None:
    """What is used on the stream that received it is safe, whichever stream is current when it dies."""
    buffer, side = weft.Buffer(rank.group, num_nvl_bytes=1 << 30), torch.cuda.Stream()
    recv_x = _dispatch(buffer, 1.0)[0]
    torch.cuda._sleep(_LONG_CYCLES)
    seen = recv_x.clone()
    with torch.cuda.stream(side):
        del recv_x
        for value in (2.0, 3.0):
            _dispatch(buffer, value, previous_event=weft.EventOverlap(weft.EventHandle()))
    torch.cuda.synchronize()
    assert bool((seen == 1).all())


@pytest.mark.one_gpu
def test_the_own_stream_protects_what_dies_on_another() -> None:
    run_on_gpus(min(num_ranks_here(), 2), _check_home_stream)


def _check_views(rank: Rank) -> None:
    buffer = weft.Buffer(rank.group, num_nvl_bytes=1 << 24)
    x = torch.ones((_TOKENS, _HIDDEN), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    idx = torch.zeros((_TOKENS, 1), dtype=torch.int64, device="cuda") + rank.rank * (_EXPERTS // rank.size)
    weights = torch.ones(idx.shape, device="cuda", requires_grad=True)
    arrived = autograd.dispatch(buffer, x, idx, weights, _EXPERTS)
    arrived.x.mul_(2)
    arrived.topk_weights.mul_(3)
    autograd.combine(buffer, arrived.x, arrived.handle).mul_(2).float().sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 4).all())

    recv_x, _, _, _, handle, _ = _dispatch(buffer, 5.0)
    later = weft.Buffer(rank.group, num_nvl_bytes=1 << 20)
    del buffer
    torch.cuda.synchronize()
    assert bool((recv_x == 5).all())
    combined, _, _ = later.combine(recv_x, tuple(handle))  # the plain tensors, on a buffer that has to grow
    assert bool((combined == 5 * rank.size).all())


@pytest.mark.one_gpu
def test_outputs_change_in_place_and_outlive_their_buffer() -> None:
    run_on_gpus(min(num_ranks_here(), 2), _check_views)


def _check_freed(rank: Rank) -> None:
    """Who frees what was received, and keeps the tensor, gets its memory back; scales outlive their rows."""
    rows_bytes = rank.size * _TOKENS * _HIDDEN * 2
    buffer = weft.Buffer(rank.group, num_nvl_bytes=16 * rows_bytes)
    window_bytes = buffer._contexts.alive().core.window_bytes
    kept = []
    for round_number in range(40):
        recv_x, _, recv_weights, _, handle, _ = _dispatch(buffer, float(round_number))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(_LONG_CYCLES // 20)
            seen = recv_x.clone()
        recv_x.record_stream(side)
        recv_x.untyped_storage().resize_(0)
        recv_weights.untyped_storage().resize_(0)
        kept.append((recv_x, seen, round_number))
        combined, _, _ = buffer.combine(torch.ones_like(seen), handle)
        assert bool((combined == rank.size).all())
        side.synchronize()  # until then its piece stays out, and a window may grow instead
    assert buffer._contexts.alive().core.window_bytes == window_bytes
    torch.cuda.synchronize()
    for _, seen, round_number in kept:
        assert bool((seen == round_number).all()), f"round {round_number}"


@pytest.mark.one_gpu
def test_what_was_freed_by_resize_comes_back() -> None:
    run_on_gpus(min(num_ranks_here(), 2), _check_freed)
