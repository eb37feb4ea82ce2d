# SPDX-License-Identifier: Apache-2.0
"""Calls that are planned once per signature: later ones are as right, as careful, and take few steps."""

from __future__ import annotations

import cProfile
import gc
import pstats
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from weft import Buffer, Communicator, ElasticBuffer, Window, _core
from weft.collectives.calls import Collectives
from weft.collectives.library import build
from weft.errors import Error
from weft.testing.ranks import Rank, run_ranks


def python_calls(call: Callable[[], object]) -> int:
    """Return how many Python functions a call enters."""
    profile = cProfile.Profile()
    profile.runcall(call)
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(row[1] for (file, _, _), row in functions.items() if file != "~")


# -- collectives -------------------------------------------------------------------------------------------------------


def _new_addresses(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    n, me = rank.size, rank.rank
    window = Window(comm, 1 << 16)
    for turn in range(6):
        everyone = torch.arange(8.0 * n * n).view(n, n, 8) + turn
        own = everyone[me].clone()
        in_window = window.tensor(me, (n, 8), torch.float32, 4096 * turn)
        in_window.copy_(own)
        assert torch.equal(comm.all_reduce(in_window), everyone.sum(0))
        assert torch.equal(comm.all_reduce(own.clone()), everyone.sum(0))
        assert torch.equal(comm.all_reduce(own.clone(), "max"), everyone.amax(0))
        assert torch.equal(comm.all_reduce(own, out=torch.empty(8 * n)).view(n, 8), everyone.sum(0))
        assert torch.equal(comm.all_gather(own), everyone)
        whole = torch.empty(n, n, 8)
        assert torch.equal(comm.all_gather(own, out=whole), everyone)
        whole[me] = own
        assert torch.equal(comm.all_gather(whole[me], out=whole), everyone)  # its own part of the output
        assert torch.equal(comm.reduce_scatter(own), everyone.sum(0)[me : me + 1])
        assert torch.equal(comm.all_to_all(own), everyone[:, me])
        assert torch.equal(comm.send_recv(own), everyone[me - 1])
        for root in range(n):
            assert torch.equal(comm.broadcast(own.clone(), root), everyone[root])
            assert torch.equal(comm.reduce(own.clone(), root), everyone.sum(0) if me == root else own)
        if me < 2:
            comm.send(own, 1 - me) if me == 0 else comm.recv(own, 0)
            assert torch.equal(own, everyone[0])


def test_repeated_collectives_take_new_addresses() -> None:
    run_ranks(3, _new_addresses)


def _with_a_new_runner(rank: Rank) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=60).core)
    for instances in (1, 4):  # more channels than any program before
        for _ in range(3):
            assert comm.all_reduce(torch.ones(64)).eq(rank.size).all()
        mine = build("allreduce_a100_allpairs", rank.size, instances=instances, protocol="LL").compile()
        assert comm.all_reduce(torch.ones(64), algorithm=mine).eq(rank.size).all()


def test_plans_end_with_the_runner_that_made_them() -> None:
    run_ranks(2, _with_a_new_runner)


class _Own(torch.Tensor):
    pass


def _freed() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _cut() -> torch.Tensor:
    storage = torch.ones(32)
    tensor = storage[4:20].view(4, 4)
    storage.untyped_storage().resize_(70)
    return tensor


def _refusals(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    assert comm.all_reduce(torch.ones(4, 4)).eq(rank.size).all()
    assert comm.all_gather(torch.ones(4, 4), out=torch.empty(rank.size, 4, 4)).eq(1).all()
    for bad, sentence in (
        (torch.ones(4, 4).t(), "strides"),
        (torch.ones(4, 8)[:, ::2], "strides"),
        (torch.ones(4, 4, device="meta"), "meta"),
        (torch._neg_view(torch.ones(4, 4)), "negated"),
        (torch.ones(4, 4).to_sparse(), "sparse"),
        (_freed(), "storage of 0 bytes"),
        (_cut(), "storage of 70 bytes"),
        ([1.0], "torch.Tensor"),
        (None, "torch.Tensor"),
    ):
        with pytest.raises(Error, match=sentence):
            comm.all_reduce(bad)  # type: ignore[arg-type]
        with pytest.raises(Error):
            comm.all_gather(torch.ones(4, 4), out=bad if bad is not None else [1.0])  # type: ignore[arg-type]
    for call in (
        lambda: comm.all_reduce(torch.ones(4, 4), "mean"),
        lambda: comm.all_reduce(torch.ones(4, 4), ["sum"]),  # type: ignore[arg-type]
        lambda: comm.all_reduce(torch.ones(4, 4), out=torch.ones(15)),
        lambda: comm.all_gather(torch.ones(4, 4), out=torch.ones(4, 4)),
        lambda: comm.all_gather(torch.ones(4, 4), out=torch.empty(rank.size, 4, 4, dtype=torch.int32)),
    ):
        with pytest.raises(Error):
            call()
    comm.broadcast(torch.ones(4), 1)
    for root in (1.0, -1, rank.size, "1", torch.ones(2)):
        with pytest.raises(Error, match="root"):
            comm.broadcast(torch.ones(4), root)  # type: ignore[arg-type]
    # And the calls go on, with tensors of other kinds, too.
    assert comm.all_reduce(torch.nn.Parameter(torch.ones(4, 4))).eq(rank.size).all()
    assert comm.all_reduce(torch.ones(4, 4).as_subclass(_Own)).eq(rank.size).all()


def test_a_known_signature_hides_no_wrong_tensor() -> None:
    run_ranks(2, _refusals)


def _differ_later(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=6)
    for _ in range(3):
        comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(4), "max")
    with pytest.raises(Error) as reports:
        comm.all_reduce(torch.ones(4), "max" if rank.rank else "sum")
    dist.barrier(rank.group)
    assert "all_reduce of 4 float32" in str(reports.value) or "waited" in str(reports.value)
    with pytest.raises(Error):
        comm.all_reduce(torch.ones(4))


def test_planned_calls_that_differ_are_told_apart() -> None:
    run_ranks(2, _differ_later)


def _few_steps(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    tensor, whole = torch.ones(4), torch.empty(4 * rank.size)
    for call in (
        lambda: comm.all_reduce(tensor),
        lambda: comm.all_gather(tensor, out=whole),
        lambda: comm.broadcast(tensor),
    ):
        call()
        assert python_calls(call) <= 10


def test_a_repeated_collective_takes_few_steps() -> None:
    run_ranks(2, _few_steps)


# -- expert parallelism ------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, EXPERTS = 4, 64, 8


def _rows(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = (torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) % 7 + rank + turn).bfloat16()
    ids = (torch.arange(TOKENS * 2).view(TOKENS, 2) * 3 + rank + turn) % EXPERTS
    return x, ids, torch.full((TOKENS, 2), 0.5)


def _dispatch(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )


def _high_throughput(rank: Rank) -> None:
    with Buffer(rank.group, 1 << 20, device="cpu") as buffer:
        for turn in range(5):
            x, ids, weights = _rows(rank.rank, turn)
            goes_to = [len({int(e) // (EXPERTS // rank.size) for e in row}) for row in ids]
            received, *_, handle, _ = _dispatch(buffer, x, ids, weights)
            sums = x.float() * torch.tensor(goes_to).view(-1, 1)
            assert torch.equal(buffer.combine(received, handle)[0].float(), sums)
            again = buffer.dispatch(x + 1, handle=handle)[0]
            assert torch.equal(again, received + 1)
            assert torch.equal(
                buffer.combine(again, handle)[0].float(), sums + torch.tensor(goes_to).view(-1, 1)
            )
        wide, narrow = torch.ones(len(received) + 1, HIDDEN).bfloat16(), received[:, :60]
        for x, sentence in (
            (wide[1:].t().contiguous().t(), "strides"),
            (wide.view(-1)[1 : 1 + received.numel()].view(len(received), HIDDEN), "address"),
            (wide, f"{len(received)}, hidden"),
            (narrow.contiguous(), "bytes"),
            (received.float().to("meta"), "meta"),
            ([1.0], "list"),
        ):
            with pytest.raises(Error, match=sentence):
                buffer.combine(x, handle)
        _, ids, _ = _rows(rank.rank, 0)
        for bad in (ids.t().contiguous().t(), ids + EXPERTS, ids.to("meta"), None):
            with pytest.raises(Error, match="topk_idx"):
                buffer.get_dispatch_layout(bad, EXPERTS)  # type: ignore[arg-type]
        for experts in (0, -1, 8.0, "8", None):
            with pytest.raises(Error, match="num_experts"):
                buffer.get_dispatch_layout(ids, experts)  # type: ignore[arg-type]


def test_repeated_high_throughput_calls_are_right_and_refuse_what_does_not_fit() -> None:
    run_ranks(2, _high_throughput)


def _few_moe_steps(rank: Rank) -> None:
    with Buffer(rank.group, 1 << 20, device="cpu") as buffer:
        x, ids, weights = _rows(rank.rank, 0)
        received, *_, handle, _ = _dispatch(buffer, x, ids, weights)
        for most, call in (
            (8, lambda: buffer.get_dispatch_layout(ids, EXPERTS)),
            (14, lambda: _dispatch(buffer, x, ids, weights)),  # with its layout
            (13, lambda: buffer.dispatch(x, handle=handle)),
            (10, lambda: buffer.combine(received, handle)),
        ):
            call()
            assert python_calls(call) <= most
    with ElasticBuffer(rank.group, 1 << 21, num_max_tokens_per_rank=TOKENS, device="cpu") as elastic:
        received, _, came, handle, _ = elastic.dispatch(x, ids, weights, num_experts=EXPERTS)
        for most, call in (
            (16, lambda: elastic.dispatch(x, ids, weights, num_experts=EXPERTS)),
            (14, lambda: elastic.combine(received, handle, came)),
        ):
            call()
            assert python_calls(call) <= most


def test_repeated_high_throughput_calls_take_few_steps() -> None:
    run_ranks(2, _few_moe_steps)


def _barrier_of_streams(rank: Rank) -> None:
    """The GPU's barrier, on the CPU, where it is a kernel like others."""
    mine = rank.folder / f"rank {rank.rank}"
    with Buffer(rank.group, 1 << 20, device="cpu") as buffer:
        x, ids, weights = _rows(rank.rank, 0)
        for turn in range(3):
            mine.write_text(str(turn))
            buffer.runtime.core.barrier((0, 0, True, True))  # type: ignore[union-attr]
            turns = [int((rank.folder / f"rank {other}").read_text()) for other in range(rank.size)]
            assert min(turns) >= turn
            buffer.runtime.core.barrier((0, 0, True, True))  # type: ignore[union-attr]
            assert (
                _dispatch(buffer, x, ids, weights)[0].size(1) == HIDDEN
            )  # its counts and epochs are not disturbed


def test_the_barrier_of_streams_waits_for_all_ranks() -> None:
    run_ranks(3, _barrier_of_streams)


# -- low latency -------------------------------------------------------------------------------------------------------


class _Pair:
    """A low-latency buffer and calls on it."""

    def __init__(self, rank: Rank) -> None:
        room = Buffer.get_low_latency_rdma_size_hint(8, 256, rank.size, 2 * rank.size)
        self.buffer = Buffer(rank.group, 0, room, low_latency_mode=True, device="cpu")
        self.experts = 2 * rank.size
        self.idx = torch.arange(10).view(5, 2) % self.experts
        self.weights = torch.rand(5, 2)

    def dispatch(self, x: torch.Tensor, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(x, self.idx, 8, self.experts, use_fp8=False, **options)

    def combine(self, rows: torch.Tensor, handle: Any, **options: Any) -> Any:
        return self.buffer.low_latency_combine(rows, self.idx, self.weights, handle, **options)

    def both(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        rows, _, handle, _, hook = self.dispatch(x, **options)
        if hook is not None:
            hook()
        combined, _, hook = self.combine(rows, handle, **options)
        if hook is not None:
            hook()
        made: torch.Tensor = combined
        return made


def _few_low_latency_steps(rank: Rank) -> None:
    pair, x = _Pair(rank), torch.randn(5, 256).bfloat16()
    for options in ({}, {"return_recv_hook": True}):
        for _ in range(3):
            pair.both(x, **options)
        assert python_calls(lambda options=options: pair.both(x, **options)) <= 6  # type: ignore[misc]


def test_repeated_low_latency_calls_take_few_steps() -> None:
    run_ranks(2, _few_low_latency_steps)


def _cached_combine_plans(rank: Rank) -> None:
    pair, x = _Pair(rank), torch.randn(5, 256).bfloat16()
    rows, counts, handle, _, _ = pair.dispatch(x)
    pair.buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    signals = {"src_signals": torch.ones(2, dtype=torch.int32), "src_signal_expect_value": 1}
    wanted = pair.combine(rows, handle)[0]
    for options in ({"zero_copy": True}, {"overlap": True, "packed_recv_count": counts, **signals}):
        known = pair.buffer._contexts.plans
        made = []
        for _ in range(3):
            assert torch.equal(pair.combine(rows, handle, **options)[0], wanted)
            made.append(len(known))
        assert made == made[:1] * 3, options
    with pytest.raises(Error, match=r"^zero_copy: got True together with use_logfmt"):
        pair.combine(rows, handle, zero_copy=True, use_logfmt=True)
    with pytest.raises(Error, match=r"^overlap: got int 7"):
        pair.combine(rows, handle, overlap=7)
    with pytest.raises(Error, match=r"^src_signals"):
        pair.combine(
            rows, handle, overlap=True, **{**signals, "src_signals": torch.ones(3, dtype=torch.int32)}
        )


def test_combines_of_every_kind_are_planned_once() -> None:
    run_ranks(2, _cached_combine_plans)


def _hooks(rank: Rank) -> None:
    pair = _Pair(rank)
    for turn in range(3):  # the first plans
        x = torch.randn(5, 256).bfloat16()
        rows, _, handle, _, hook = pair.dispatch(x, return_recv_hook=True)
        with pytest.raises(Error, match="handle: got that of a dispatch whose hook has not run"):
            pair.combine(rows, handle)
        hook()
        with pytest.raises(Error, match=r"^hook: called a second time"):
            hook()
        combined, _, hook = pair.combine(rows, handle, return_recv_hook=True)
        hook()
        expected = x.float() * pair.weights.sum(1, keepdim=True)
        assert torch.allclose(combined.float(), expected, rtol=0.05, atol=0.05), turn


def test_a_hook_runs_once_and_before_the_combine() -> None:
    run_ranks(2, _hooks)


def _hook_in_a_cycle(rank: Rank) -> None:
    pair = _Pair(rank)
    for runs in (True, False):  # after one that is dropped no call is left
        x = torch.randn(5, 256).bfloat16()
        hook = pair.dispatch(x, return_recv_hook=True)[-1]
        x.hook = hook  # type: ignore[attr-defined]  # which holds x
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is not None
        if runs:
            hook()
        del hook
        gc.collect()
        assert alive() is None, runs


def test_a_hook_keeps_its_tensors_until_it_runs_or_is_gone() -> None:
    run_ranks(2, _hook_in_a_cycle)


def _spans(rank: Rank) -> None:
    pair, x = _Pair(rank), torch.randn(5, 256).bfloat16()
    pair.both(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wanted = pair.both(x)
        got = pair.both(x, return_recv_hook=True)
    assert torch.equal(got, wanted)
    names = {event.key for event in profile.key_averages() if event.key.startswith("weft::")}
    calls = ("low_latency_dispatch", "low_latency_combine")
    assert names == {f"weft::{call}{part}" for call in calls for part in ("", ".send", ".receive")}


def test_a_profiler_sees_both_phases() -> None:
    run_ranks(1, _spans)


# -- under torch function modes ----------------------------------------------------------------------------------------


class _Counting(TorchFunctionMode):
    """Counts the torch functions that it sees."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def _call_under_a_mode(rank: Rank) -> None:
    buffer = Buffer(rank.group, num_nvl_bytes=1 << 22, num_rdma_bytes=1 << 24, low_latency_mode=True)
    x = torch.randn(5, 256).bfloat16()
    idx = torch.arange(10).view(5, 2) % (2 * rank.size)
    weights = torch.rand(5, 2)

    def pair() -> torch.Tensor:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, 8, 2 * rank.size, use_fp8=False, return_recv_hook=True
        )
        hook()
        low: torch.Tensor = buffer.low_latency_combine(rows, idx, weights, handle)[0]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * rank.size)
        given: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        arrived = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **given)
        return torch.cat([low, buffer.combine(arrived[0], arrived[4])[0]])

    wanted = pair()
    pair()
    with _Counting() as mode:
        got = pair()
    assert mode.seen == 1  # this test's torch.cat
    assert torch.equal(got, wanted)
    torch.set_default_device("cpu")
    assert torch.equal(pair(), wanted)
    torch.set_default_device(None)


def test_modes_of_the_caller_do_not_see_what_a_call_does() -> None:
    run_ranks(2, _call_under_a_mode)


# -- forms of plans ----------------------------------------------------------------------------------------------------


def _forms_by_keywords(rank: Rank) -> None:
    room = Buffer.get_low_latency_rdma_size_hint(8, 512, rank.size, 8)
    buffer = Buffer(rank.group, 0, room, low_latency_mode=True, device="cpu")
    assert buffer.runtime is not None
    mode = buffer.runtime.low_latency
    routes = {"max_tokens": 8, "tokens": 3, "top_k": 2, "experts": 8, "id_bytes": 8}
    rows = {"row_bytes": 1024, "has_weights": False}
    strides = {"scale_expert_stride": 0, "scale_row_stride": 0, "scale_word_stride": 0, "tiled_scales": False}
    dispatch = {**routes, **rows, **strides, "payload": _core.PAYLOAD_COPY, "scale_bytes": 0}
    combine = {**routes, **rows, "reply": _core.REPLY_REDUCED, "dispatch_had_weights": True}
    for plan, form in ((mode.plan_dispatch, dispatch), (mode.plan_combine, combine)):
        plan(**form)
        plan(**form, grid_sms=4)
        for name in form:
            with pytest.raises(TypeError, match=f"^{name}: missing$"):
                plan(**{key: value for key, value in form.items() if key != name})
        with pytest.raises(TypeError, match=r"^padded: unknown$"):
            plan(**form, padded=1)
        with pytest.raises(TypeError, match=r"^top_k: of another type$"):
            plan(**form | {"top_k": "2"})
        with pytest.raises(TypeError, match=r"^tokens: of another type$"):
            plan(**form | {"tokens": -1})


def test_a_form_is_refused_where_a_keyword_is_missing_unknown_or_of_another_type() -> None:
    run_ranks(1, _forms_by_keywords)
