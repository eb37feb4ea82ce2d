# SPDX-License-Identifier: Apache-2.0
"""What calls return are ordinary tensors: storages of their own that can be resized, no views, needing no buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import weft
from weft.moe import autograd
from weft.moe.host_memory import LARGE_BYTES
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool
from weft.testing.round_trips import dispatch

# Small ones, and rows of more than 2 MiB.
CASES = (MoeCase((6, 9), 64, 3, 8), MoeCase((400, 500), 4096, 3, 8))


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2, with_gpus=False) as ranks:
        yield ranks


def high_throughput(rank: Rank, case: MoeCase, **options: Any) -> tuple[Any, dict[str, Tensor], Any]:
    """Return (buffer, outputs by name, handle) of a dispatch of rows and scales, and a combine of other rows."""
    buffer = weft.Buffer(rank.group, 1 << 20, explicitly_destroy=True)
    idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.num_experts)
    routes = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    x = (case.x(rank.rank), case.scales(rank.rank, 4))
    (rows, scales), recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, **routes, **options
    )
    combined, back, _ = buffer.combine(rows.clone(), handle, topk_weights=recv_weights.clone())
    outputs = {"rows": rows, "scales": scales, "idx": recv_idx, "weights": recv_weights}
    return buffer, {**outputs, "combined": combined, "back": back}, handle


def low_latency(rank: Rank, case: MoeCase) -> tuple[Any, dict[str, Tensor], Any]:
    """Return the same of the low-latency calls."""
    most = max(case.tokens)
    size = weft.Buffer.get_low_latency_rdma_size_hint(most, case.hidden, rank.size, case.num_experts)
    buffer = weft.Buffer(rank.group, 0, size, low_latency_mode=True, explicitly_destroy=True)
    x, idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, case.num_experts, use_fp8=False)
    combined, _, _ = buffer.low_latency_combine(rows.clone(), idx, weights, handle)
    return buffer, {"rows": rows, "counts": counts, "combined": combined}, handle


def elastic(rank: Rank, case: MoeCase, do_expand: bool) -> tuple[Any, dict[str, Tensor], Any]:
    """Return the same of ElasticBuffer's calls."""
    buffer = weft.ElasticBuffer(rank.group, num_bytes=0, explicitly_destroy=True)
    x = (case.x(rank.rank), case.scales(rank.rank, 4))
    (rows, scales), idx, weights, handle, _ = buffer.dispatch(
        x,
        case.topk_idx(rank.rank),
        case.topk_weights(rank.rank),
        num_experts=case.num_experts,
        num_max_tokens_per_rank=max(case.tokens),
        do_expand=do_expand,
    )
    combined, back, _ = buffer.combine(rows.clone(), handle, topk_weights=weights.clone())
    outputs = {"rows": rows, "scales": scales, "weights": weights, "combined": combined, "back": back}
    return buffer, outputs if idx is None else {**outputs, "idx": idx}, handle


CALLS: dict[str, Any] = {
    "high throughput": (high_throughput, {}),
    "worst case": (high_throughput, {"num_worst_tokens": 2000}),
    "low latency": (low_latency, {}),
    "elastic": (elastic, {"do_expand": False}),
    "elastic, expanded": (elastic, {"do_expand": True}),
}


def check_ordinary(rank: Rank, name: str, case: MoeCase) -> None:
    """Free, fill and grow each output's storage: nobody else notices, and the handle still works.

    Many rows lie in the window. Their storage does not grow again, and a later call uses its memory.
    """
    call, options = CALLS[name]
    buffer, outputs, handle = call(rank, case, **options)
    before = {name: output.clone() for name, output in outputs.items()}
    assert all(output._base is None for output in outputs.values())
    leased = {name for name, output in outputs.items() if not output.untyped_storage().resizable()}
    is_large = outputs["rows"].nbytes >= LARGE_BYTES and "expanded" not in name and name != "low latency"
    assert leased == ({"rows"} if is_large else set())
    rows = outputs["rows"].clone()
    room = buffer._contexts.alive().core.largest_piece_bytes
    for output in outputs.values():
        output.untyped_storage().resize_(0)
    if leased:
        assert buffer._contexts.alive().core.largest_piece_bytes >= room + rows.nbytes
    again = call(rank, case, **options)[1]  # into whatever memory the first ones had
    for output in leased:
        del outputs[output], before[output]
    for output, wanted in before.items():
        storage = outputs[output].untyped_storage()
        assert storage.nbytes() == 0
        storage.resize_(wanted.numel() * wanted.element_size())
        outputs[output].copy_(wanted)
    places = {output.untyped_storage().data_ptr() for output in outputs.values()}
    assert len(places) == len(outputs)
    if name == "low latency":
        idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
        combined, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
    else:
        combined, _, _ = buffer.combine(rows, handle)
    assert torch.equal(combined, before["combined"])
    buffer.destroy()
    del buffer, handle
    for key, wanted in before.items():
        assert torch.equal(outputs[key].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(again["combined"], combined)


@pytest.mark.parametrize("case", CASES, ids=["small", "large"])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_are_ordinary_tensors(pair: RankPool, name: str, case: MoeCase) -> None:
    pair.run(check_ordinary, name, case)


def check_profiled(rank: Rank, case: MoeCase) -> None:
    """torch's profiler sees the rows that lie in the window come and go."""
    buffer = weft.Buffer(rank.group, 1 << 20)
    dispatch(buffer, case, rank.rank)  # what is made once, is
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        rows = dispatch(buffer, case, rank.rank)[0]
        num_bytes = rows.nbytes
        assert num_bytes >= LARGE_BYTES
        with torch.profiler.record_function("rows go"):
            del rows
    used = {event.key: event.self_cpu_memory_usage for event in seen.key_averages()}
    assert used["rows go"] == -num_bytes
    assert sum(usage for usage in used.values() if usage > 0) >= num_bytes


def test_memory_profilers_see_rows_in_the_window(pair: RankPool) -> None:
    pair.run(check_profiled, CASES[1])


def _nvfp4_rows(rank: Rank, case: MoeCase) -> list[Tensor]:
    buffer, tokens = weft.Buffer(rank.group, 1 << 20), case.tokens[rank.rank]
    x = (torch.ones(tokens, 64, dtype=torch.int32), torch.ones(tokens, 8, dtype=torch.int32), torch.ones(1))
    idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.num_experts)
    outputs = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    return [*outputs[0], outputs[2]]


def _column_major_scales(rank: Rank, case: MoeCase) -> list[Tensor]:
    (rows, scales), _, weights, _, _ = weft.ElasticBuffer(rank.group, num_bytes=0).dispatch(
        (case.x(rank.rank), case.scales(rank.rank, 4)),
        case.topk_idx(rank.rank),
        case.topk_weights(rank.rank),
        num_experts=case.num_experts,
        num_max_tokens_per_rank=16,
        use_tma_aligned_col_major_sf=True,
    )
    return [rows, scales, weights]


def _gathered(rank: Rank, case: MoeCase) -> list[Tensor]:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=16 << 20)
    buffer.agrs_set_config(1 << 20, 4)
    with buffer.agrs_new_session():
        gathered, wait = buffer.all_gather(case.x(0))
        wait()
    return [gathered]


def _low_latency_nvfp4(rank: Rank, case: MoeCase) -> list[Tensor]:
    size = weft.Buffer.get_low_latency_rdma_size_hint(16, case.hidden, rank.size, case.num_experts)
    buffer = weft.Buffer(rank.group, 0, size, low_latency_mode=True)
    x, idx = case.x(rank.rank), case.topk_idx(rank.rank)
    (rows, scales), counts, _, _, _ = buffer.low_latency_dispatch(
        x, idx, 16, case.num_experts, use_nvfp4=True
    )
    return [rows, scales, counts]


# Rows for each rank: some; one; none for the second.
FEW = (
    MoeCase((6, 9), 64, 3, 8),
    MoeCase((1, 1), 64, 2, 2, empty_share=0),
    MoeCase((3, 2), 64, 1, 2, "one expert", empty_share=0),
)


def check_formats(rank: Rank, outputs_of: Any, case: MoeCase) -> None:
    """Outputs of the rarer formats are no views, and one that is freed takes no other with it."""
    outputs = outputs_of(rank, case)
    assert all(output._base is None for output in outputs)
    sizes = [output.untyped_storage().nbytes() for output in outputs]
    assert len({output.untyped_storage()._cdata for output in outputs}) == len(outputs)
    for at, output in enumerate(outputs):
        output.untyped_storage().resize_(0)
        assert [other.untyped_storage().nbytes() for other in outputs] == [0] * (at + 1) + sizes[at + 1 :]


@pytest.mark.parametrize("case", FEW, ids=["some rows", "one row", "no rows"])
@pytest.mark.parametrize("outputs_of", [_nvfp4_rows, _column_major_scales, _gathered, _low_latency_nvfp4])
def test_outputs_of_all_formats_are_no_views(pair: RankPool, outputs_of: Any, case: MoeCase) -> None:
    pair.run(check_formats, outputs_of, case)


def check_changed_in_place(rank: Rank, case: MoeCase) -> None:
    """What autograd's functions return may be changed in place, as the outputs of any layer."""
    buffer = weft.Buffer(rank.group, 1 << 20)
    x, weights = case.x(rank.rank).requires_grad_(), case.topk_weights(rank.rank).requires_grad_()
    arrived = autograd.dispatch(buffer, x, case.topk_idx(rank.rank), weights, case.num_experts)
    arrived.x.mul_(2)
    arrived.topk_weights.mul_(3)
    is_here = arrived.topk_idx >= 0
    arrived.topk_idx.fill_(-1)
    out = autograd.combine(buffer, arrived.x, arrived.handle)
    out.mul_(2)
    (out.float().sum() + arrived.topk_weights[is_here].sum()).backward()
    in_rank = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2]
    wanted = 4 * in_rank.sum(dim=1, dtype=x.dtype).view(-1, 1).expand_as(x)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    assert weights.grad is not None
    assert torch.equal(weights.grad, 3 * (case.topk_idx(rank.rank) >= 0).float())


def test_outputs_of_autograd_can_be_changed_in_place(pair: RankPool) -> None:
    pair.run(check_changed_in_place, CASES[0])


def check_repeat_with_later_rows(rank: Rank) -> None:
    """A handle repeats a large dispatch while rows of many smaller, later ones are kept, as micro-batches keep them."""
    buffer = weft.Buffer(rank.group, 1 << 20, explicitly_destroy=True)
    cases = [MoeCase((tokens, 30), 4096, 2, 4, "one expert", seed=4) for tokens in (1030, *[258] * 12)]
    kept = [dispatch(buffer, case, rank.rank) for case in cases]
    for case, (rows, _, _, _, handle, _) in zip(cases, kept, strict=True):
        again, *_ = buffer.dispatch(case.x(rank.rank) * 2, handle)
        assert torch.equal(again, rows * 2)
        buffer.combine(again, handle)
    buffer.destroy()


def test_a_handle_can_be_repeated_while_later_rows_are_kept(pair: RankPool) -> None:
    pair.run(check_repeat_with_later_rows)


def _unaligned(rows: Tensor) -> Tensor:
    """Return the same rows, two bytes behind where torch begins a tensor."""
    memory = rows.new_empty(rows.numel() + 8)
    return memory[1 : rows.numel() + 1].view(rows.shape).copy_(rows)


def check_unaligned_repeats(rank: Rank, case: MoeCase) -> None:
    """A call of a known form with rows that begin elsewhere is refused, and the next one runs."""
    buffer, outputs, handle = high_throughput(rank, case)
    rows, x = outputs["rows"].clone(), case.x(rank.rank)
    for _ in range(2):
        assert torch.equal(buffer.combine(rows, handle)[0], outputs["combined"])
        buffer.dispatch(x, handle=handle)
        with pytest.raises(weft.Error, match="16-byte aligned"):
            buffer.combine(_unaligned(rows), handle)
        with pytest.raises(weft.Error, match="16-byte aligned"):
            buffer.dispatch(_unaligned(x), handle=handle)
    buffer.destroy()
    buffer, outputs, handle = low_latency(rank, case)
    idx, weights, most = case.topk_idx(rank.rank), case.topk_weights(rank.rank), max(case.tokens)
    rows = outputs["rows"].clone()
    for _ in range(2):
        with pytest.raises(weft.Error, match="16-byte aligned"):
            buffer.low_latency_combine(_unaligned(rows), idx, weights, handle)
        with pytest.raises(weft.Error, match="16-byte aligned"):
            buffer.low_latency_dispatch(_unaligned(x), idx, most, case.num_experts, use_fp8=False)
        assert torch.equal(buffer.low_latency_combine(rows, idx, weights, handle)[0], outputs["combined"])
    buffer.destroy()


def test_rows_of_a_known_form_that_begin_elsewhere_are_refused(pair: RankPool) -> None:
    pair.run(check_unaligned_repeats, CASES[0])
