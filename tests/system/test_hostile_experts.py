# SPDX-License-Identifier: Apache-2.0
"""Buffer, ElasticBuffer, their operators and the transfer engine, given hostile tensors, scalars and handles.

A result or weft.Error, never signal 11 nor another exception. One rank alone: what it refuses nobody else waits for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.moe import autograd
from weft.ops import ExpertOps
from weft.testing import hostile
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import LoopbackNetwork, Pages, Target, TransferEngine

TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 128, 2, 4
Call = tuple[Callable[..., Any], dict[str, Any]]


def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN).remainder(5).to(dtype)


def ids() -> torch.Tensor:
    return torch.tensor([[0, 1], [2, 3], [1, 2], [3, -1]])


def weights() -> torch.Tensor:
    return torch.full((TOKENS, TOP_K), 0.5)


def buffer_calls(buffer: weft.Buffer) -> dict[str, Call]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids(), EXPERTS)
    routes = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids(),
        "topk_weights": weights(),
    }
    received = buffer.dispatch(rows(), **routes)
    low = buffer.low_latency_dispatch(rows(), ids(), TOKENS, EXPERTS, use_fp8=False)
    return {
        "get_dispatch_layout": (buffer.get_dispatch_layout, {"topk_idx": ids(), "num_experts": EXPERTS}),
        "dispatch": (buffer.dispatch, {"x": rows(), **routes, "expert_alignment": 1, "num_worst_tokens": 8}),
        "cached dispatch": (buffer.dispatch, {"x": rows(), "handle": received[4], "config": None}),
        "combine": (
            buffer.combine,
            {"x": received[0], "handle": received[4], "topk_weights": received[2], "bias": rows()},
        ),
        "low_latency_dispatch": (
            buffer.low_latency_dispatch,
            {
                "x": rows(),
                "topk_idx": ids(),
                "num_max_dispatch_tokens_per_rank": TOKENS,
                "num_experts": EXPERTS,
                "use_fp8": False,
            },
        ),
        "low_latency_combine": (
            buffer.low_latency_combine,
            {"x": low[0], "topk_idx": ids(), "topk_weights": weights(), "handle": low[2], "out": rows()},
        ),
        "get_next_low_latency_combine_buffer": (
            buffer.get_next_low_latency_combine_buffer,
            {"handle": low[2]},
        ),
        "clean_low_latency_buffer": (
            buffer.clean_low_latency_buffer,
            {
                "num_max_dispatch_tokens_per_rank": TOKENS,
                "hidden": HIDDEN,
                "num_experts": EXPERTS,
            },
        ),
    }


def training_calls(buffer: weft.Buffer) -> dict[str, Call]:
    arrived = autograd.dispatch(buffer, rows(), ids(), weights(), EXPERTS)
    return {
        "autograd.dispatch": (
            autograd.dispatch,
            {
                "buffer": buffer,
                "x": rows(),
                "topk_idx": ids(),
                "topk_weights": weights(),
                "num_experts": EXPERTS,
            },
        ),
        "autograd.combine": (autograd.combine, {"buffer": buffer, "x": arrived.x, "handle": arrived.handle}),
    }


def elastic_calls(buffer: weft.ElasticBuffer) -> dict[str, Call]:
    received = buffer.dispatch(rows(), ids(), weights(), num_experts=EXPERTS)
    buffer.engram_write(rows())
    buffer.pp_set_config(1 << 12, 4)
    buffer.agrs_set_config(1 << 16, 32)
    return {
        "dispatch": (
            buffer.dispatch,
            {
                "x": rows(),
                "topk_idx": ids(),
                "topk_weights": weights(),
                "num_experts": EXPERTS,
                "expert_alignment": 1,
                "do_expand": False,
            },
        ),
        "cached dispatch": (buffer.dispatch, {"x": rows(), "handle": received[3]}),
        "combine": (
            buffer.combine,
            {"x": received[0], "handle": received[3], "topk_weights": received[2], "bias": rows()},
        ),
        "engram_write": (buffer.engram_write, {"storage": rows(), "sf": None}),
        "engram_fetch": (buffer.engram_fetch, {"indices": ids().clamp(min=0)}),
        "pp_set_config": (
            buffer.pp_set_config,
            {"num_max_tensor_bytes": 1 << 12, "num_max_inflight_tensors": 4},
        ),
        "agrs_set_config": (
            buffer.agrs_set_config,
            {"num_max_session_bytes": 1 << 16, "num_max_all_gathers_per_session": 32},
        ),
    }


def transfer_calls(a: TransferEngine, b: TransferEngine) -> dict[str, Call]:
    """What ``a`` does to ``b``, all of it short: a transfer to nobody ends at its deadline."""
    mine, theirs = torch.zeros(64), torch.zeros(64)
    memory = a.register(mine, remote_read=True)
    other = b.register(theirs, remote_read=True, remote_write=True)
    peer = a.connect(b.address)
    remote = a.attach(other.descriptor)
    pages = {"stride": 64}
    return {
        "register": (a.register, {"source": torch.ones(64), "remote_read": True, "remote_write": True}),
        "connect": (a.connect, {"address": b.address, "timeout_s": 0.2}),
        "attach": (a.attach, {"descriptor": other.descriptor, "timeout_s": 0.2}),
        "write": (
            a.write,
            {
                "src": memory,
                "dst": remote,
                "nbytes": 64,
                "src_offset": 0,
                "dst_offset": 0,
                "imm": 7,
                "notify": "once",
                "rail": 0,
                "timeout_s": 0.2,
                "counter": None,
                "callback": None,
            },
        ),
        "read": (
            a.read,
            {"dst": memory, "src": remote, "nbytes": 64, "dst_offset": 0, "src_offset": 0, "rail": 0},
        ),
        "write_pages": (
            a.write_pages,
            {
                "src": memory,
                "src_pages": Pages([0, 1], **pages),
                "dst": remote,
                "dst_pages": Pages([1, 0], **pages),
                "page_bytes": 64,
                "imm": 3,
            },
        ),
        "pages": (
            lambda **how: a.write_pages(memory, Pages(**how), remote, Pages(**how), 16),
            {"indices": [0, 1], "stride": 16, "offset": 0},
        ),
        "scatter": (
            a.scatter,
            {
                "src": memory,
                "targets": [Target(remote, dst_offset=0, src_offset=0, nbytes=16)],
                "imm": 3,
            },
        ),
        "targets": (
            lambda **how: a.scatter(memory, [Target(**how)]),
            {"dst": remote, "dst_offset": 0, "src_offset": 0, "nbytes": 16},
        ),
        "notify": (a.notify, {"peer": peer, "imm": 3, "timeout_s": 0.2}),
        "imm": (a.imm, {"peer": peer, "id": 5}),
        "expected_imms": (a.expected_imms, {"nbytes": 64, "pages": 2}),
        "barrier": (a.barrier, {"peers": [peer], "id": 3, "timeout_s": 0.05}),
        "recv": (a.recv, {"peer": peer, "dst": memory, "timeout_s": 0.05}),
    }


def feed(calls: Mapping[str, Call], examples: int, again: Callable[[], Any]) -> None:
    """Make calls with arguments of which some are hostile; then ``again`` must work."""
    odd = {
        **hostile.scalars(),
        **{f"rows {name}": make for name, make in hostile.tensors((TOKENS, HIDDEN)).items()},
        **{f"slots {name}": make for name, make in hostile.tensors((TOKENS, TOP_K)).items()},
    }

    @hostile.examples(examples)
    @given(st.data())
    def make(data: st.DataObject) -> None:
        function, right = calls[data.draw(st.sampled_from(list(calls)))]
        wrong = data.draw(st.sets(st.sampled_from(list(right)), min_size=1, max_size=2))
        arguments = {
            **right,
            **{name: odd[data.draw(st.sampled_from(list(odd)))]() for name in sorted(wrong)},
        }
        hostile.refused_or_done(lambda: function(**arguments))

    make()
    again()


def _without_memory(calls: Mapping[str, Call]) -> None:
    """Each tensor of each call, without its memory, is refused by name."""
    for name, (function, right) in calls.items():
        for argument, value in right.items():
            if not isinstance(value, torch.Tensor) or value.numel() == 0:
                continue
            for kind, make in hostile.without_memory(tuple(value.shape), value.dtype).items():
                arguments = {**right, argument: make()}
                answer = hostile.refused_or_done(lambda f=function, a=arguments: f(**a))
                assert isinstance(answer, weft.Error), (name, argument, kind)


def _buffer(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    size = weft.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 1, EXPERTS)
    buffer = weft.Buffer(rank.group, 4 << 20, size, low_latency_mode=True, timeout_s=20)
    calls = {**buffer_calls(buffer), **training_calls(buffer)}
    _without_memory(calls)
    feed(calls, 120, lambda: buffer_calls(buffer))


def test_buffers_take_or_refuse_anything() -> None:
    run_ranks(1, _buffer, with_gpus=False)


def _elastic(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    buffer = weft.ElasticBuffer(rank.group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP_K)
    calls = elastic_calls(buffer)
    _without_memory(calls)
    feed(calls, 80, lambda: elastic_calls(buffer))


def test_elastic_buffers_take_or_refuse_anything() -> None:
    run_ranks(1, _elastic, with_gpus=False)


def _transfers(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    network = LoopbackNetwork()
    with TransferEngine(network, timeout_s=1) as a, TransferEngine(network, timeout_s=1) as b:
        calls = transfer_calls(a, b)
        for kind, make in hostile.without_memory((8, 8)).items():
            refused = hostile.refused_or_done(lambda m=make: a.register(m()))
            assert isinstance(refused, weft.Error), kind
        feed(calls, 80, lambda: transfer_calls(a, b))
        source = torch.arange(64.0)
        target = torch.zeros(64)
        remote = a.attach(b.register(target, remote_write=True).descriptor)
        a.write(a.register(source), remote).wait()
        assert torch.equal(source, target)


def test_transfer_engines_take_or_refuse_anything() -> None:
    run_ranks(1, _transfers, with_group=False, with_gpus=False)


def _operators(rank: Rank) -> None:
    """Torch checks the types of operators, and raises what it likes; what gets through must not crash."""
    warnings.simplefilter("ignore")
    experts = ExpertOps(weft.Buffer(rank.group, 4 << 20, timeout_s=20))
    right = {"x": rows(), "topk_idx": ids(), "topk_weights": weights(), "num_experts": EXPERTS}
    for argument in ("x", "topk_idx", "topk_weights"):
        value = right[argument]
        for make in hostile.without_memory(tuple(value.shape), value.dtype).values():  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                experts.dispatch(**{**right, argument: make()})  # type: ignore[arg-type]
    received = experts.dispatch(**right)  # type: ignore[arg-type]
    for make in hostile.without_memory(tuple(received.x.shape), received.x.dtype).values():
        with contextlib.suppress(Exception):
            experts.combine(make(), received.handle)
    assert torch.equal(experts.combine(received.x, received.handle), rows())


def test_operators_survive_tensors_without_memory() -> None:
    run_ranks(1, _operators, with_gpus=False)
