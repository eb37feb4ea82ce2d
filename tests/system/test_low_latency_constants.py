# SPDX-License-Identifier: Apache-2.0
"""Low-latency kernels that are compiled for a call's arguments: the same results, on the CPU, and code for GPUs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from weft import _core
from weft.runtime import nvrtc
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks
from weft.testing.round_trips import BF16, FP8, Format, outputs_of

CASE = MoeCase(tokens=(6, 9), hidden=512, top_k=3, num_experts=8)
MOST_TOKENS = 16

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")


def round_trip(rank: Rank, form: Format, hooks: bool) -> list[Tensor]:
    """Return what a dispatch and its combine give, of the rows that were written, in a buffer of their own."""
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        MOST_TOKENS, CASE.hidden, rank.size, CASE.num_experts
    )
    buffer = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
    x, topk_idx, weights = (made(rank.rank) for made in (CASE.x, CASE.topk_idx, CASE.topk_weights))
    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, MOST_TOKENS, CASE.num_experts, return_recv_hook=hooks, **form.options()
    )
    if hook:
        hook()
    combined, _, hook = buffer.low_latency_combine(
        outputs_of(recv), topk_idx, weights, handle, return_recv_hook=hooks
    )
    if hook:
        hook()
    buffer.destroy()
    parts = recv if isinstance(recv, tuple) else (recv,)
    rows = [part[expert, :count] for part in parts for expert, count in enumerate(counts.tolist())]
    return [*(row.contiguous().view(torch.uint8) for row in rows), counts, combined.view(torch.int16)]


def compare(rank: Rank, setting: str, form: Format, hooks: bool, folder: str) -> None:
    general = round_trip(rank, form, hooks)
    os.environ["WEFT_LOW_LATENCY_CONSTANTS"] = setting
    os.environ["WEFT_CACHE_DIR"] = f"{folder}/cache"
    os.environ["WEFT_RECORD_KERNELS"] = f"{folder}/kernels"
    _core.config_reload()
    of_setting = round_trip(rank, form, hooks)
    assert len(general) == len(of_setting)
    for wanted, got in zip(general, of_setting, strict=True):
        assert torch.equal(wanted, got)


@needs_compiler
@pytest.mark.parametrize(
    ("setting", "form", "line_tokens", "hooks"),
    [("sizes", FP8, "-1", False), ("calls", BF16, "0", True)],
    ids=["sizes", "calls"],
)
def test_results_are_those_of_the_general_kernels(
    setting: str,
    form: Format,
    line_tokens: str,
    hooks: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WEFT_LOW_LATENCY_LINE_TOKENS", line_tokens)
    run_ranks(2, compare, setting, form, hooks, str(tmp_path), with_gpus=False, deadline_s=300.0)
    rows = [json.loads(line) for line in (tmp_path / "kernels").read_text().splitlines()]
    names = {"low_latency_dispatch_of_facts", "low_latency_combine_of_facts"}
    assert {row["name"] for row in rows} == names
    # What only one of the two ranks' calls has, the number of tokens, is a constant of "calls".
    assert len({row["prelude"] for row in rows}) == len(names) * (2 if setting == "calls" else 1)
    if nvrtc.find().nvrtc is None:
        return
    for row in {row["name"]: row for row in rows}.values():
        row |= {"shape": [tuple(pair) for pair in row["shape"]], "threads_per_block": 512}
        assert row.pop("target") == "cpu"
        compiled = _core.compile_kernel(_core.KernelKey(**row), "sm_90a")
        assert len(compiled.cubin) > 0
        assert "0 bytes stack frame" in compiled.log  # the copy of the arguments is none in the end
