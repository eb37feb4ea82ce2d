# SPDX-License-Identifier: Apache-2.0
"""Operators under torch.compile with fullgraph=True, beside the plain calls, on CPU ranks.

The backend is aot_eager: Dynamo and AOTAutograd take the graph apart as for any backend, and no C++ is compiled.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import Error
from weft.moe import autograd
from weft.ops import CollectiveOps, ExpertOps
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank, RankPool

CASE = MoeCase((12, 5, 0), 128, 2, 6)


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3, with_gpus=False) as pool:
        yield pool


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)


def experts(x: Tensor, weights: Tensor) -> Tensor:
    return (x.float().sin() * weights.sum(dim=1, keepdim=True)).to(x.dtype)


def inputs_of(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
    x = CASE.x(rank.rank).requires_grad_()
    weights = CASE.topk_weights(rank.rank).requires_grad_()
    return x, CASE.topk_idx(rank.rank), weights


def a_layer_and_its_gradients(rank: Rank, num_worst_tokens: int) -> None:
    buffer = weft.Buffer(rank.group, 1 << 20)
    moe = ExpertOps(buffer)

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        rows = moe.dispatch(x, idx, weights, CASE.num_experts, num_worst_tokens)
        return moe.combine(experts(rows.x, rows.topk_weights), rows.handle)

    results = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=num_worst_tokens == 0):
        for function in (layer, compiled(layer)):
            x, idx, weights = inputs_of(rank)
            out = function(x, idx, weights)
            out.float().square().sum().backward()
            results.append((out.detach(), x.grad, weights.grad))
    x, idx, weights = inputs_of(rank)
    arrived = autograd.dispatch(buffer, x, idx, weights, CASE.num_experts)
    out = autograd.combine(buffer, experts(arrived.x, arrived.topk_weights), arrived.handle)
    out.float().square().sum().backward()
    expected = (out.detach(), x.grad, weights.grad)
    for result in results:
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted)


def a_layer_that_stays_outside(rank: Rank) -> None:
    buffer = weft.Buffer(rank.group, 1 << 20)

    @torch.compiler.disable
    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        arrived = autograd.dispatch(buffer, x, idx, weights, CASE.num_experts)
        return autograd.combine(buffer, experts(arrived.x, arrived.topk_weights), arrived.handle)

    def block(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        return layer(x * 2, idx, weights) * 3

    torch._dynamo.reset()
    results = []
    for function in (block, torch.compile(block, backend="aot_eager")):
        x, idx, weights = inputs_of(rank)
        out = function(x, idx, weights)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad))
    for plain, around in zip(*results, strict=True):
        assert plain is not None
        assert torch.equal(plain, around)


def rows_past_the_real_ones(rank: Rank) -> None:
    moe = ExpertOps(weft.Buffer(rank.group, 1 << 20))
    x, idx, weights = inputs_of(rank)
    rows = moe.dispatch(x.detach(), idx, weights.detach(), CASE.num_experts, 40)
    real = oracle.ht_dispatch(CASE.routes(), CASE.num_experts, rank.rank)
    count = real.topk_idx.size(0)
    assert torch.equal(rows.x[:count], real.take(CASE.all_x()))
    assert not rows.x[count:].any() and not rows.topk_weights[count:].any()
    assert (rows.topk_idx[count:] == -1).all()
    assert rows.slots_per_expert.tolist() == real.per_expert


def low_latency(rank: Rank, use_fp8: bool) -> None:
    most, experts_ = 16, CASE.num_experts
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(most, CASE.hidden, rank.size, experts_)
    moe = ExpertOps(weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True))

    def decode(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        rows = moe.low_latency_dispatch(x, idx, most, experts_, use_fp8)
        y = rows.x.float()
        if use_fp8:
            y = y * rows.scales.repeat_interleave(128, dim=-1)
        return moe.low_latency_combine(y.bfloat16(), idx, weights, rows.handle)

    x, idx, weights = inputs_of(rank)
    given = (x.detach(), idx, weights.detach())
    total = given[2].masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
    for function in (decode, compiled(decode)):
        out = function(*given)
        assert out.shape == x.shape
        assert x.size(0) == 0 or calc_diff(out, given[0].float() * total) < 1e-3


def collectives(rank: Rank) -> None:
    ops = CollectiveOps(weft.Communicator(rank.group))
    size = rank.size

    def all_of_them(x: Tensor) -> Tensor:
        summed = ops.all_reduce(x)
        mean = ops.all_reduce(x, "average")
        gathered = ops.all_gather(x)
        scattered = ops.reduce_scatter(gathered.flatten(0, 1), "average")
        exchanged = ops.all_to_all(x)
        return summed.sum() + (mean * x).sum() + (gathered**2).sum() + scattered.sum() + (exchanged * x).sum()

    results = []
    for function in (all_of_them, compiled(all_of_them)):
        x = (torch.arange(2.0 * size).view(size, 2) + rank.rank).requires_grad_()
        out = function(x)
        out.backward()
        results.append((out.detach(), x.grad))
    alone = [(torch.arange(2.0 * size).view(size, 2) + r).requires_grad_() for r in range(size)]
    total = sum(alone)
    losses = []
    for r in range(size):
        exchanged = torch.stack([alone[q][r] for q in range(size)])
        part = total  # every rank gathered the same rows, so their average is those of this rank
        losses.append(
            total.sum()
            + (total / size * alone[r]).sum()
            + (torch.stack(alone) ** 2).sum()
            + alone[r].sum()
            + (exchanged * alone[r]).sum()
            + 0 * part.sum()
        )
    sum(losses).backward()
    for out, grad in results:
        torch.testing.assert_close(out, losses[rank.rank].detach())
        torch.testing.assert_close(grad, alone[rank.rank].grad)


def operators_keep_the_rules(rank: Rank) -> None:
    communicator = weft.Communicator(rank.group)
    ops, moe = CollectiveOps(communicator), ExpertOps(weft.Buffer(rank.group, 1 << 20))
    x, idx, weights = (t.detach() for t in inputs_of(rank))
    checks = ("test_schema", "test_faketensor")
    y = torch.ones(3, 4)
    torch.library.opcheck(torch.ops.weft.all_reduce.default, (y, "sum", ops.key), test_utils=checks)
    torch.library.opcheck(torch.ops.weft.all_gather.default, (y, 3, ops.key), test_utils=checks)
    torch.library.opcheck(torch.ops.weft.reduce_scatter.default, (y, "sum", 3, ops.key), test_utils=checks)
    torch.library.opcheck(torch.ops.weft.all_to_all.default, (y, ops.key), test_utils=checks)
    given = (x, idx, weights, CASE.num_experts, 40, 3, moe.key)
    torch.library.opcheck(torch.ops.weft.dispatch.default, given, test_utils=checks)
    rows = moe.dispatch(x, idx, weights, CASE.num_experts, 40)
    given = (rows.x, list(rows.handle), moe.key)
    torch.library.opcheck(torch.ops.weft.combine.default, given, test_utils=checks)
    torch.library.opcheck(torch.ops.weft.dispatch_again.default, (x, *given[1:]), test_utils=checks)
    given = (rows.x, rows.topk_weights, *given[1:])
    torch.library.opcheck(torch.ops.weft.combine_with_weights.default, given, test_utils=checks)


def low_latency_operators_keep_the_rules(rank: Rank, num_experts: int, use_fp8: bool) -> None:
    case, most = dataclasses.replace(CASE, num_experts=num_experts), 16
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(most, case.hidden, rank.size, num_experts)
    moe = ExpertOps(weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True))
    x, idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    checks = ("test_schema", "test_faketensor")
    given = (x, idx, most, num_experts, use_fp8, rank.size, moe.key)
    torch.library.opcheck(torch.ops.weft.low_latency_dispatch.default, given, test_utils=checks)
    rows = moe.low_latency_dispatch(x, idx, most, num_experts, use_fp8)
    given = (rows.x.bfloat16(), idx, weights, list(rows.handle), moe.key)
    torch.library.opcheck(torch.ops.weft.low_latency_combine.default, given, test_utils=checks)


@pytest.mark.parametrize("num_worst_tokens", [40, 0], ids=["worst", "counted"])
def test_a_compiled_layer_and_its_gradients_are_those_of_plain_calls(
    three: RankPool, num_worst_tokens: int
) -> None:
    three.run(a_layer_and_its_gradients, num_worst_tokens)


def test_a_layer_of_plain_calls_stays_outside_the_compiled_block(three: RankPool) -> None:
    three.run(a_layer_that_stays_outside)


def test_rows_past_the_real_ones_are_zero(three: RankPool) -> None:
    three.run(rows_past_the_real_ones)


@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_low_latency_calls_compile(three: RankPool, use_fp8: bool) -> None:
    three.run(low_latency, use_fp8)


def test_collectives_compile_and_have_gradients(three: RankPool) -> None:
    three.run(collectives)


def test_operators_keep_the_rules_of_torch_library(three: RankPool) -> None:
    three.run(operators_keep_the_rules)


@pytest.mark.parametrize(
    ("num_experts", "use_fp8"), [(6, False), (7, True), (2, False)]
)  # also uneven, or none
def test_low_latency_operators_keep_the_rules_of_torch_library(
    three: RankPool, num_experts: int, use_fp8: bool
) -> None:
    three.run(low_latency_operators_keep_the_rules, num_experts, use_fp8)


def test_an_operator_whose_buffer_is_gone_says_so() -> None:
    gc.collect()
    with pytest.raises(Error, match="whose ExpertOps or CollectiveOps object is gone"):
        torch.ops.weft.all_to_all(torch.ones(2), 1 << 40)
