# SPDX-License-Identifier: Apache-2.0
"""Gradients through dispatch and combine, against the same layer on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from weft.moe import autograd
from weft.moe.buffer import Buffer
from weft.moe.p2p import P2PAllToAll
from weft.testing.ranks import Rank, run_ranks

HIDDEN, EXPERTS_PER_RANK, TOP_K = 64, 2, 2


def inputs_of(rank: int, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices
    if tokens:
        topk_idx[0, 1] = -1
    return x, topk_idx, torch.rand(tokens, TOP_K, generator=generator)


def expert_scales(experts: int) -> torch.Tensor:
    return torch.randn(experts, HIDDEN, generator=torch.Generator().manual_seed(99))


def apply_experts(
    x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Each expert multiplies a row by its own vector; float32[rows, hidden]."""
    total = torch.zeros(x.shape[0], HIDDEN)
    for expert in range(scales.shape[0]):
        row, slot = (idx == expert).nonzero(as_tuple=True)
        total = total.index_add(0, row, x.float()[row] * scales[expert] * weights[row, slot].unsqueeze(1))
    return total


def gradients_over_ranks(me: Rank, tokens_of: list[int]) -> dict[str, torch.Tensor]:
    experts = EXPERTS_PER_RANK * me.size
    buffer = Buffer(me.group, num_nvl_bytes=1 << 20, device="cpu")
    x, topk_idx, weights = inputs_of(me.rank, tokens_of[me.rank], experts)
    first = me.rank * EXPERTS_PER_RANK
    scales = expert_scales(experts)[first : first + EXPERTS_PER_RANK].clone().requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    arrived = autograd.dispatch(buffer, x, topk_idx, weights, experts)
    y = apply_experts(arrived.x, arrived.topk_idx, arrived.topk_weights, scales)
    out = autograd.combine(buffer, y.bfloat16(), arrived.handle)
    (out.float() ** 2).sum().backward()
    assert x.grad is not None and weights.grad is not None and scales.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "scales": scales.grad}


def gradients_on_one_rank(rank: int, tokens: int, experts: int) -> dict[str, torch.Tensor]:
    x, topk_idx, weights = inputs_of(rank, tokens, experts)
    scales = expert_scales(experts).requires_grad_()
    wide = x.float().requires_grad_()
    weights.requires_grad_()
    out = apply_experts(wide, topk_idx, weights, scales)
    (out**2).sum().backward()
    assert wide.grad is not None and weights.grad is not None and scales.grad is not None
    return {"out": out.detach(), "x": wide.grad, "weights": weights.grad, "scales": scales.grad}


@pytest.mark.parametrize("tokens_of", [[9], [5, 7], [6, 0, 11], [0, 0]])
def test_gradients_are_those_of_one_rank(tokens_of: list[int]) -> None:
    experts = EXPERTS_PER_RANK * len(tokens_of)
    got = run_ranks(len(tokens_of), gradients_over_ranks, tokens_of)
    wanted = [gradients_on_one_rank(rank, tokens, experts) for rank, tokens in enumerate(tokens_of)]
    # Rows and their gradients are rounded to bf16 once per rank they go to, and once when summed.
    close = {"rtol": 3 * 2.0**-8, "atol": 2.0**-6}
    for mine, reference in zip(got, wanted, strict=True):
        for name in ("out", "x", "weights"):
            torch.testing.assert_close(mine[name].float(), reference[name].float(), **close)
    all_scales = torch.cat([mine["scales"] for mine in got])
    total = sum((reference["scales"] for reference in wanted), torch.zeros_like(all_scales))
    torch.testing.assert_close(all_scales, total, rtol=2.0**-5, atol=2.0**-4)


def gradients_over_phases(me: Rank, tokens_of: list[int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    experts = EXPERTS_PER_RANK * me.size
    dtype = options.get("in_dtype", torch.bfloat16)
    a2a = P2PAllToAll(
        me.group,
        max_num_tokens=max(*tokens_of, 1),
        num_experts=experts,
        hidden_dim=HIDDEN,
        num_experts_per_token=TOP_K,
        device="cpu",
        **options,
    )
    x, topk_idx, weights = inputs_of(me.rank, tokens_of[me.rank], experts)
    x = x.to(dtype)
    first = me.rank * EXPERTS_PER_RANK
    scales = expert_scales(experts)[first : first + EXPERTS_PER_RANK].clone().requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    sending = autograd.p2p_dispatch_send(a2a, x, topk_idx, weights)
    rows = autograd.p2p_dispatch_recv(sending)
    is_row = a2a.is_row(rows.num_tokens).flatten()
    of_expert = torch.repeat_interleave(torch.arange(EXPERTS_PER_RANK), rows.num_tokens)
    scale = torch.zeros(is_row.numel(), HIDDEN).masked_scatter(is_row.unsqueeze(1), scales[of_expert])
    y = rows.x.float().view(-1, HIDDEN) * scale * rows.weights.view(-1, 1)
    out = autograd.p2p_combine_recv(autograd.p2p_combine_send(y.to(dtype).view(rows.x.shape), rows))
    (out.float() ** 2).sum().backward()
    assert x.grad is not None and weights.grad is not None and scales.grad is not None
    a2a.destroy()
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "scales": scales.grad}


@pytest.mark.parametrize("tokens_of", [[9], [6, 0, 11], [0, 0]])
@pytest.mark.parametrize(
    "options",
    [
        {"expert_padding": 4},
        {"max_tokens_per_expert": 40, "max_in_flight": 1},
        {"in_dtype": torch.float32, "out_dtype": torch.float32},
    ],
    ids=str,
)
def test_gradients_through_the_phases_are_those_of_one_rank(
    tokens_of: list[int], options: dict[str, Any]
) -> None:
    experts = EXPERTS_PER_RANK * len(tokens_of)
    got = run_ranks(len(tokens_of), gradients_over_phases, tokens_of, options, with_gpus=False)
    wanted = [gradients_on_one_rank(rank, tokens, experts) for rank, tokens in enumerate(tokens_of)]
    is_wide = options.get("in_dtype") == torch.float32
    close = {"rtol": 1e-5, "atol": 1e-5} if is_wide else {"rtol": 4 * 2.0**-8, "atol": 2.0**-5}
    for mine, reference in zip(got, wanted, strict=True):
        for name in ("out", "x", "weights"):
            torch.testing.assert_close(mine[name].float(), reference[name].float(), **close)
    all_scales = torch.cat([mine["scales"] for mine in got])
    total = sum((reference["scales"] for reference in wanted), torch.zeros_like(all_scales))
    wide = {"rtol": 2.0**-5, "atol": 2.0**-4} if not is_wide else close
    torch.testing.assert_close(all_scales, total, **wide)


def _weights_summed(me: Rank) -> None:
    """A layer that adds a row's weights, those of experts elsewhere too: they are 0, whatever they are elsewhere."""
    experts = EXPERTS_PER_RANK * me.size
    buffer = Buffer(me.group, num_nvl_bytes=1 << 20, device="cpu")
    x, topk_idx, weights = inputs_of(me.rank, 7, experts)
    weights.requires_grad_()
    arrived = autograd.dispatch(buffer, x, topk_idx, weights, experts)
    y = arrived.x.float() * arrived.topk_weights.sum(1, keepdim=True)
    autograd.combine(buffer, y.bfloat16(), arrived.handle).float().sum().backward()
    wanted = (topk_idx >= 0) * x.float().sum(1, keepdim=True)
    torch.testing.assert_close(weights.grad, wanted, rtol=2.0**-6, atol=2.0**-5)


def test_a_weight_has_its_gradient_from_its_experts_rank_alone() -> None:
    run_ranks(3, _weights_summed, with_gpus=False)


def _differentiated_twice(me: Rank) -> None:
    experts = EXPERTS_PER_RANK * me.size
    buffer = Buffer(me.group, num_nvl_bytes=1 << 20, device="cpu")
    x, topk_idx, weights = inputs_of(me.rank, 7, experts)
    x.requires_grad_()
    arrived = autograd.dispatch(buffer, x, topk_idx, weights, experts)
    (first,) = torch.autograd.grad(arrived.x.float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (first.float().pow(2).sum() + x.float().sum()).backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    run_ranks(2, _differentiated_twice, with_gpus=False)


def _routes_written_again(me: Rank) -> None:
    experts = EXPERTS_PER_RANK * me.size
    a2a = P2PAllToAll(
        me.group,
        max_num_tokens=8,
        num_experts=experts,
        hidden_dim=HIDDEN,
        num_experts_per_token=TOP_K,
        device="cpu",
    )
    x, topk_idx, weights = inputs_of(me.rank, 8, experts)
    x.requires_grad_()
    weights.requires_grad_()
    rows = autograd.p2p_dispatch_recv(autograd.p2p_dispatch_send(a2a, x, topk_idx, weights))
    out = autograd.p2p_combine_recv(
        autograd.p2p_combine_send(
            (rows.x * rows.weights.unsqueeze(-1).view(*rows.x.shape[:-1], 1)).bfloat16(), rows
        )
    )
    wanted = ((topk_idx >= 0) * x.detach().float().sum(1, keepdim=True)).clone()
    topk_idx.fill_(0)
    out.float().sum().backward()
    torch.testing.assert_close(weights.grad, wanted, rtol=2.0**-5, atol=2.0**-4)
    a2a.destroy()


def test_routes_may_be_written_before_the_backward_pass() -> None:
    run_ranks(2, _routes_written_again, with_gpus=False)


def _checkpointed(me: Rank, mode: str) -> None:
    """Three layers, recomputed in the backward pass, have the gradients of layers that are not."""
    x, topk_idx, weights = inputs_of(me.rank, 7, EXPERTS_PER_RANK * me.size)
    if mode == "phases":
        sizes = {"hidden_dim": HIDDEN, "num_experts_per_token": TOP_K}
        experts = EXPERTS_PER_RANK * me.size
        a2a = P2PAllToAll(me.group, max_num_tokens=8, num_experts=experts, **sizes, device="cpu")
    else:
        buffer = Buffer(me.group, num_nvl_bytes=1 << 20, device="cpu")

    def layer(x: torch.Tensor) -> torch.Tensor:
        if mode == "phases":
            rows = autograd.p2p_dispatch_recv(autograd.p2p_dispatch_send(a2a, x, topk_idx, weights))
            returning = autograd.p2p_combine_send(torch.nn.functional.gelu(rows.x), rows)
            return torch.nn.functional.gelu(x) + autograd.p2p_combine_recv(returning)
        arrived = autograd.dispatch(buffer, x, topk_idx, weights, EXPERTS_PER_RANK * me.size)
        return x + autograd.combine(buffer, torch.nn.functional.gelu(arrived.x), arrived.handle)

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        first = x.clone().requires_grad_()
        y = first
        for _ in range(3):
            y = run(y)
        y.float().sum().backward()
        assert first.grad is not None
        return first.grad

    wanted = gradient(layer)
    with set_checkpoint_early_stop(mode != "phases"):
        for _ in range(2):
            got = gradient(lambda y: checkpoint(layer, y, use_reentrant=mode == "reentrant"))
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("mode", ["plain", "reentrant", "phases"])
def test_layers_may_be_recomputed(mode: str) -> None:
    run_ranks(2, _checkpointed, mode, with_gpus=False)
