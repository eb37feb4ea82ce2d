# SPDX-License-Identifier: Apache-2.0
"""Measures low-latency dispatch and combine, always as a pair. Routes change from sample to sample, and all
peers take turns within a sample, so a machine that slows down slows all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import weft
from weft.bench.eager import Eager, Times, add_times
from weft.bench.moe import check, kernel_time, peers
from weft.bench.moe.clock import Bench, Inputs, Timed
from weft.bench.moe.floors import Traffic, row_bytes
from weft.bench.moe.network import NetworkSamples, far_messages, far_rows
from weft.bench.moe.rows import Measured, count_rows, make_row, method_notes, shape_columns, times_of_step
from weft.bench.report import Row
from weft.testing import oracle

FEW_TOKENS = 512  # up to this many, calls are also measured in a row
CALLS_IN_A_ROW = 10
ROUND_TRIPS = 10  # pairs in one graph: what a pair takes without the events, and without an empty cache


def measure(bench: Bench, inputs: Inputs) -> Measured:
    """Check, measure, check again. Collective. The result is meant for rank 0 to report."""
    o, me = bench.options, bench.me
    buffers = {"weft": weft.Buffer}
    deep_ep = peers.real_deep_ep() if bench.on_gpu else None
    if deep_ep is not None:
        buffers["deep_ep"] = deep_ep.Buffer
    calls = {
        name: peers.LowLatency(make_buffer(bench, kind), o.experts, max(o.tokens, 1), o.dtype == "fp8")
        for name, kind in buffers.items()
    }
    for of_peer in calls.values():
        check_calls(bench, inputs, of_peer)
    traffic = inputs.traffic(o.experts)
    in_a_row = CALLS_IN_A_ROW if o.tokens <= FEW_TOKENS and not bench.on_gpu else 1
    sent = Samples(bench, inputs, calls, traffic, in_a_row)

    def take(index: int) -> None:
        sent.take(inputs.routes[index % len(inputs.routes)][me.rank])

    bench.run(take)
    times = bench.in_a_row(sent.turns())
    check_calls(bench, inputs, calls["weft"])
    us = bench.samples_us(in_a_row)
    rows = sent.rows("ll", traffic, us, times)
    if "weft round_trip" in us:
        rows.append(round_trip_row(bench, rows, us["weft round_trip"]))
        add_times(rows[-1], *times_of_step(bench, "round_trip", times))
    traces = bench.traces(calls["weft"].buffer, take)
    others = kernel_time.times_of_others(bench, calls, sent.calls_by_row)
    for of_peer in calls.values():
        of_peer.buffer.destroy()
    kernel_time.add_kernel_times(rows, _kernel_times(bench, inputs, traffic), others)
    return Measured(rows, method_notes(bench, deep_ep is not None), traces)


def _kernel_times(bench: Bench, inputs: Inputs, traffic: Traffic) -> dict[str, list[float]]:
    """Return what kernels take by their own stamps, by the names of rows; {} beside a trace. Collective."""
    if not kernel_time.is_possible(bench):
        return {}
    o = bench.options
    with kernel_time.noting_blocks():
        of_weft = peers.LowLatency(
            make_buffer(bench, weft.Buffer), o.experts, max(o.tokens, 1), o.dtype == "fp8"
        )
        samples = Samples(bench, inputs, {"weft": of_weft}, traffic, 1)
        times = kernel_time.kernel_times(bench, of_weft.buffer, samples.calls_by_row())
        if samples.round_trips:
            replay = samples.round_trips
            of_pairs = kernel_time.kernel_times(bench, of_weft.buffer, {"ll_round_trip": replay})
            times["ll_round_trip"] = [us / ROUND_TRIPS for us in of_pairs["ll_round_trip"]]
            names = ("ll_dispatch in a row", "ll_combine in a row")
            times |= kernel_time.kernels_in_a_row(bench, of_weft.buffer, replay, names)
        of_weft.buffer.destroy()
    return times


def round_trip_row(bench: Bench, pair: list[Row], us_of_all: list[float]) -> Row:
    made = Row(
        "ll_round_trip",
        bench.options.dtype,
        bench.options.tokens,
        sum(row.bytes for row in pair),
        [us / ROUND_TRIPS for us in us_of_all],
        checked=True,
    )
    floors = [row.floor_us for row in pair if row.floor_us is not None]
    made.floor_us = sum(floors) if len(floors) == len(pair) else None
    made.baselines = {name: sum(row.baselines[name] for row in pair) for name in pair[0].baselines}
    made.extra = shape_columns(bench) | {"clock": f"events around a graph of {ROUND_TRIPS} pairs"}
    return made


class Samples:
    """Takes samples of every low-latency call of every peer; a dispatch is always followed by its combine."""

    def __init__(
        self,
        bench: Bench,
        inputs: Inputs,
        calls: dict[str, Any],  # peers.LowLatency, or what has the same calls
        traffic: Traffic,
        in_a_row: int,
        decides: Any = None,  # a peers.LowLatency: which rows cross once per node; calls["weft"], if it can say so
    ) -> None:
        o, me = bench.options, bench.me
        self.bench, self.calls, self.x, self.weights = bench, calls, inputs.mine, inputs.my_weights
        self.in_a_row, self._decides = in_a_row, decides or calls["weft"]
        self._kept: list[Any] = []
        self.topk_idx = inputs.routes[0][me.rank].to(bench.device, copy=True)
        self.y = {
            name: of_peer.new_results(me.size, o.hidden, bench.device) for name, of_peer in calls.items()
        }
        self.all_to_all = peers.AllToAll(bench.group, me.rank, me.size, o.experts)
        far = far_rows(inputs.routes, o.experts, o.ranks_per_node or me.size)
        self._network = self._open_network(inputs, far) if o.ranks_per_node else None
        received = round(traffic.received - far)
        alike = self.y.get("high_throughput")  # of the same shape: a large call has no memory to spare
        if alike is None:
            alike = torch.zeros(o.tokens * me.size, o.hidden, dtype=torch.bfloat16, device=bench.device)
        self.back = alike
        copied = received if o.has_baselines else 0
        bytes_in, bytes_back = (copied * row_bytes(dtype, o.hidden) for dtype in (o.dtype, "bf16"))
        self.copy_in = peers.Memcpy(bytes_in, bench.device)
        self.copy_back = self.copy_in if bytes_back == bytes_in else peers.Memcpy(bytes_back, bench.device)
        captured = calls if o.is_captured else {}
        self.replays = {name: self._capture(name, of_peer) for name, of_peer in captured.items()}
        has_round_trips = captured and o.tokens <= FEW_TOKENS
        self.round_trips = self._capture_round_trips(calls["weft"]) if has_round_trips else None

    def _open_network(self, inputs: Inputs, far: float) -> NetworkSamples:
        o = self.bench.options
        of_weft = self._decides
        self.once_per_node = {
            "dispatch": of_weft.once_per_node(o.top_k, o.hidden),
            "combine": of_weft.replies_once_per_node(o.top_k, o.hidden),
        }
        messages = far_messages(inputs.routes, o.experts, o.ranks_per_node)
        out, back = (messages if shared else far for shared in self.once_per_node.values())
        return NetworkSamples(self.bench, out, back)

    def _capture(self, name: str, of_peer: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        # Captured one after the other, without a warm-up between: a dispatch is always followed by its
        # combine.
        for _ in range(2):
            handle = of_peer.dispatch(self.x, self.topk_idx)[2]
            of_peer.combine(self.y[name], self.topk_idx, self.weights, handle)
        torch.cuda.synchronize()
        dispatch, combine = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(dispatch):
            results = of_peer.dispatch(self.x, self.topk_idx)
        with torch.cuda.graph(combine):
            combined = of_peer.combine(self.y[name], self.topk_idx, self.weights, results[2])
        self._kept.append((results, combined))  # replays write there
        return dispatch.replay, combine.replay

    def _capture_round_trips(self, weft_calls: Any) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(ROUND_TRIPS):
                results = weft_calls.dispatch(self.x, self.topk_idx)
                combined = weft_calls.combine(self.y["weft"], self.topk_idx, self.weights, results[2])
        self._kept.append((results, combined))
        return graph.replay

    def take(self, topk_idx: Tensor) -> None:
        """Take one sample of everything along this rank's routes."""
        self.topk_idx.copy_(topk_idx)
        for name, of_peer in self.calls.items():
            self.bench.line_up()
            for _ in range(1 if self.bench.tracer else self.in_a_row):
                if name in self.replays:
                    self.bench.timed(f"{name} dispatch", self.replays[name][0])
                    self.bench.line_up()
                    self.bench.timed(f"{name} combine", self.replays[name][1])
                else:
                    self._pair(name, of_peer, self.bench.timed, self._line_up_if_long)
        if self.bench.tracer:
            return
        if self.round_trips:
            self.bench.sample("weft round_trip", self.round_trips)
        self._take_baselines()

    def touch(self, sets: list[Tensor]) -> None:
        """Make every pair once along each set of routes: memory of a window is mapped as it is first written."""
        for topk_idx in sets:
            self.topk_idx.copy_(topk_idx)
            for name, of_peer in self.calls.items():
                self._pair(name, of_peer, lambda _, call: call())

    def calls_by_row(self, name: str = "weft") -> dict[str, Callable[[], Any]]:
        """Return a peer's dispatch and its combine, to be called in turns, by the names of their rows."""
        if name in self.replays:
            return dict(zip(("ll_dispatch", "ll_combine"), self.replays[name], strict=True))
        handles: list[Any] = []

        def dispatch() -> None:
            handles[:] = [self.calls[name].dispatch(self.x, self.topk_idx)[2]]

        def combine() -> None:
            self.calls[name].combine(self.y[name], self.topk_idx, self.weights, handles[0])

        return {"ll_dispatch": dispatch, "ll_combine": combine}

    def rows(
        self,
        mode: str,
        traffic: Traffic,
        us: dict[str, list[float]],
        times: dict[str, Times],
        more: Callable[[str], dict[str, Any]] = lambda step: {},
    ) -> list[Row]:
        """Return a row for dispatch and one for combine. ``more``: further columns of a step."""
        o, rows = self.bench.options, []
        for step, dtype in (("dispatch", o.dtype), ("combine", "bf16")):
            bytes_per_row = row_bytes(dtype, o.hidden)
            logical, egress = traffic.selections * bytes_per_row, traffic.egress * bytes_per_row
            row = make_row(self.bench, mode, step, dtype, us, logical, egress)
            self.add_network(row, step)
            row.extra |= more(step)
            add_times(row, *times_of_step(self.bench, step, times))
            rows.append(row)
        return rows

    def turns(self) -> list[Callable[[Eager], None]]:
        """Return every peer's calls, to be made in a row."""

        def copies(clock: Eager) -> None:
            with clock.together("memcpy round_trip"):
                clock.call("memcpy dispatch", self.copy_in.copy)
                clock.call("memcpy combine", self.copy_back.copy)

        def all_to_all(clock: Eager) -> None:
            with clock.together("all_to_all round_trip"):
                self._all_to_all_pair(clock.call)

        of_buffers: list[Callable[[Eager], None]] = [
            functools.partial(self._in_turn, name, of_peer) for name, of_peer in self.calls.items()
        ]
        if not self.bench.options.has_baselines:
            return of_buffers
        return [*of_buffers, all_to_all, copies]

    def _in_turn(self, name: str, of_peer: Any, clock: Eager) -> None:
        with clock.together(f"{name} round_trip"):
            self._pair(name, of_peer, clock.call)

    def _take_baselines(self) -> None:
        if self._network:
            self._network.take()
        if not self.bench.options.has_baselines:
            return
        self.bench.line_up()
        for _ in range(self.in_a_row):
            self._all_to_all_pair(self.bench.timed, self._line_up_if_long)
        for name, memcpy in (("memcpy dispatch", self.copy_in), ("memcpy combine", self.copy_back)):
            self.bench.line_up()
            for _ in range(self.in_a_row):
                self.bench.timed(name, memcpy.copy)

    def add_network(self, row: Row, step: str) -> None:
        """Add to a row's floor what the network needs for the bytes that cross."""
        if self._network:
            self._network.add_to(row, step)
            row.extra["fan_out"] = "node" if self.once_per_node[step] else "direct"

    def _line_up_if_long(self) -> None:
        """Line up between dispatch and combine of long calls, as between graphs: else the combine of a rank whose
        dispatch ended early would count what others still dispatch.
        """
        if self.in_a_row == 1:
            self.bench.line_up()

    def _pair(
        self, name: str, of_peer: Any, timed: Timed, between: Callable[[], None] = lambda: None
    ) -> None:
        handle = timed(f"{name} dispatch", lambda: of_peer.dispatch(self.x, self.topk_idx))[2]
        between()
        timed(f"{name} combine", lambda: of_peer.combine(self.y[name], self.topk_idx, self.weights, handle))

    def _all_to_all_pair(self, timed: Timed, between: Callable[[], None] = lambda: None) -> None:
        peer = self.all_to_all
        is_fp8 = self.bench.options.dtype == "fp8"

        def dispatch() -> Any:  # quantised inside, as the low-latency dispatch does
            payload = oracle.quantize_fp8(self.x) if is_fp8 else self.x
            return peer.dispatch(payload, self.topk_idx, self.weights)

        results = timed("all_to_all dispatch", dispatch)
        between()
        timed("all_to_all combine", lambda: peer.combine(self.back[: count_rows(results[0])], results[3]))


def make_buffer(bench: Bench, kind: Any) -> Any:
    o, me = bench.options, bench.me
    rdma_bytes = kind.get_low_latency_rdma_size_hint(max(o.tokens, 1), o.hidden, me.size, o.experts)
    return kind(
        me.group,
        0,
        rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=-(-o.experts // me.size),
        explicitly_destroy=True,
    )


def check_calls(bench: Bench, inputs: Inputs, calls: peers.LowLatency) -> None:
    o, me = bench.options, bench.me
    routes = inputs.routes[0]
    topk_idx = routes[me.rank].to(bench.device)
    result = calls.dispatch(inputs.mine, topk_idx)
    check.check_ll_dispatch(result, inputs.rows, routes, o.experts, me.rank)
    rows, counts, handle = result
    y = check.dequantized(rows).bfloat16()
    beyond = torch.arange(y.shape[1], device=y.device)[None, :] >= counts[:, None]
    y.masked_fill_(beyond[:, :, None], 0.0)  # rows past the count are undefined
    combined = calls.combine(y, topk_idx, inputs.my_weights, handle)
    check.check_ll_combine(
        combined, inputs.rows[me.rank], routes[me.rank], inputs.weights[me.rank], o.dtype == "fp8"
    )
