# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer against the oracle: both layouts, cached and worst-case calls, rounding, sessions, bad input."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.elastic_refs import ordered_accumulate, reduce_equal_slots
from weft.testing.ranks import Rank, RankPool

ALIGNMENT = 8


def cached_buffer(rank: Rank, multiple: bool = True, hybrid: bool = True) -> weft.ElasticBuffer:
    """Return this rank's buffer of the pool, made at its first use."""
    key = f"elastic {multiple} {hybrid}"
    if key not in rank.kept:
        rank.kept[key] = weft.ElasticBuffer(
            rank.group,
            num_bytes=16 << 20,
            allow_hybrid_mode=hybrid,
            allow_multiple_reduction=multiple,
            num_gpu_timeout_secs=30,
        )
    return rank.kept[key]


def node_of_rank(num_ranks: int) -> list[int]:
    """Return the node of each rank, as WEFT_RANKS_PER_NODE cuts this host."""
    per_node = int(weft._core.config().ranks_per_node) or num_ranks
    return [rank // per_node for rank in range(num_ranks)]


def logical_size(num_ranks: int, hybrid: bool) -> tuple[int, int]:
    """Return (scale-out, scale-up) ranks: nodes of equal size, in hybrid mode, or one domain."""
    nodes = node_of_rank(num_ranks)
    num_nodes = nodes[-1] + 1
    equal = num_ranks % num_nodes == 0 and nodes.count(num_nodes - 1) == nodes.count(0)
    return (num_nodes, num_ranks // num_nodes) if hybrid and equal else (1, num_ranks)


def case_for(num_ranks: int, **options: Any) -> MoeCase:
    tokens = tuple((7, 0, 12, 5)[r % 4] for r in range(num_ranks))
    return MoeCase(**{"tokens": tokens, "hidden": 72, "top_k": 4, "num_experts": 4 * num_ranks, **options})


def dispatch(buffer: weft.ElasticBuffer, case: MoeCase, x: Any = None, **options: Any) -> Any:
    me = buffer.rank_idx
    return buffer.dispatch(
        case.x(me) if x is None else x,
        case.topk_idx(me),
        case.topk_weights(me),
        num_experts=case.num_experts,
        num_max_tokens_per_rank=max(case.tokens),
        **options,
    )


def slot_values(case: MoeCase, rank: int) -> Tensor:
    """Return bf16 [tokens, top_k, hidden]: what each slot's expert makes of the token; any rank computes it.

    Two slots cancel and are so large that the others vanish beside them: any other order of adding shows.
    """
    factors = 1 + case.topk_idx(rank).float() / 7
    for slot, factor in ((1, 2.0**26), (2, -(2.0**26))):
        factors[:, slot : slot + 1] = factor
    return (case.x(rank).float().unsqueeze(1) * factors.unsqueeze(2)).bfloat16()


def reference(
    case: MoeCase, rank: int, biases: tuple[Tensor, Tensor], sums_rank: bool, sums_node: bool
) -> Tensor:
    """Return what combine gives: slots of a rank, and then of a node, are summed and rounded first where it is said."""
    ids, per_rank = case.topk_idx(rank), -(-case.num_experts // case.num_ranks)
    owner = torch.where(ids < 0, -1, ids // per_rank)
    data = slot_values(case, rank).masked_fill((ids < 0).unsqueeze(2), 0.0)
    if sums_rank:
        data = reduce_equal_slots(data, owner)
    nodes = torch.tensor(node_of_rank(case.num_ranks))
    if sums_node and len(nodes.unique()) > 1:
        data = reduce_equal_slots(data, torch.where(owner < 0, -1, nodes[owner.clamp(min=0)]))
    return ordered_accumulate(data, biases[0].float() + biases[1].float())


def check_rows(rank: Rank, case: MoeCase, multiple: bool = True, hybrid: bool = True, **options: Any) -> None:
    buffer, me = cached_buffer(rank, multiple, hybrid), rank.rank
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    n, most = len(rows.src_rank), max(case.tokens)
    x, idx, weights, handle, event = dispatch(buffer, case, **options)
    assert event.event is None
    assert torch.equal(x[:n], rows.take(case.all_x()))
    assert torch.equal(idx[:n], rows.topk_idx)
    assert torch.equal(weights[:n], rows.take(case.all_weights()))  # unmasked
    assert torch.equal(handle.recv_src_metadata[:n, 0].long(), rows.src_rank * most + rows.src_token)
    slots = torch.arange(case.top_k).expand_as(rows.topk_idx).masked_fill(rows.topk_idx < 0, -1)
    assert torch.equal(
        handle.recv_src_metadata[:n, 1].long(), rows.src_rank * case.top_k + slots.amax(1, keepdim=True)[:, 0]
    )
    assert (handle.recv_src_metadata[:, 2:] == -1).all()
    scaleout, scaleup = logical_size(rank.size, hybrid)
    assert buffer.get_logical_domain_size() == (scaleout, scaleup)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(me, scaleup)
    per_place = rows.per_source.view(scaleout, scaleup).sum(0)
    assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank.long(), per_place.cumsum(0))
    aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in rows.per_expert]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == rows.per_expert
    assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
    if options.get("do_cpu_sync") is False:
        assert handle.num_recv_tokens == len(x) == max(rank.size * most, 1)
        assert handle.num_recv_tokens_per_expert_list == []
        assert (idx[n:] == -1).all()
    else:
        assert handle.num_recv_tokens == len(x) == n
        assert handle.num_recv_tokens_per_expert_list == aligned

    y = torch.zeros_like(x)
    values = [slot_values(case, r) for r in range(rank.size)]
    held = rows.take(values)
    total = torch.zeros_like(held[:, 0], dtype=torch.float32)
    for k in range(case.top_k):
        total += held[:, k].float().masked_fill(rows.topk_idx[:, k : k + 1] < 0, 0)
    y[:n] = total.bfloat16()
    biases = (case.bias(me, 0), case.bias(me, 1))
    combined, back, _ = buffer.combine(y, handle, topk_weights=weights, bias=biases)
    assert torch.equal(combined, reference(case, me, biases, True, multiple and hybrid))
    assert torch.equal(back, case.topk_weights(me).masked_fill(case.topk_idx(me) < 0, 0))

    cached = buffer.dispatch(case.x(me), topk_weights=case.topk_weights(me), handle=handle)
    assert cached[3] is handle
    assert torch.equal(cached[0][:n], x[:n])
    assert torch.equal(cached[1], idx)
    assert torch.equal(cached[2][:n], weights[:n])
    assert buffer.dispatch(case.x(me), handle=handle)[2] is None


def check_expanded(
    rank: Rank, case: MoeCase, multiple: bool = True, hybrid: bool = True, **options: Any
) -> None:
    buffer, me = cached_buffer(rank, multiple, hybrid), rank.rank
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    n = len(rows.src_rank)
    x, idx, weights, handle, _ = dispatch(buffer, case, do_expand=True, do_zero_padding=True, **options)
    assert idx is None
    y = torch.full_like(x, float("nan"))  # padding must not matter
    sources, source_weights = rows.take(case.all_x()), rows.take(case.all_weights())
    values = rows.take([slot_values(case, r) for r in range(rank.size)])
    expected = torch.full_like(rows.topk_idx, -1)
    begin, seen = 0, torch.zeros(len(x), dtype=torch.bool)
    for expert, count in enumerate(rows.per_expert):
        row, slot = (rows.topk_idx == expert).nonzero(as_tuple=True)
        at = begin + torch.arange(count)
        assert torch.equal(x[at], sources[row])
        assert torch.equal(weights[at], source_weights[row, slot])
        assert handle.psum_num_recv_tokens_per_expert[expert] == begin + count
        y[at], expected[row, slot], seen[at] = values[row, slot], at, True
        begin += -(-count // ALIGNMENT) * ALIGNMENT
    assert (x[~seen] == 0).all()
    assert (weights[~seen] == 0).all()
    assert torch.equal(handle.recv_src_metadata[:n, 2:].long(), expected)
    if options.get("do_cpu_sync") is False:
        local = len(rows.per_expert)
        slots = max(rank.size * max(case.tokens), 1) * min(case.top_k, local)
        assert len(x) == -(-(slots + (ALIGNMENT - 1) * local) // ALIGNMENT) * ALIGNMENT
    else:
        assert len(x) == begin == sum(handle.num_recv_tokens_per_expert_list)
    assert handle.num_expanded_tokens == len(x)

    biases = (case.bias(me, 0), case.bias(me, 1))
    combined, back, _ = buffer.combine(y, handle, topk_weights=weights if multiple else None, bias=biases)
    assert torch.equal(combined, reference(case, me, biases, multiple, multiple and hybrid))
    if multiple:
        assert torch.equal(back, case.topk_weights(me).masked_fill(case.topk_idx(me) < 0, 0))
    again = buffer.dispatch(
        case.x(me), topk_weights=case.topk_weights(me), handle=handle, do_expand=True, do_zero_padding=True
    )
    assert torch.equal(again[0], x)
    assert torch.equal(again[2], weights)


@pytest.mark.parametrize("sync", [None, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"routing": "any"},
        {"routing": "none"},
        {"routing": "one expert"},
        {"top_k": 1},
        {"empty_share": 0.9},
    ],
    ids=str,
)
def test_rows_per_rank(pool: RankPool, options: dict[str, Any], sync: bool | None) -> None:
    check = partial(check_rows, expert_alignment=ALIGNMENT, do_cpu_sync=sync)
    pool.run(check, case_for(pool.num_ranks, **options))


@pytest.mark.parametrize("sync", [None, False])
@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("options", [{}, {"empty_share": 0.9}, {"routing": "none"}, {"top_k": 1}], ids=str)
def test_rows_per_expert(pool: RankPool, options: dict[str, Any], multiple: bool, sync: bool | None) -> None:
    case = case_for(pool.num_ranks, **options)
    check = partial(check_expanded, expert_alignment=ALIGNMENT, do_cpu_sync=sync)
    pool.run(check, case, multiple)


def test_no_tokens_anywhere(pair: RankPool) -> None:
    case = case_for(2, tokens=(0, 0))
    for check in (check_rows, check_expanded):
        pair.run(partial(check, expert_alignment=ALIGNMENT), case)


def test_experts_that_ranks_do_not_divide(pair: RankPool) -> None:
    case = case_for(2, num_experts=7)
    pair.run(check_received_only, case)


def check_received_only(rank: Rank, case: MoeCase) -> None:
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    x, idx, _, handle, _ = dispatch(cached_buffer(rank), case)
    assert torch.equal(x, rows.take(case.all_x()))
    assert torch.equal(idx, rows.topk_idx)
    assert handle.num_recv_tokens_per_expert_list == rows.per_expert


def check_scales(rank: Rank, case: MoeCase, col_major: bool, do_expand: bool) -> None:
    quantized = [x.to(torch.float8_e4m3fn) for x in case.all_x()]
    scales = [case.scales(r, 3) for r in range(rank.size)]
    me = rank.rank
    mine = scales[me].T.contiguous().T
    buffer = cached_buffer(rank)
    (x, sf), _, _, _, _ = dispatch(
        buffer, case, (quantized[me], mine), do_expand=do_expand, use_tma_aligned_col_major_sf=col_major
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    bytes_of, scales_of = rows.take([q.view(torch.uint8) for q in quantized]), rows.take(scales)
    if do_expand:
        row = torch.cat([(rows.topk_idx == e).nonzero()[:, 0] for e in range(len(rows.per_expert))])
        bytes_of, scales_of = bytes_of[row], scales_of[row]
    assert x.dtype == torch.float8_e4m3fn
    assert torch.equal(x.view(torch.uint8), bytes_of)
    assert torch.equal(sf, scales_of)
    if col_major:
        assert sf.stride() == (1, -(-sf.size(0) // 4) * 4)
    else:
        assert sf.is_contiguous()


@pytest.mark.parametrize("col_major", [False, True])
@pytest.mark.parametrize("do_expand", [False, True])
def test_fp8_rows_bring_their_scales(pair: RankPool, col_major: bool, do_expand: bool) -> None:
    pair.run(check_scales, case_for(2, hidden=384, tokens=(6, 9)), col_major, do_expand)


def check_repeats(rank: Rank, case: MoeCase) -> None:
    buffer = cached_buffer(rank)
    first = dispatch(buffer, case, do_expand=True, do_zero_padding=True)
    combined = buffer.combine(first[0], first[3])[0]
    for _ in range(5):
        again = dispatch(buffer, case, do_expand=True, do_zero_padding=True)
        again[3].deterministic_sort()
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[3].recv_src_metadata, first[3].recv_src_metadata)
        assert torch.equal(buffer.combine(again[0], again[3])[0], combined)


def test_repeats_are_bitwise_equal(pool: RankPool) -> None:
    pool.run(check_repeats, case_for(pool.num_ranks))


def check_stats_and_copies(rank: Rank, case: MoeCase) -> None:
    buffer, me = cached_buffer(rank), rank.rank
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    stats = torch.full((len(rows.per_expert),), 5, dtype=torch.int32)
    ids = case.topk_idx(me)
    for copies in (True, False):
        handle = buffer.dispatch(
            case.x(me),
            ids,
            cumulative_local_expert_recv_stats=stats,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=max(case.tokens),
            do_handle_copy=copies,
        )[3]
        assert (handle.topk_idx.data_ptr() != ids.data_ptr()) == copies
        sent = handle.dst_buffer_slot_idx
        assert torch.equal(sent >= 0, ids >= 0)
    assert stats.tolist() == [5 + 2 * count for count in rows.per_expert]


def test_stats_are_added_to_and_ids_are_copied_when_asked(pair: RankPool) -> None:
    pair.run(check_stats_and_copies, case_for(2, tokens=(6, 9)))


def check_copied_handle(rank: Rank, case: MoeCase, do_expand: bool) -> None:
    buffer = cached_buffer(rank)
    x, _, _, handle, _ = dispatch(buffer, case, do_expand=do_expand)
    combined = buffer.combine(x, handle)[0]
    for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert torch.equal(buffer.combine(x, copied)[0], combined)
        assert torch.equal(buffer.dispatch(case.x(rank.rank), handle=copied, do_expand=do_expand)[0], x)


@pytest.mark.parametrize("do_expand", [False, True])
def test_handles_can_be_copied_and_pickled(pair: RankPool, do_expand: bool) -> None:
    pair.run(check_copied_handle, case_for(2, tokens=(6, 9)), do_expand)


FIELDS: dict[str, list[Any]] = {
    "topk_idx": [None, "ids", torch.zeros((1, 3), dtype=torch.int64)],
    "recv_topk_idx": [torch.zeros((1, 3), dtype=torch.int64)],
    "num_sms": [-3, None],
    "do_expand": [None, 1],
    "sums_at_owner": [2],
    "expansion": ["rows", torch.zeros(3)],
    "state": [None],
}


def check_fields(rank: Rank, case: MoeCase, do_expand: bool) -> None:
    """A field that was set to what does not fit is named, and the handle serves again with the old one."""
    buffer = cached_buffer(rank)
    x, _, _, handle, _ = dispatch(buffer, case, do_expand=do_expand)
    combined = buffer.combine(x, handle)[0]
    wrong = {**FIELDS, **({"num_expanded_tokens": [3, -1], "expansion": [None]} if do_expand else {})}
    for field, value in ((field, value) for field, values in wrong.items() for value in values):
        right = getattr(handle, field)
        setattr(handle, field, value)
        named = "handle" if field == "state" else rf"handle\.({field}|expansion)"
        for call in (
            lambda: buffer.combine(x, handle),
            lambda: buffer.dispatch(case.x(rank.rank), handle=handle, do_expand=do_expand),
        ):
            with pytest.raises(weft.Error, match=rf"^{named}: got .*, allowed: "):
                call()
        setattr(handle, field, right)
        assert torch.equal(buffer.combine(x, handle)[0], combined)


@pytest.mark.parametrize("do_expand", [False, True])
def test_fields_of_a_handle_that_do_not_fit_are_named(pair: RankPool, do_expand: bool) -> None:
    pair.run(check_fields, case_for(2, tokens=(6, 9)), do_expand)


def check_sessions(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    mine = [torch.full((3, 5), rank.rank + 1.0), torch.arange(7) + rank.rank, torch.rand(5000)]
    everyone: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(everyone, mine, group=rank.group)
    limit = sum(buffer.get_agrs_num_max_session_bytes(rank.group, tuple(t.shape), t.dtype) for t in mine)
    buffer.agrs_set_config(limit, 2)
    with buffer.agrs_new_session():
        *gathered, wait = buffer.all_gather(mine)
        wait()
        for i, result in enumerate(gathered):
            assert torch.equal(result, torch.stack([theirs[i] for theirs in everyone]))
        with pytest.raises(weft.Error, match="agrs_set_config") as refused:
            buffer.all_gather(mine)
        assert refused.value.code == "capacity"
    with buffer.agrs_new_session():
        tensor = buffer.agrs_get_inplace_tensor((4,), torch.int32)
        tensor.fill_(rank.rank)
        result, wait = buffer.all_gather(tensor)
        wait()
        assert result[:, 0].tolist() == list(range(rank.size))
    with pytest.raises(weft.Error, match="session"):
        buffer.all_gather(mine)
    buffer.barrier()
    buffer.barrier(with_cpu_sync=True)


def test_sessions_gather_in_rank_order(pool: RankPool) -> None:
    pool.run(check_sessions)


def check_sessions_fit(rank: Rank) -> None:
    """A session of the size that was asked for has room while what earlier ones gathered is kept."""
    size = 1 << 20
    buffer_bytes = weft.ElasticBuffer.get_agrs_buffer_size_hint(rank.group, rank.size * size)
    buffer = weft.ElasticBuffer(rank.group, buffer_bytes)
    buffer.agrs_set_config(rank.size * size, 1)
    kept = []
    for value in range(6):
        with buffer.agrs_new_session():
            tensor = buffer.agrs_get_inplace_tensor((size // 4096, 4096), torch.uint8)
            tensor.fill_(value)
            gathered, wait = buffer.all_gather(tensor)
            wait()
        kept.append(gathered)
    assert all((gathered == value).all() for value, gathered in enumerate(kept))


def test_sessions_fit_while_results_are_kept(pool: RankPool) -> None:
    pool.run(check_sessions_fit)


def check_handle_outlives_its_buffer(rank: Rank, case: MoeCase, do_expand: bool, multiple: bool) -> None:
    """A handle whose buffer is gone, on one that is wider, with the client's tensors overwritten and fields set."""
    me, rows = rank.rank, oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    old = weft.ElasticBuffer(
        rank.group, num_bytes=0, allow_multiple_reduction=multiple, explicitly_destroy=True
    )
    x, idx, weights, handle, _ = dispatch(old, case, do_expand=do_expand)
    if idx is not None:
        assert torch.equal(idx, rows.topk_idx)
        idx.fill_(-1)
    old.destroy()
    handle.num_sms = 2
    handle.note = "a client's own"
    sent = None if do_expand and not multiple else weights
    new = weft.ElasticBuffer(rank.group, num_bytes=0, allow_multiple_reduction=multiple)
    for buffer in (new, cached_buffer(rank, multiple)):
        combined, back, _ = buffer.combine(x, handle, topk_weights=sent)
        assert combined.shape == (case.tokens[me], case.hidden)
        if back is not None:
            assert torch.equal(back, case.topk_weights(me).masked_fill(case.topk_idx(me) < 0, 0))
        again, again_idx, _, same, _ = buffer.dispatch(case.x(me), handle=handle, do_expand=do_expand)
        assert same is handle
        assert torch.equal(again, x) or do_expand  # whose padding is anything
        if again_idx is not None:
            assert torch.equal(again_idx, rows.topk_idx)
            again_idx.fill_(-1)


@pytest.mark.parametrize(("do_expand", "multiple"), [(False, True), (True, True), (True, False)])
def test_a_handle_belongs_to_its_dispatch(pair: RankPool, do_expand: bool, multiple: bool) -> None:
    pair.run(check_handle_outlives_its_buffer, case_for(2), do_expand, multiple)


def check_refusals(rank: Rank, case: MoeCase) -> None:
    buffer, me = cached_buffer(rank), rank.rank
    x, ids = case.x(me), case.topk_idx(me)
    few: dict[str, Any] = {"num_experts": case.num_experts, "num_max_tokens_per_rank": 1}
    with pytest.raises(weft.Error, match="num_max_tokens_per_rank"):
        buffer.dispatch(x, ids, **few)
    good = {**few, "num_max_tokens_per_rank": 99}
    with pytest.raises(weft.Error, match="num_experts"):
        buffer.dispatch(x, ids, num_max_tokens_per_rank=99)
    with pytest.raises(weft.Error, match="expert twice"):
        buffer.dispatch(x, torch.ones_like(ids), do_expand=True, **good)
    with pytest.raises(weft.Error, match="topk_idx"):
        buffer.dispatch(x, ids[:-1], **good)
    with pytest.raises(weft.Error, match="expert_alignment"):
        buffer.dispatch(x, ids, expert_alignment=0, **good)
    y, _, _, handle, _ = dispatch(buffer, case)
    with pytest.raises(weft.Error, match="do_expand"):
        buffer.dispatch(x, handle=handle, do_expand=True)
    others = {"num_experts": 99, "num_max_tokens_per_rank": 98, "expert_alignment": 3}
    for name, value in others.items():
        held = getattr(handle, name)
        with pytest.raises(weft.Error, match=f"^{name}: .*allowed: {held}, as in the handle's"):
            buffer.dispatch(x, handle=handle, **{name: value})
    same = {name: getattr(handle, name) for name in others}
    assert torch.equal(buffer.dispatch(x, handle=handle, **same)[0], y)
    with pytest.raises(weft.Error, match="topk_idx"):
        buffer.dispatch(x, ids, handle=handle)
    with pytest.raises(weft.Error, match="allocate_on_comm_stream"):
        buffer.dispatch(x, handle=handle, allocate_on_comm_stream="yes")
    with pytest.raises(weft.Error, match="allocate_on_comm_stream"):
        buffer.combine(y, handle, allocate_on_comm_stream="yes")
    with pytest.raises(weft.Error, match="x: got"):
        buffer.combine(y[:-1], handle)
    with pytest.raises(weft.Error, match="x: got"):
        buffer.combine(y.float(), handle)
    group = torch.distributed.new_group([me], use_local_synchronization=True)
    with pytest.raises(weft.Error, match=r"^handle: got the handle of other ranks"):
        weft.ElasticBuffer(group, num_bytes=0).combine(y, handle)
    with pytest.raises(weft.Error, match=r"^handle: got "):
        buffer.combine(y, tuple(vars(handle).values()))
    with pytest.raises(weft.Error, match="num_bytes"):
        weft.ElasticBuffer(rank.group, num_bytes=5)
    with pytest.raises(weft.Error, match="num_bytes"):
        weft.ElasticBuffer(rank.group)
    assert torch.equal(buffer.combine(y, handle)[0].isnan().any(), torch.tensor(False))


def test_bad_arguments_are_named_and_leave_the_buffer_usable(pair: RankPool) -> None:
    pair.run(check_refusals, case_for(2, tokens=(6, 9)))


def check_first_room(rank: Rank, use_fp8: bool, multiple: bool) -> None:
    """A buffer made with the MoE sizes has room for the worst case: a captured first call could not grow it."""
    tokens, hidden, top_k = 1536, 2048, 4
    buffer = weft.ElasticBuffer(
        rank.group,
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=top_k,
        use_fp8_dispatch=use_fp8,
        allow_multiple_reduction=multiple,
        num_gpu_timeout_secs=30,
    )
    assert buffer.runtime is not None
    room = buffer.runtime.core.window_bytes
    case = MoeCase((tokens,) * rank.size, hidden, top_k, 4 * rank.size, empty_share=0)
    x: Any = case.x(rank.rank)
    if use_fp8:
        x = (x.to(torch.float8_e4m3fn), torch.ones(tokens, hidden // 128))
    recv, _, _, handle, _ = dispatch(buffer, case, x, do_cpu_sync=False, do_expand=True)
    rows = recv[0] if use_fp8 else recv
    buffer.combine(torch.zeros(rows.shape, dtype=torch.bfloat16), handle)
    buffer.dispatch(x, handle=handle, do_expand=True)
    assert buffer.runtime.core.window_bytes == room


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("use_fp8", [True, False])
def test_moe_sizes_give_the_first_call_room(pair: RankPool, use_fp8: bool, multiple: bool) -> None:
    pair.run(check_first_room, use_fp8, multiple)
