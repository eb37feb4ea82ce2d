# SPDX-License-Identifier: Apache-2.0
"""The drop-in package: its surface, and programs written for DeepEP."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deep_ep_programs import (
    decode_bf16_like_sglang,
    overlap_like_sglang,
    serve_like_sglang,
    serve_like_vllm,
    train_one_step,
)
from programs import PYTHON, run_program

import deep_ep
from weft import deep_ep_path
from weft.testing.cases import MoeCase
from weft.testing.ranks import RankPool

SURFACE = {
    "deep_ep": "Buffer ElasticBuffer EPHandle EventOverlap EventHandle Config topk_idx_t "
    "get_physical_domain_size get_logical_domain_size __version__",
    "deep_ep._C": "Config EventHandle topk_idx_t is_sm90_compiled get_low_latency_rdma_size_hint",
    "deep_ep_cpp": "Config EventHandle topk_idx_t is_sm90_compiled get_low_latency_rdma_size_hint",
    "deep_ep.buffer": "Buffer Config EventHandle EventOverlap",
    "deep_ep.buffers.legacy": "Buffer",
    "deep_ep.buffers.elastic": "ElasticBuffer EPHandle EventHandle EventOverlap get_physical_domain_size "
    "get_logical_domain_size",
    "deep_ep.utils": "EventHandle EventOverlap check_nvlink_connections",
    "deep_ep.utils.math": "calc_diff safe_div ceil_div align per_token_cast_to_fp8 per_token_cast_back "
    "inplace_unique create_grouped_scores hash_tensor hash_tensors count_bytes",
    "deep_ep.utils.envs": "init_dist init_seed get_local_seed get_global_seed dist_print "
    "get_physical_domain_size get_logical_domain_size check_nvlink_connections check_torch_deterministic "
    "get_nvlink_gbs get_rdma_gbs check_fast_rdma_atomic_support",
    "deep_ep.utils.gate": "get_unbalanced_scores",
    "deep_ep.utils.refs": "dispatch generate_pre_combine_data ordered_accumulate combine",
    "deep_ep.utils.testing": "bench bench_kineto",
    "deep_ep.utils.event": "EventHandle EventOverlap",
    "deep_ep.utils.semantic": "value_or weak_lru",
    "deep_ep.utils.comm": "get_nccl_comm_handle",
    "deep_ep.utils.find_pkgs": "find_pkg_root find_nccl_root",
}


@pytest.mark.parametrize("module", SURFACE)
def test_every_promised_name_exists(module: str) -> None:
    imported = importlib.import_module(module)
    missing = [name for name in SURFACE[module].split() if not hasattr(imported, name)]
    assert missing == []


STREAMS = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
ROUTES = (
    "num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0"
)
ELASTIC_STREAMS = (
    "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, "
    "async_with_compute_stream=False, allocate_on_comm_stream=False"
)
SIGNATURES = {
    "Buffer": "group=None, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False, "
    "comm=None",
    "Buffer.get_dispatch_layout": f"topk_idx, num_experts, {STREAMS}",
    "Buffer.dispatch": f"x, handle=None, {ROUTES}, config=None, {STREAMS}",
    "Buffer.internode_dispatch": f"x, handle=None, {ROUTES}, config=None, {STREAMS}",
    "Buffer.combine": f"x, handle, topk_weights=None, bias=None, config=None, {STREAMS}",
    "Buffer.internode_combine": f"x, handle, topk_weights=None, bias=None, config=None, {STREAMS}",
    "Buffer.get_local_buffer_tensor": "dtype, size=None, offset=0, use_rdma_buffer=False",
    "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "Buffer.low_latency_dispatch": "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
    "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "Buffer.low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None",
    "Buffer.clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "Buffer.low_latency_update_mask_buffer": "rank_to_mask, mask=False",
    "ElasticBuffer": "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "ElasticBuffer.get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, "
    "use_fp8_dispatch=False, allow_hybrid_mode=True, allow_multiple_reduction=True",
    "ElasticBuffer.barrier": "use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "ElasticBuffer.get_theoretical_num_sms": "num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, "
    "nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50",
    "ElasticBuffer.dispatch": "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    f"num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, {ELASTIC_STREAMS}, handle=None, "
    "do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
    "use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.combine": f"x, handle, topk_weights=None, bias=None, {ELASTIC_STREAMS}",
    "ElasticBuffer.engram_fetch": "indices, num_qps=0, use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.pp_send": "t, dst_rank_idx, num_sms=0",
    "Config": "num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
    "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positions_names_and_defaults_are_those_of_deep_ep(name: str) -> None:
    """Weft's own options are keywords alone, after them."""
    call = functools.reduce(getattr, name.split("."), deep_ep)
    taken = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(call).parameters.values()
        if parameter.name != "self" and parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert ", ".join(taken) == SIGNATURES[name]


_FABRIC = (
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=False, explicitly_destroy=False, "
)
BRANCHES = {
    "main": SIGNATURES["Buffer"],
    **dict.fromkeys(
        ("antgroup-opt", "mori-ep", "rocm"),
        "group=None, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
        f"{_FABRIC}enable_shrink=False, comm=None",
    ),
    "hybrid-ep": "group=None, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    f"allow_nvlink_for_normal_mode=True, {_FABRIC}comm=None",
}
# What each branch's last positions mean, of a caller who destroys its buffer itself and gives all that is before that.
CONSTRUCTS = """
import inspect, sys
import deep_ep, weft
from weft.testing.ranks import run_ranks
def of_rank(rank):
    flags = [True, False, False, True]
    if sys.argv[1] == "hybrid-ep":
        flags = [True, True, False, False, True]
    elif sys.argv[1] == "main":
        flags = [True, False, True]
    buffer = deep_ep.Buffer(rank.group, 0, 1 << 20, True, 24, *flags)
    assert isinstance(buffer, weft.Buffer) and buffer.explicitly_destroy and not buffer.enable_shrink
    buffer.destroy()
    named = deep_ep.Buffer(group=rank.group, num_rdma_bytes=1 << 20, low_latency_mode=True, enable_shrink=True)
    assert named.enable_shrink and not named.explicitly_destroy
run_ranks(1, of_rank, with_gpus=False)
positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
taken = [p for p in inspect.signature(deep_ep.Buffer).parameters.values() if p.kind is positional]
print(", ".join(f"{p.name}={p.default!r}" for p in taken))
"""


@pytest.mark.parametrize("branch", BRANCHES)
def test_positions_of_the_constructor_are_those_of_a_branch(branch: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CONSTRUCTS)
    paths = os.pathsep.join([str(deep_ep_path.folder()), *sys.path])
    more = {"WEFT_DEEP_EP_BRANCH": branch, "PYTHONPATH": paths}
    ran = run_program([*PYTHON, str(program), branch], tmp_path, more=more)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == BRANCHES[branch]


def test_names_are_the_same_objects_everywhere() -> None:
    assert deep_ep.Buffer is importlib.import_module("deep_ep.buffers.legacy").Buffer
    assert deep_ep.EventOverlap is importlib.import_module("deep_ep.utils").EventOverlap
    assert deep_ep.topk_idx_t == torch.int64


def test_weak_lru_lets_its_object_go() -> None:
    import gc
    import weakref

    from deep_ep.utils.semantic import value_or, weak_lru

    class Square:
        calls = 0

        @weak_lru()
        def of(self, n: int) -> int:
            Square.calls += 1
            return n * n

    square = Square()
    assert (square.of(3), square.of(3), Square.calls) == (9, 9, 1)
    gone = weakref.ref(square)
    del square
    gc.collect()
    assert gone() is None
    assert (value_or(None, 2), value_or(0, 2)) == (2, 0)


@pytest.fixture(scope="module")
def quad() -> Iterator[RankPool]:
    with RankPool(4, with_gpus=False) as pool:
        yield pool


CASE = MoeCase((20, 7, 0, 31), 512, 2, 8)


def test_a_training_step_in_the_manner_of_megatron(quad: RankPool) -> None:
    quad.run(train_one_step, MoeCase((20, 7, 0, 31), 64, 2, 8), "cpu")


def test_prefill_and_decode_in_the_manner_of_vllm(quad: RankPool) -> None:
    quad.run(serve_like_vllm, CASE, "cpu")


def test_packed_scales_in_the_manner_of_sglang(quad: RankPool) -> None:
    quad.run(serve_like_sglang, CASE, "cpu")


def test_plain_rows_with_fp8s_options_in_the_manner_of_sglang(quad: RankPool) -> None:
    quad.run(decode_bf16_like_sglang, CASE, "cpu")


def test_fp4_rows_and_overlap_in_the_manner_of_sglang(quad: RankPool) -> None:
    quad.run(overlap_like_sglang, CASE, "cpu")
