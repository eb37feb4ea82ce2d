# SPDX-License-Identifier: Apache-2.0
"""Programs written for UCCL-EP, on Weft: its variables, its names, and the calls that its Python and benches make."""

from __future__ import annotations

import ast
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from port_nodes import nodes
from programs import PYTHON, run_in_each, run_program

from weft import uccl_path
from weft.errors import Error
from weft.moe import buffer, uccl
from weft.moe.config import Config
from weft.moe.uccl_memory import EventHandle, Memory
from weft.moe.uccl_runtime import Runtime
from weft.testing.ranks import Rank, run_ranks

# Variables -> what the line says of them, and the settings that come of it.
VARIABLES = {
    "interface": (
        {"UCCL_SOCKET_IFNAME": "lo"},
        "UCCL_SOCKET_IFNAME=lo is WEFT_INTERFACE",
        {"interface": "lo"},
    ),
    "interfaces": (
        {"UCCL_SOCKET_IFNAME": "^docker,lo"},
        "UCCL_SOCKET_IFNAME=^docker,lo is not used: WEFT_INTERFACE is one name in full",
        {"interface": ""},
    ),
    "gid": ({"UCCL_IB_GID_INDEX": "3"}, "UCCL_IB_GID_INDEX=3 is WEFT_GID_INDEX", {"gid_index": 3}),
    "bytes": (
        {"UCCL_IB_MAX_INFLIGHT_BYTES": "1572864"},
        "UCCL_IB_MAX_INFLIGHT_BYTES=1572864 is WEFT_PROXY_BYTES_IN_FLIGHT",
        {"proxy_bytes_in_flight": 1572864},
    ),
    "normal": (
        {"UCCL_IB_MAX_INFLIGHT_NORMAL": "1"},
        "UCCL_IB_MAX_INFLIGHT_NORMAL=1 is WEFT_PROXY_WRITES_IN_FLIGHT",
        {"proxy_writes_in_flight": 1},
    ),
    "low_latency": (
        {"UCCL_IB_MAX_INFLIGHT_LOW_LATENCY": "32"},
        "UCCL_IB_MAX_INFLIGHT_LOW_LATENCY=32 is WEFT_PROXY_WRITES_IN_FLIGHT",
        {"proxy_writes_in_flight": 32},
    ),
    "both_modes": (
        {"UCCL_IB_MAX_INFLIGHT_NORMAL": "8", "UCCL_IB_MAX_INFLIGHT_LOW_LATENCY": "32"},
        "UCCL_IB_MAX_INFLIGHT_LOW_LATENCY=32 is not used: WEFT_PROXY_WRITES_IN_FLIGHT is one bound for both modes, and "
        "8 of the other is stricter; UCCL_IB_MAX_INFLIGHT_NORMAL=8 is WEFT_PROXY_WRITES_IN_FLIGHT",
        {"proxy_writes_in_flight": 8},
    ),
    "service_level": ({"UCCL_IB_SL": "5"}, "UCCL_IB_SL=5 is WEFT_SERVICE_LEVEL", {"service_level": 5}),
    "traffic_class": ({"UCCL_IB_TC": "96"}, "UCCL_IB_TC=96 is WEFT_TRAFFIC_CLASS", {"traffic_class": 96}),
    "refused": (
        {"UCCL_IB_TC": "999"},
        "UCCL_IB_TC=999 is not used: WEFT_TRAFFIC_CLASS allows whole number, -1 to 255",
        {"traffic_class": -1},
    ),
    "ours_wins": (
        {"UCCL_IB_SL": "5", "WEFT_SERVICE_LEVEL": "2"},
        "UCCL_IB_SL=5 is not used: WEFT_SERVICE_LEVEL=2 is set",
        {"service_level": 2},
    ),
    "timeout": (
        {"UCCL_EP_CPU_TIMEOUT_SECS": "7"},
        "UCCL_EP_CPU_TIMEOUT_SECS=7 is WEFT_TIMEOUT_S",
        {"timeout_s": 7},
    ),
    "nics": (
        {"UCCL_IB_HCA": "mlx5"},
        "UCCL_IB_HCA=mlx5 is not used: WEFT_PROXY_NICS names NICs, in full",
        {"proxy_nics": ""},
    ),
    "unknown": ({"UCCL_RARE": "1"}, "UCCL_RARE=1 is not used: Weft has no such setting", {}),
}
LOOK = "from weft import _core; print({name: getattr(_core.config(), name) for name in %r})"
SETTINGS = sorted({name for _, _, settings in VARIABLES.values() for name in settings})
Programs = dict[str, CompletedProcess[str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    given = {case: variables for case, (variables, _, _) in VARIABLES.items()}
    more = {"PYTHONPATH": str(uccl_path.folder()), "WEFT_LOG": "info"}
    return run_in_each(
        given, f"import uccl.ep; {LOOK % SETTINGS}", tmp_path_factory.mktemp("variables"), more
    )


@pytest.mark.parametrize("case", VARIABLES)
def test_a_variable_is_understood_and_one_line_says_so(case: str, ran: Programs) -> None:
    _, line, settings = VARIABLES[case]
    assert ran[case].returncode == 0, ran[case].stderr
    found = ast.literal_eval(ran[case].stdout)
    assert {name: found[name] for name in settings} == settings
    level = "warning" if " not used" in line else "info"
    assert f"weft {level}: UCCL-EP's variables: {line}\n" in ran[case].stderr


def test_only_the_drop_in_understands_them(tmp_path: Path) -> None:
    more = {"UCCL_IB_SL": "5", "WEFT_LOG": "info"}
    ran = run_program(
        [*PYTHON, "-c", f"import weft.moe.buffer; {LOOK % ['service_level']}"], tmp_path, more=more
    )
    assert (ran.stdout, ran.stderr) == ("{'service_level': -1}\n", "")


NAMES = (
    "Buffer Config EventHandle EventOverlap Proxy UcclProxy initialize_uccl destroy_uccl get_oob_ip "
    "get_num_proxy_threads get_physical_gpu_rank get_rdma_buffer can_register_rdma_gpu_buffer "
    "rdma_buffer_should_use_host_alloc register_proxy register_proxies unregister_proxy has_proxy "
    "stop_all_registered_proxies connect_atomic_buffer get_low_latency_rdma_size_hint is_sm90_compiled"
)


def test_a_program_chooses_the_drop_in_by_its_path(tmp_path: Path) -> None:
    path = run_program([*PYTHON, "-m", "weft.uccl_path"], tmp_path).stdout.strip()
    program = f"from uccl import ep; print([n for n in {NAMES.split()} if not hasattr(ep, n)], ep.Buffer.__module__)"
    ran = run_program([*PYTHON, "-c", program], tmp_path, more={"PYTHONPATH": path})
    assert ran.stdout == "[] weft.moe.uccl\n", ran.stderr


TOKENS, HIDDEN, EXPERTS, TOP_K = 12, 256, 8, 3


def _routes(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).to(torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices
    return x, ids, torch.rand(TOKENS, TOP_K, generator=random)


def _proxies_around_a_buffer(rank: Rank) -> None:
    proxies, workers = uccl.initialize_uccl(0, 0, rank.rank, rank.size, rank.group, EXPERTS)
    uccl.register_proxies(0, proxies)
    for proxy in proxies:
        proxy.set_peers_meta([])
        proxy.set_atomic_buffer_ptr(proxy.get_atomic_buffer_ptr())
        proxy.start_dual()
        proxy.notify_proxy_thread_adaptive_sleeper()
        proxy.calculate_and_set_dispatch_recv_data_offset(num_tokens=1, hidden=HIDDEN, num_experts=EXPERTS)
        assert proxy.get_listen_port() == 0
    hint = uccl.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, rank.size, EXPERTS)
    made = uccl.Buffer(rank.group, 1 << 20, hint, True, 1, True, False, True, True)
    assert isinstance(made, buffer.Buffer)
    x, ids, weights = _routes(rank.rank)
    received, _, handle, _, hook = made.low_latency_dispatch(
        x, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()
    summed, _, _ = made.low_latency_combine(received, ids, weights, handle)
    expected = x.float() * weights.sum(1, keepdim=True)
    torch.testing.assert_close(summed.float(), expected, rtol=2e-2, atol=2e-2)
    made.reset_rdma_buffer()
    made.destroy()
    uccl.destroy_uccl(proxies, workers)
    uccl.unregister_proxy(0)
    assert not uccl.has_proxy(0)


def test_proxies_are_taken_and_a_buffer_is_wefts() -> None:
    run_ranks(2, _proxies_around_a_buffer, with_gpus=False)


def _refused_on_two_nodes(rank: Rank) -> None:
    with pytest.raises(Error, match="is_intranode: got True, allowed: None or False for a group of 2 nodes"):
        uccl.Buffer(rank.group, 1 << 20, is_intranode=True)


def test_is_intranode_is_refused_for_several_nodes() -> None:
    with nodes(1, "fabric:tcp"):
        run_ranks(2, _refused_on_two_nodes, with_gpus=False)


def _raw(rank: Rank, low_latency: bool) -> Runtime:
    hint = uccl.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, rank.size, EXPERTS)
    made: Any = uccl.Buffer(rank.rank, rank.size, 1 << 20, hint if low_latency else 0, low_latency, True, 2)
    assert isinstance(made, Runtime) and not made.is_available()
    with pytest.raises(Error, match="used before sync"):
        made.get_num_rdma_ranks()
    handles: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(handles, made.get_local_ipc_handle(), group=rank.group)
    made.sync([0] * rank.size, handles)
    return made


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Intranode:
    """What UCCL-EP's Python does around a dispatch and a combine of one node: it makes tensors and hands addresses."""

    def __init__(self, runtime: Runtime, ids: torch.Tensor, num_ranks: int) -> None:
        self.runtime, self.num_ranks = runtime, num_ranks
        self.config, self.order = Config(), (None, True, False, 0)
        i32 = {"dtype": torch.int32}
        self.layout = (
            torch.empty(num_ranks, **i32),
            torch.empty(EXPERTS, **i32),
            torch.empty(TOKENS, num_ranks, dtype=torch.bool),
        )
        per_rank, per_expert, in_rank = map(_at, self.layout)
        event = runtime.get_dispatch_layout(
            ids.data_ptr(), TOKENS, TOP_K, EXPERTS, per_rank, 0, per_expert, in_rank, *self.order
        )
        assert isinstance(event, EventHandle)
        event.current_stream_wait(0)
        self.prefix = torch.empty(num_ranks, num_ranks, **i32)

    def prepare(self, worst: int = 0) -> list[int]:
        per_rank, per_expert, in_rank = map(_at, self.layout)
        self.num_rows, counts, _ = self.runtime.intranode_prepare(
            *(per_rank, in_rank, per_expert, TOKENS, EXPERTS, self.prefix.data_ptr(), 0, 4, worst),
            *(self.config, *self.order),
        )
        return counts

    def dispatch(
        self, x: Any, ids: Any = None, weights: Any = None, worst: int = 0, is_cached: bool = False
    ) -> Any:
        rows, scales = x if isinstance(x, tuple) else (x, None)
        out = [
            torch.empty(self.num_rows, HIDDEN, dtype=rows.dtype),
            None if scales is None else torch.empty(self.num_rows, scales.size(1)),
            None if ids is None else torch.empty(self.num_rows, TOP_K, dtype=torch.int64),
            None if ids is None else torch.empty(self.num_rows, TOP_K),
        ]
        source = torch.empty(self.num_rows, dtype=torch.int32)
        strides = (0, 0, 0) if scales is None else (scales.size(1), *scales.stride())
        self.runtime.intranode_dispatch(
            *(rows.data_ptr(), TOKENS, HIDDEN, rows.element_size(), _at(scales), *strides),
            *(_at(ids), TOP_K if ids is not None else 0, _at(weights), self.layout[2].data_ptr()),
            *(
                self.prefix.data_ptr(),
                0,
                EXPERTS,
                worst,
                is_cached,
                self.config,
                self.num_rows,
                *map(_at, out),
            ),
            *(0, source.data_ptr(), 0, *self.order),
        )
        return (*out, source)

    def combine(self, x: torch.Tensor, weights: torch.Tensor, bias: tuple[torch.Tensor, torch.Tensor]) -> Any:
        out, sums = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.empty(TOKENS, TOP_K)
        self.runtime.intranode_combine(
            *(x.data_ptr(), x.size(0), HIDDEN, 6, 2, weights.data_ptr(), TOP_K, *map(_at, bias), 0, TOKENS),
            *(self.prefix.data_ptr(), 0, 0, self.config, out.data_ptr(), sums.data_ptr(), *self.order),
        )
        return out, sums


def _same_as_wefts(rank: Rank) -> None:
    """Every call by addresses gives what weft.Buffer gives."""
    x, ids, weights = _routes(rank.rank)
    pure = buffer.Buffer(rank.group, 1 << 20, explicitly_destroy=True)
    layout = pure.get_dispatch_layout(ids, EXPERTS)
    facts = {
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
    }
    routed = {**facts, "topk_idx": ids, "topk_weights": weights}
    received, their_ids, their_weights, counts, handle, _ = pure.dispatch(x, **routed, expert_alignment=4)

    runtime = _raw(rank, low_latency=False)
    raw = _Intranode(runtime, ids, rank.size)
    for mine, expected in zip(raw.layout, (layout[0], layout[2], layout[3]), strict=True):
        assert torch.equal(mine, expected)
    assert raw.prepare() == counts
    assert raw.num_rows == received.size(0)
    rows, _, mine_ids, mine_weights, source = raw.dispatch(x, ids, weights)
    assert torch.equal(rows, received) and torch.equal(mine_ids, their_ids)
    assert torch.equal(mine_weights, their_weights)
    assert torch.equal(source, handle[3]) and torch.equal(raw.prefix, handle[0])

    bias = (torch.ones_like(x), torch.full_like(x, 2))
    expected = pure.combine(received, handle, their_weights, bias=bias)
    for mine, theirs in zip(raw.combine(rows, mine_weights, bias), expected[:2], strict=True):
        assert torch.equal(mine, theirs)

    scales = torch.rand(2, TOKENS).T  # a column each, as callers for Hopper make them
    quantised = (x.to(torch.float8_e4m3fn), scales)
    theirs = pure.dispatch(quantised, handle=handle)[0]
    rows, mine_scales, *_ = raw.dispatch(quantised, is_cached=True)
    assert torch.equal(rows.view(torch.uint8), theirs[0].view(torch.uint8))
    assert torch.equal(mine_scales, theirs[1])

    worst = TOKENS * rank.size
    bounded = _Intranode(runtime, ids, rank.size)
    assert (bounded.prepare(worst), bounded.num_rows) == ([], worst)
    rows, _, mine_ids, *_ = bounded.dispatch(x, ids, weights, worst)
    assert torch.equal(rows[: received.size(0)], received)
    assert bool((mine_ids[received.size(0) :] == -1).all())
    with pytest.raises(Error, match="handle: got a rank_prefix_matrix that no call filled"):
        _Intranode(runtime, ids, rank.size).combine(rows, mine_weights, bias)
    runtime.destroy()
    assert not runtime.is_available()
    pure.destroy()


def test_calls_by_address_give_what_wefts_give() -> None:
    run_ranks(2, _same_as_wefts, with_gpus=False)


def _same_over_nodes(rank: Rank) -> None:
    x, ids, weights = _routes(rank.rank)
    pure = buffer.Buffer(rank.group, 1 << 20, explicitly_destroy=True)
    per_rank, per_node, per_expert, in_rank, _ = pure.get_dispatch_layout(ids, EXPERTS)
    received, their_ids, their_weights, counts, handle, _ = pure.dispatch(
        x, None, per_rank, per_node, in_rank, per_expert, ids, weights
    )
    runtime = _raw(rank, low_latency=False)
    assert runtime.get_num_rdma_ranks() == 2
    order, config = (None, False, False, 0), Config()
    rank_sums = torch.empty(2, dtype=torch.int32)
    prefix = torch.empty(rank.size, dtype=torch.int32)
    num_rows, _, mine_counts, event = runtime.internode_prepare(
        *map(_at, (per_rank, per_node, per_expert, in_rank)),
        *(
            TOKENS,
            HIDDEN,
            2,
            0,
            TOP_K,
            EXPERTS,
            1,
            0,
            config,
            0,
            rank_sums.data_ptr(),
            0,
            prefix.data_ptr(),
            *order,
        ),
    )
    assert (num_rows, mine_counts, event) == (received.size(0), counts, None)
    assert torch.equal(prefix, handle[-4])
    rows, mine_ids = torch.empty_like(received), torch.empty_like(their_ids)
    mine_weights = torch.empty_like(their_weights)
    runtime.internode_dispatch(
        *(
            x.data_ptr(),
            TOKENS,
            HIDDEN,
            2,
            0,
            0,
            0,
            0,
            ids.data_ptr(),
            TOP_K,
            weights.data_ptr(),
            in_rank.data_ptr(),
        ),
        *(0, rank_sums.data_ptr(), 0, prefix.data_ptr(), EXPERTS, 0, False, num_rows, config),
        *(rows.data_ptr(), 0, mine_ids.data_ptr(), mine_weights.data_ptr(), 0, 0, 0, 0, 0, *order),
    )
    assert torch.equal(rows, received) and torch.equal(mine_ids, their_ids)
    out, sums = torch.empty_like(x), torch.empty_like(weights)
    runtime.internode_combine(
        *(rows.data_ptr(), num_rows, HIDDEN, 6, 2, mine_weights.data_ptr(), TOP_K, 0, 0, 0, TOKENS),
        *(
            in_rank.data_ptr(),
            0,
            rank_sums.data_ptr(),
            0,
            0,
            0,
            config,
            out.data_ptr(),
            sums.data_ptr(),
            *order,
        ),
    )
    expected = pure.combine(received, handle, their_weights)
    assert torch.equal(out, expected[0]) and torch.equal(sums, expected[1])
    runtime.destroy()
    pure.destroy()


def test_calls_by_address_over_nodes_give_what_wefts_give() -> None:
    with nodes(2, "fabric:tcp"):
        run_ranks(4, _same_over_nodes, with_gpus=False)


def _low_latency_by_address(rank: Rank, use_fp8: bool, with_hook: bool) -> None:
    x, ids, weights = _routes(rank.rank)
    runtime = _raw(rank, low_latency=True)
    local, slots = EXPERTS // rank.size, rank.size * TOKENS
    rows = torch.empty(local, slots, HIDDEN, dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
    scales = torch.empty(local, HIDDEN // 128, slots)
    counts, source = torch.empty(local, dtype=torch.int32), torch.empty(local, slots, dtype=torch.int32)
    ranges = torch.empty(local, rank.size, dtype=torch.int64)
    runtime.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS, 0)
    event, hook = runtime.low_latency_dispatch(
        *(x.data_ptr(), TOKENS, HIDDEN, ids.data_ptr(), TOKENS, TOP_K, rows.data_ptr(), scales.data_ptr()),
        *(counts.data_ptr(), source.data_ptr(), ranges.data_ptr(), 0, 0, 0, TOKENS, EXPERTS),
        *(use_fp8, False, False, not with_hook, with_hook),
    )
    assert (event is None, hook is None) == (with_hook, not with_hook)
    if hook is not None:
        hook()
    everyone = [_routes(other) for other in range(rank.size)]
    for expert in range(local):
        chosen = [(ids_of == rank.rank * local + expert).any(1) for _, ids_of, _ in everyone]
        assert counts[expert] == sum(int(those.sum()) for those in chosen)
        for other, (x_of, _, _) in enumerate(everyone):
            begin, count = int(ranges[expert, other]) >> 32, int(ranges[expert, other]) & 0xFFFFFFFF
            got = rows[expert, begin : begin + count].float()
            if use_fp8:
                got *= scales[expert].T[begin : begin + count].repeat_interleave(128, 1)
            sent = x_of[source[expert, begin : begin + count].long()].float()
            torch.testing.assert_close(got, sent, rtol=0.07, atol=0.01)
    back = rows.float() * scales.transpose(1, 2).repeat_interleave(128, 2) if use_fp8 else rows
    back, out = back.to(torch.bfloat16), torch.empty_like(x)
    _, hook = runtime.low_latency_combine(
        *(back.data_ptr(), local, slots, HIDDEN, ids.data_ptr(), TOKENS, TOP_K, weights.data_ptr()),
        *(source.data_ptr(), local, slots, ranges.data_ptr(), local, rank.size, 0, 0, TOKENS, EXPERTS),
        *(False, False, not with_hook, with_hook, out.data_ptr()),
    )
    if hook is not None:
        hook()
    torch.testing.assert_close(out.float(), x.float() * weights.sum(1, keepdim=True), rtol=0.1, atol=0.1)
    runtime.destroy()


@pytest.mark.parametrize("with_hook", [False, True], ids=["whole", "hook"])
@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_low_latency_by_address(use_fp8: bool, with_hook: bool) -> None:
    run_ranks(2, _low_latency_by_address, use_fp8, with_hook, with_gpus=False)


def _some_rank_has_no_token(rank: Rank, with_ids: bool) -> None:
    """Tensors without a row have no address: what a rank calls must not depend on it."""
    x, ids, weights = _routes(rank.rank)
    if rank.rank == 0:
        x, ids, weights = x[:0].clone(), ids[:0].clone(), weights[:0].clone()
        assert ids.data_ptr() == 0
    tokens = x.size(0)
    runtime = _raw(rank, low_latency=False)
    in_rank = torch.zeros(tokens, rank.size, dtype=torch.bool)
    per_rank, per_expert = torch.empty(rank.size, dtype=torch.int32), torch.empty(EXPERTS, dtype=torch.int32)
    prefix = torch.empty(rank.size, rank.size, dtype=torch.int32)
    order, config = (None, False, False, 0), Config()
    runtime.get_dispatch_layout(
        *(ids.data_ptr(), tokens, TOP_K, EXPERTS),
        *(per_rank.data_ptr(), 0, per_expert.data_ptr(), in_rank.data_ptr(), *order),
    )
    routes = (
        per_rank.data_ptr(),
        in_rank.data_ptr(),
        per_expert.data_ptr(),
        tokens,
        EXPERTS,
        prefix.data_ptr(),
    )
    num_rows, _, _ = runtime.intranode_prepare(*routes, 0, 1, 0, config, *order)
    sent, local = _routes(1), EXPERTS // rank.size
    chosen = (sent[1] // local == rank.rank).any(1)
    assert num_rows == int(chosen.sum())
    scales = torch.arange(tokens * 2, dtype=torch.float32).view(tokens, 2)
    rows, got_scales = torch.empty(num_rows, HIDDEN, dtype=torch.uint8), torch.empty(num_rows, 2)
    got_ids, got_weights = torch.empty(num_rows, TOP_K, dtype=torch.int64), torch.empty(num_rows, TOP_K)
    source = torch.empty(num_rows, dtype=torch.int32)
    quantised = x.to(torch.float8_e4m3fn)
    routed = (ids.data_ptr(), TOP_K, weights.data_ptr()) if with_ids else (0, 0, 0)
    received = (got_ids.data_ptr(), got_weights.data_ptr()) if with_ids else (0, 0)
    runtime.intranode_dispatch(
        *(quantised.data_ptr(), tokens, HIDDEN, 1, scales.data_ptr(), 2, 2, 1, *routed, in_rank.data_ptr()),
        *(prefix.data_ptr(), 0, EXPERTS, 0, False, config, num_rows, rows.data_ptr(), got_scales.data_ptr()),
        *(*received, 0, source.data_ptr(), 0, *order),
    )
    assert torch.equal(rows, sent[0][chosen].to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(got_scales, torch.arange(TOKENS * 2.0).view(TOKENS, 2)[chosen])
    if with_ids:
        assert torch.equal(got_ids >= 0, (sent[1] // local == rank.rank)[chosen])
    runtime.destroy()


@pytest.mark.parametrize("with_ids", [False, True], ids=["rows", "routes"])
def test_a_rank_without_tokens_calls_what_the_others_call(with_ids: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_TIMEOUT_S", "10")
        run_ranks(2, _some_rank_has_no_token, with_ids, with_gpus=False)


def test_null_is_no_tensor() -> None:
    memory = Memory(torch.device("cpu"))
    assert memory.at(0, torch.int32, 0, 3).shape == (0, 3)
    with pytest.raises(
        Error, match=r"address: got null, allowed: that of a torch.int32 tensor of shape \[2, 3\]"
    ):
        memory.at(0, torch.int32, 2, 3)
