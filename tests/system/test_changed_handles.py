# SPDX-License-Identifier: Apache-2.0
"""Handles whose tensors were moved, resized or freed; layouts of other routes; calls that lack room on one rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_checks import cached_buffer, check_combined, dispatch, expert_output
from torch import Tensor

import weft
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool

SMALL = MoeCase(tokens=(6, 9), hidden=64, top_k=3, num_experts=8)


def _moves(tensor: Tensor) -> None:
    tensor.share_memory_()


def _points_elsewhere(tensor: Tensor) -> None:
    tensor.data = tensor.clone()


def check_moved(rank: Rank, move: Callable[[Tensor], None]) -> None:
    """Combine and a cached dispatch read the entries where they are now, not what lies where they were."""
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, SMALL, rank.rank)
    for entry in handle[:-1]:
        move(entry)
    # Memory that was freed is taken by what comes next.
    fill = [torch.full((1 << size,), -7, dtype=torch.int32) for size in range(12)]
    check_combined(SMALL, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])
    assert torch.equal(buffer.dispatch(SMALL.x(rank.rank), handle=handle)[0], recv_x)
    check_combined(
        SMALL, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), copy.deepcopy(handle))[0]
    )
    assert len(fill) == 12


@pytest.mark.parametrize("move", [_moves, _points_elsewhere])
def test_entries_of_a_handle_may_move(pair: RankPool, move: Callable[[Tensor], None]) -> None:
    pair.run(check_moved, move)


def _grows(tensor: Tensor) -> None:
    tensor.resize_(tensor.numel() * 4 + 64)


def _shrinks(tensor: Tensor) -> None:
    tensor.data = tensor.flatten()[:1].clone()


def _is_freed(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


CHANGES = (_grows, _shrinks, _is_freed)


def check_changed(rank: Rank, at: int, change: Callable[[Tensor], None]) -> None:
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, SMALL, rank.rank)
    buffer.combine(recv_x, handle)  # the next one of its form takes the short way
    change(handle[at])
    for call in (lambda: buffer.combine(recv_x, handle), lambda: buffer.dispatch(recv_x, handle=handle)):
        with pytest.raises(
            weft.Error, match="handle: got one with tensors that were resized, replaced, moved or freed"
        ):
            call()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 5, 6, 7])  # prefix, send_head, slot_base, slot
def test_entries_that_are_others_are_refused(
    pair: RankPool, at: int, change: Callable[[Tensor], None]
) -> None:
    pair.run(check_changed, at, change)


def low_latency(buffer: weft.Buffer, case: MoeCase, rank: int) -> Any:
    return buffer.low_latency_dispatch(case.x(rank), case.topk_idx(rank), 16, case.num_experts, use_fp8=False)


LOW = MoeCase(tokens=(6, 9), hidden=128, top_k=3, num_experts=8)


def low_buffer(rank: Rank) -> weft.Buffer:
    if "low" not in rank.kept:
        num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(16, LOW.hidden, rank.size, LOW.num_experts)
        rank.kept["low"] = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True)
    buffer: weft.Buffer = rank.kept["low"]
    return buffer


def check_low_latency(rank: Rank) -> None:
    """Routes of a low-latency handle are read where they are, and refused where they are others."""
    buffer = low_buffer(rank)
    ids, weights = LOW.topk_idx(rank.rank), LOW.topk_weights(rank.rank)
    recv_x, _, handle, _, _ = low_latency(buffer, LOW, rank.rank)
    expected = buffer.low_latency_combine(recv_x, ids, weights, handle)[0]
    for move in (_moves, _points_elsewhere):
        recv_x, _, handle, _, _ = low_latency(buffer, LOW, rank.rank)
        move(handle[5])
        assert torch.equal(buffer.low_latency_combine(recv_x, ids, weights, handle)[0], expected)
    for change in CHANGES:
        recv_x, _, handle, _, _ = low_latency(buffer, LOW, rank.rank)
        change(handle[5])
        with pytest.raises(weft.Error, match="handle: got"):
            buffer.low_latency_combine(recv_x, ids, weights, handle)


def test_routes_of_low_latency_handles_may_move_but_not_change(pair: RankPool) -> None:
    pair.run(check_low_latency)


def check_independent_handles(rank: Rank) -> None:
    """No handle depends on what is done to another; copies of changed ones are refused as those are."""
    buffer = low_buffer(rank)
    ids, weights = LOW.topk_idx(rank.rank), LOW.topk_weights(rank.rank)
    recv_x, _, handle, _, _ = low_latency(buffer, LOW, rank.rank)
    expected = buffer.low_latency_combine(recv_x, ids, weights, handle)[0]
    for at in range(8):
        recv_x, _, changed, _, _ = low_latency(buffer, LOW, rank.rank)
        _, _, other, _, _ = low_latency(buffer, LOW, rank.rank)
        with contextlib.suppress(RuntimeError):  # of those that torch does not free
            _is_freed(changed[at])
        for form in (other, tuple(other), type(other)(iter(other))):
            assert torch.equal(buffer.low_latency_combine(recv_x, ids, weights, form)[0], expected)
    for change in CHANGES:
        _, _, changed, _, _ = low_latency(buffer, LOW, rank.rank)
        change(changed[5])
        for wrong in (changed, tuple(changed), copy.copy(changed), type(changed)(changed)):
            with pytest.raises(weft.Error, match="handle: got"):
                buffer.low_latency_combine(recv_x, ids, weights, wrong)
            with pytest.raises(weft.Error, match="handle: got"):
                buffer.get_next_low_latency_combine_buffer(wrong)


def test_what_is_done_to_a_low_latency_handle_stays_with_it(pair: RankPool) -> None:
    pair.run(check_independent_handles)


def check_rebuilt(rank: Rank) -> None:
    """Wrappers of modules rebuild a tuple from its mapped entries. A copy of what is none is refused."""
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, SMALL, rank.rank)
    again = type(handle)(entry for entry in handle)
    check_combined(SMALL, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), again)[0])
    _grows(handle[5])
    for wrong in (copy.copy(handle), type(handle)(entry.to("meta") for entry in handle)):
        with pytest.raises(weft.Error, match="handle: got"):
            buffer.combine(recv_x, wrong)


def test_a_handle_is_rebuilt_from_its_entries(pair: RankPool) -> None:
    pair.run(check_rebuilt)


def check_saved_after_inference(rank: Rank) -> None:
    """What handles of one form share can be saved by autograd, also where its first call was of inference."""
    case = MoeCase(tokens=(3, 4), hidden=256, top_k=2, num_experts=6)  # of no other test here
    room = weft.Buffer.get_low_latency_rdma_size_hint(16, case.hidden, rank.size, case.num_experts)
    buffer = weft.Buffer(rank.group, 0, room, low_latency_mode=True)
    with torch.inference_mode():
        low_latency(buffer, case, rank.rank)
    _, _, handle, _, _ = low_latency(buffer, case, rank.rank)
    assert not any(entry.is_inference() for entry in handle)


def test_handles_can_be_saved_after_a_call_of_inference(pair: RankPool) -> None:
    pair.run(check_saved_after_inference)


def check_other_layout(rank: Rank) -> None:
    """Two tokens are swapped: as many rows for each rank, and slots for each expert, but other ones.

    And counts of slots that no layout gives.
    """
    buffer = cached_buffer(rank)
    ids = torch.tensor([[0, 1], [4, 5], [0, 4]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 8)
    others = ids[[1, 0, 2]]
    routes = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_weights": torch.ones(3, 2),
    }
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    with pytest.raises(
        weft.Error, match="is_token_in_rank: got True for token 0 and rank 0, where topk_idx has no"
    ):
        buffer.dispatch(x, topk_idx=others, **routes)
    with pytest.raises(
        weft.Error, match="is_token_in_rank: got False for token 0 and rank 1, where topk_idx has an"
    ):
        buffer.dispatch(x, topk_idx=torch.tensor([[0, 4], [4, 5], [0, 4]], dtype=torch.int32), **routes)
    for wrong, without_ids in ((-5, False), (-5, True), (7, False)):
        ids_and_weights = {"topk_weights": None} if without_ids else {"topk_idx": ids}
        slots = torch.tensor([0, 0, 0, wrong, 0, 0, 0, 0], dtype=torch.int32)
        most = (1 << 31) - 1 if without_ids else 6
        with pytest.raises(
            weft.Error,
            match=f"num_tokens_per_expert: got {wrong} slots of expert 3, allowed: 0 to {most}",
        ):
            buffer.dispatch(x, **{**routes, "num_tokens_per_expert": slots, **ids_and_weights})
    assert len(buffer.dispatch(x, topk_idx=ids, **routes)[0]) == 4


def test_a_layout_of_other_routes_is_refused(pair: RankPool) -> None:
    pair.run(check_other_layout)


# Every token goes to the first rank: the other one needs hardly any room, and would wait for the first.
TO_ONE = MoeCase(tokens=(3000, 3), hidden=64, top_k=2, num_experts=8, routing="one expert", empty_share=0)


def check_no_room(rank: Rank, wide_hidden: int) -> str:
    buffer = weft.Buffer(rank.group, 1 << 20)
    recv_x, _, _, _, handle, _ = dispatch(buffer, TO_ONE, rank.rank)
    wide = torch.full((TO_ONE.tokens[rank.rank], wide_hidden), rank.rank + 1.0)
    kept, said = [recv_x], []
    for _ in range(2):  # one more after it is refused again, and alike
        with pytest.raises(weft.Error) as caught:
            while len(kept) < 50:
                kept.append(buffer.dispatch(wide, handle=handle)[0])
        said.append(str(caught.value))
        assert caught.value.code == "capacity"
    check_combined(TO_ONE, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])
    with pytest.raises(weft.Error, match=r"num_nvl_bytes: rank [01]: combine needs"):
        buffer.combine(torch.ones(len(recv_x), 16 * wide_hidden), handle)
    del kept[1:]
    *_, grown, _ = dispatch(buffer, TO_ONE, rank.rank, wide)  # which makes room on all ranks
    got = buffer.dispatch(wide, handle=grown)[0]
    assert got.shape == (3003 if rank.rank == 0 else 0, wide_hidden)
    assert rank.rank or ((got[:3000] == 1).all() and (got[3000:] == 2).all())
    assert said[0] == said[1]
    return said[0]


def test_a_call_that_one_rank_has_no_room_for_is_refused_on_all(pair: RankPool) -> None:
    said = pair.run(check_no_room, 1024)
    assert said[0] == said[1]
    assert "num_nvl_bytes: rank 0: dispatch needs" in said[0]
