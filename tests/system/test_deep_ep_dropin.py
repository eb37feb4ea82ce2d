# SPDX-License-Identifier: Apache-2.0
"""The drop-in package: its surface, and programs written for DeepEP."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from deep_ep_programs import serve_like_sglang, serve_like_vllm, train_one_step

import deep_ep
from weft.testing.cases import MoeCase
from weft.testing.ranks import RankPool

SURFACE = {
    "deep_ep": "Buffer EventOverlap EventHandle Config topk_idx_t get_physical_domain_size "
    "get_logical_domain_size __version__",
    "deep_ep._C": "Config EventHandle topk_idx_t is_sm90_compiled get_low_latency_rdma_size_hint",
    "deep_ep_cpp": "Config EventHandle topk_idx_t is_sm90_compiled get_low_latency_rdma_size_hint",
    "deep_ep.buffer": "Buffer Config EventHandle EventOverlap",
    "deep_ep.buffers.legacy": "Buffer",
    "deep_ep.buffers.elastic": "EventHandle",
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


@pytest.mark.parametrize("name", ["HybridEPBuffer"])
def test_what_is_not_implemented_is_absent(name: str) -> None:
    assert not hasattr(deep_ep, name)


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
