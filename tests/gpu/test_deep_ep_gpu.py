# SPDX-License-Identifier: Apache-2.0
"""Programs written for DeepEP run on GPUs through the drop-in package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deep_ep_programs import (
    decode_bf16_like_sglang,
    overlap_like_sglang,
    serve_like_sglang,
    serve_like_vllm,
    train_one_step,
)
from gpu_ranks import num_ranks_here, run_on_gpus

from weft.testing.cases import MoeCase

PROGRAMS = [
    train_one_step,
    serve_like_vllm,
    serve_like_sglang,
    decode_bf16_like_sglang,
    overlap_like_sglang,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_deep_ep_runs_unchanged(program: Callable[..., Any]) -> None:
    ranks = num_ranks_here()
    tokens = tuple((20, 7, 0, 31)[rank % 4] for rank in range(ranks))
    run_on_gpus(ranks, program, MoeCase(tokens, 512, 2, 2 * ranks), "cuda")
