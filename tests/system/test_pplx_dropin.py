# SPDX-License-Identifier: Apache-2.0
"""Programs written for pplx-garden's all-to-all, on Weft: as its own tests and benchmark call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PYTHON, run_program

from weft.errors import Error
from weft.moe.p2p_pplx import P2PAllToAll, ParallelGroup
from weft.testing.ranks import Rank, run_ranks

TOKENS, EXPERTS, TOP_K = 24, 10, 3


def _inputs(group: int, hidden: int, dtype: torch.dtype, scales: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(group)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices
    return {
        "dp_x": torch.randn(TOKENS, hidden, generator=random).to(dtype),
        "dp_x_scale": torch.rand(TOKENS, scales, generator=random) if scales else None,
        "indices": ids.to(torch.int32).view(torch.uint32),
        "weights": torch.rand(TOKENS, TOP_K, generator=random).softmax(1),
    }


def _act(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x * 2
    return x.float() * scale.repeat_interleave(x.size(1) // scale.size(1), 1) * 2


def _round_trips(rank: Rank, dtype: torch.dtype, scales: int, per_expert: int | None, dp_size: int) -> None:
    """Whole calls, then phases with another exchange between, then handles; results are those of one rank."""
    everyone, hidden = ParallelGroup(rank.group), 64
    dp_group = everyone.slice_by_count(rank.size // dp_size) if dp_size > 1 else None
    mine, groups = rank.rank // dp_size, rank.size // dp_size
    local = -(-EXPERTS // groups)
    kernel = P2PAllToAll(
        max_num_tokens=TOKENS,
        num_experts=EXPERTS,
        expert_padding=4,
        hidden_dim=hidden,
        hidden_dim_scale=scales or None,
        in_dtype=dtype,
        out_dtype=dtype,
        scale_dtype=torch.float32 if scales else None,
        num_experts_per_token=TOP_K,
        nets_per_gpu=1,
        max_private_tokens=8,
        device=torch.device("cpu"),
        dp_group=dp_group,
        node_group=None,
        global_group=everyone,
        max_tokens_per_expert=per_expert,
    )
    given = _inputs(mine, hidden, dtype, scales)
    rows = (local, per_expert) if per_expert else (TOKENS * groups * TOP_K + local * 3,)
    outputs = [_outputs(rows, hidden, dtype, scales, local) for _ in range(2)]
    out = torch.empty(TOKENS, hidden, dtype=dtype)
    combining = {"out_tokens": out, "indices": given["indices"], "weights": given["weights"]}
    all_ids = torch.cat(
        [_inputs(g, hidden, dtype, scales)["indices"].view(torch.int32) for g in range(groups)]
    )
    counts = [int((all_ids == mine * local + e).sum()) for e in range(local)]

    def check(filled: dict[str, torch.Tensor]) -> None:
        assert filled["out_expert_num_tokens"].tolist() == counts
        torch.testing.assert_close(
            out, _act(given["dp_x"], given["dp_x_scale"]).to(dtype), rtol=2e-2, atol=2e-2
        )
        out.fill_(-1)

    def results(filled: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = filled["out_expert_x_scale"]
        flat = _act(
            filled["out_expert_x"].view(-1, hidden), None if scale is None else scale.view(-1, scales)
        )
        return flat.to(dtype).view(filled["out_expert_x"].shape)

    for filled in outputs:
        kernel.dispatch(**filled, **given)
        kernel.combine(**combining, expert_y=results(filled))
        check(filled)
    kernel.dispatch(**outputs[0], **given, do_recv=False)
    kernel.dispatch(**outputs[0], **given, do_send=False)
    kernel.combine(**combining, expert_y=results(outputs[0]), do_recv=False)
    kernel.combine(**combining, expert_y=results(outputs[0]), do_send=False)
    check(outputs[0])
    sent = [kernel.dispatch_async(**filled, **given) for filled in outputs]
    for handle, filled in zip(sent, outputs, strict=True):
        handle.recv()
        handle.recv()  # once is enough
        back = kernel.combine_async(out_tokens=out, dispatch_handle=handle, expert_y=results(filled))
        back.recv()
        check(filled)
    with pytest.raises(Error, match="do_recv without a send"):
        kernel.dispatch(**outputs[0], **given, do_send=False)
    with pytest.raises(Error, match="do_send: got False"):
        kernel.dispatch(**outputs[0], **given, do_send=False, do_recv=False)
    kernel.destroy()


def _outputs(
    rows: tuple[int, ...], hidden: int, dtype: torch.dtype, scales: int, local: int
) -> dict[str, Any]:
    return {
        "out_expert_num_tokens": torch.empty(local, dtype=torch.int32),
        "out_expert_x": torch.zeros(*rows, hidden, dtype=dtype),
        "out_expert_x_scale": torch.zeros(*rows, scales) if scales else None,
    }


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "scales", "per_expert", "dp_size"),
    [
        (2, torch.float32, 0, None, 1),
        (2, torch.bfloat16, 4, None, 1),
        (3, torch.bfloat16, 0, 60, 1),
        (4, torch.float16, 0, None, 2),
    ],
    ids=str,
)
def test_programs_for_pplx_garden_get_the_same(
    num_ranks: int, dtype: torch.dtype, scales: int, per_expert: int | None, dp_size: int
) -> None:
    run_ranks(num_ranks, _round_trips, dtype, scales, per_expert, dp_size, with_gpus=False)


def _few(
    rank: Rank, tokens: int, **options: Any
) -> tuple[P2PAllToAll, dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return an all-to-all, the arguments of a dispatch of so many tokens here, and its indices and weights."""
    sizes = {
        "max_num_tokens": TOKENS,
        "num_experts": EXPERTS,
        "expert_padding": 1,
        "hidden_dim": 64,
        "hidden_dim_scale": None,
        "in_dtype": torch.float32,
        "out_dtype": torch.float32,
        "scale_dtype": None,
        "num_experts_per_token": TOP_K,
        "nets_per_gpu": 1,
        "max_private_tokens": None,
        "device": torch.device("cpu"),
        "dp_group": None,
        "node_group": None,
        "global_group": ParallelGroup(rank.group),
    }
    given = {
        name: None if tensor is None else tensor[:tokens].clone()
        for name, tensor in _inputs(rank.rank, 64, torch.float32, 0).items()
    }
    local = -(-EXPERTS // rank.size)
    outputs = _outputs((TOKENS * rank.size * TOP_K,), 64, torch.float32, 0, local)
    return P2PAllToAll(**{**sizes, **options}), {**outputs, **given}, given["indices"], given["weights"]


def _other_weights(rank: Rank) -> None:
    """A combine sums with the weights that it is given: new ones, or those of the dispatch, written meanwhile."""
    tokens = 5 * rank.rank  # none on rank 0
    kernel, dispatching, indices, weights = _few(rank, tokens)
    out = torch.empty(tokens, 64)
    for combining in (weights, torch.rand(tokens, TOP_K), weights.mul_(0) + 2, weights):
        kernel.dispatch(**dispatching)
        if combining is weights:
            weights.fill_(3)
        kernel.combine(out, indices, combining, dispatching["out_expert_x"])
        torch.testing.assert_close(out, dispatching["dp_x"] * combining.sum(1, keepdim=True))
    kernel.destroy()


def test_a_combine_sums_with_its_own_weights() -> None:
    run_ranks(3, _other_weights, with_gpus=False)


def _other_indices(rank: Rank) -> None:
    """A combine's indices may be in other slots than the dispatch's, or masked: a slot means the row of its expert."""
    kernel, dispatching, indices, weights = _few(rank, TOKENS)
    sent = indices.view(torch.int32).clone()
    out, local = torch.empty(TOKENS, 64), -(-EXPERTS // rank.size)
    masked = sent.clone()
    masked[:, 0] = -1
    for ids in (sent.flip(1), masked, masked.flip(1), sent):
        kernel.dispatch(**dispatching)
        y, at = dispatching["out_expert_x"].clone(), 0
        for expert, count in enumerate(dispatching["out_expert_num_tokens"].tolist()):
            y[at : at + count] *= rank.rank * local + expert + 1
            at += count
        kernel.combine(out, ids.view(indices.dtype), weights, y)
        factor = (weights * (ids + 1) * (ids >= 0)).sum(1, keepdim=True)
        torch.testing.assert_close(out, dispatching["dp_x"] * factor)
    kernel.destroy()


def test_a_combine_finds_rows_by_its_own_indices() -> None:
    run_ranks(3, _other_indices, with_gpus=False)


def _received_again(rank: Rank) -> None:
    """A receive into tensors that are too small, or no tensors for it, is no receive."""
    kernel, dispatching, indices, weights = _few(rank, TOKENS)
    small, counts = torch.empty(1, 64), torch.empty(1, dtype=torch.int32)
    kernel.dispatch(**dispatching, do_recv=False)
    with pytest.raises(Error, match="max_recv_tokens: got 1,"):
        kernel.dispatch(**{**dispatching, "out_expert_x": small}, do_send=False)
    with pytest.raises(Error, match="out_expert_num_tokens: got int32"):
        kernel.dispatch(**{**dispatching, "out_expert_num_tokens": counts}, do_send=False)
    kernel.dispatch(**dispatching, do_send=False)
    kernel.combine(small, indices, weights, dispatching["out_expert_x"], do_recv=False)
    with pytest.raises(Error, match="out_tokens: got "):
        kernel.combine(small, indices, weights, dispatching["out_expert_x"], do_send=False)
    out = torch.empty(TOKENS, 64)
    kernel.combine(out, indices, weights, dispatching["out_expert_x"], do_send=False)
    torch.testing.assert_close(out, dispatching["dp_x"] * weights.sum(1, keepdim=True))
    kernel.destroy()


def test_a_receive_that_failed_may_be_called_again() -> None:
    run_ranks(2, _received_again, with_gpus=False)


def test_a_program_chooses_the_drop_in_by_its_path(tmp_path: Path) -> None:
    path = run_program([*PYTHON, "-m", "weft.pplx_garden_path"], tmp_path).stdout.strip()
    program = (
        "from pplx_garden.kernels.p2p_all_to_all import P2PAllToAll; "
        "from pplx_garden.distributed import ParallelGroup; "
        "from pplx_garden.kernels.all_to_all import AllToAllKernel; assert issubclass(P2PAllToAll, AllToAllKernel); "
        "print(P2PAllToAll.__module__)"
    )
    ran = run_program([*PYTHON, "-c", program], tmp_path, more={"PYTHONPATH": path})
    assert ran.stdout == "weft.moe.p2p_pplx\n", ran.stderr
