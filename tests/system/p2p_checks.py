# SPDX-License-Identifier: Apache-2.0
"""What tests of the split all-to-all run on every rank: exchanges, compared with plain indexing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank

POISON = -3.0


@dataclass(frozen=True)
class Form:
    """How an exchange's rows look."""

    in_dtype: torch.dtype = torch.bfloat16
    y_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    scale_words: int = 0
    padding: int = 1
    per_expert: int | None = None  # rows of each expert, instead of packed ones
    exact: bool = False

    def options(self) -> dict[str, Any]:
        """Return arguments of P2PAllToAll."""
        scales = (
            {"hidden_dim_scale": self.scale_words, "scale_dtype": torch.float32} if self.scale_words else {}
        )
        return {
            "in_dtype": self.in_dtype,
            "out_dtype": self.out_dtype,
            "expert_padding": self.padding,
            "max_tokens_per_expert": self.per_expert,
            "exact": self.exact,
            **scales,
        }


def make(rank: Rank, case: MoeCase, form: Form, most: int, **options: Any) -> weft.P2PAllToAll:
    """Return a new all-to-all for the case."""
    group = options.pop("group", rank.group)
    return weft.P2PAllToAll(
        group,
        max_num_tokens=most,
        num_experts=case.num_experts,
        hidden_dim=case.hidden,
        num_experts_per_token=case.top_k,
        **{**form.options(), "device": "cpu", **options},
    )


def rows_of(case: MoeCase, form: Form, rank: int) -> Tensor:
    """Return what a rank sends."""
    x = case.x(rank)
    if form.in_dtype in (torch.float8_e4m3fn, torch.uint8):
        return (x * 8).to(torch.float32).to(torch.float8_e4m3fn).view(form.in_dtype)
    return x.to(form.in_dtype)


def expert_result(rows: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    """Return what an expert makes of rows, which any rank can compute for any."""
    values = rows if rows.dtype != torch.uint8 else rows.view(torch.float8_e4m3fn)
    return (values.float() * (0.25 + 0.125 * (expert % 7))).to(dtype)


def expected_places(
    case: MoeCase, form: Form, rank: int, ranks: int
) -> tuple[list[int], list[int], list[Any]]:
    """Return counts, first rows of the local experts, and per row (row, expert, source, token, slot)."""
    experts = oracle.local_experts(case.num_experts, ranks, rank)
    routes = [case.topk_idx(source) for source in range(ranks)]
    counts, begins, rows = [], [], []
    at = 0
    for local, expert in enumerate(experts):
        begin = at if form.per_expert is None else local * form.per_expert
        found = [
            (source, token, slot)
            for source in range(ranks)
            for token, slot in (routes[source] == expert).nonzero().tolist()
        ]
        rows += [(begin + i, expert, *place) for i, place in enumerate(found)]
        counts.append(len(found))
        begins.append(begin)
        at += -(-len(found) // form.padding) * form.padding
    return counts, begins, rows


def check_received(case: MoeCase, form: Form, rank: int, ranks: int, got: Any) -> None:
    """Compare counts, rows, scales, weights and sources, each at its place."""
    counts, _, places = expected_places(case, form, rank, ranks)
    assert got.num_tokens.tolist() == counts
    flat = got.x.reshape(-1, case.hidden)
    sources = [rows_of(case, form, source) for source in range(ranks)]
    weights = case.all_weights()
    for row, _, source, token, slot in places:
        assert torch.equal(flat[row].view(torch.uint8), sources[source][token].view(torch.uint8)), (
            row,
            source,
            token,
        )
        assert int(got.src_rank.reshape(-1)[row]) == source
        assert int(got.src_token.reshape(-1)[row]) == token
        assert float(got.weights.reshape(-1)[row]) == float(weights[source][token, slot])
        if form.scale_words:
            scales = got.x_scale.reshape(-1, form.scale_words)
            assert torch.equal(scales[row], case.scales(source, form.scale_words)[token])


def results_of(case: MoeCase, form: Form, rank: int, ranks: int, got: Any) -> Tensor:
    """Return the experts' rows, NaN where there is none."""
    y = torch.full(got.x.shape, float("nan"), dtype=form.y_dtype, device=got.x.device)
    flat, rows = y.view(-1, case.hidden), got.x.reshape(-1, case.hidden)
    counts, begins, _ = expected_places(case, form, rank, ranks)
    first = oracle.local_experts(case.num_experts, ranks, rank).start
    for local, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        flat[begin : begin + count] = expert_result(rows[begin : begin + count], first + local, form.y_dtype)
    return y


def expected_sums(case: MoeCase, form: Form, rank: int, weights: Tensor | None = None) -> Tensor:
    """Return float32 [T, H]."""
    x, ids = rows_of(case, form, rank), case.topk_idx(rank)
    weights = case.topk_weights(rank) if weights is None else weights
    sums = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(case.top_k):
        for expert in ids[:, k].unique().tolist():
            if expert < 0:
                continue
            chosen = ids[:, k] == expert
            y = expert_result(x[chosen], expert, form.y_dtype).float()
            sums[chosen] += weights[chosen, k].unsqueeze(1) * y
    return sums


def check_sums(case: MoeCase, form: Form, rank: int, out: Tensor, before: Tensor | None = None) -> None:
    """Compare combined tokens: bit by bit where all slots are summed in order, else within a rounding."""
    expected = expected_sums(case, form, rank)
    if before is not None:
        expected = expected + before.float()
    assert out.dtype == form.out_dtype
    assert out.shape == expected.shape
    assert not bool(out.isnan().any())
    if form.exact:
        assert torch.equal(out, expected.to(form.out_dtype))
    elif out.numel():
        assert calc_diff(out, expected) < 1e-5


def sent_of(case: MoeCase, form: Form, rank: int, device: Any) -> tuple[Any, ...]:
    """Return the arguments of dispatch_send()."""
    scale = case.scales(rank, form.scale_words).to(device) if form.scale_words else None
    ids, weights = case.topk_idx(rank).to(device), case.topk_weights(rank).to(device)
    return rows_of(case, form, rank).to(device), ids, weights, scale


def on_cpu(got: Any) -> Any:
    """Return the same rows on the CPU."""
    return type(got)(*(None if part is None else part.cpu() for part in got))


def exchange(
    rank: Rank,
    a2a: weft.P2PAllToAll,
    case: MoeCase,
    form: Form,
    accumulate: bool = False,
    keep: list[Any] | None = None,
) -> Tensor:
    """Run one exchange and check each phase. keep: gets what came."""
    me, ranks, device = rank.rank, rank.size, a2a.device
    handle = a2a.dispatch_send(*sent_of(case, form, me, device))
    got = on_cpu(a2a.dispatch_recv(handle))
    check_received(case, form, me, ranks, got)
    if keep is not None:
        keep.append((case, got))
    a2a.combine_send(results_of(case, form, me, ranks, got).to(device), handle)
    before = None
    if accumulate:
        shape = (case.tokens[me], case.hidden)
        before = torch.full(shape, 0.5, dtype=form.out_dtype, device=device)
    given = None if before is None else before.clone()
    out = a2a.combine_recv(handle, given, accumulate).cpu()
    check_sums(case, form, me, out, None if before is None else before.cpu())
    return out
