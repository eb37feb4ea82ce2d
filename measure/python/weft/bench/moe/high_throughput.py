# SPDX-License-Identifier: Apache-2.0
"""Measures layout, dispatch, both as one, cached dispatch and combine.

Routes change from sample to sample, and all peers take turns within a sample, so a machine that slows down slows
all of them."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import weft
from weft.bench.eager import Eager, Times, add_times
from weft.bench.moe import check, kernel_time, peers
from weft.bench.moe.clock import Bench, Inputs, Timed
from weft.bench.moe.floors import Traffic, row_bytes
from weft.bench.moe.network import NetworkSamples, far_messages
from weft.bench.moe.rows import Measured, count_rows, make_row, method_notes, shape_columns, times_of_step
from weft.bench.report import Note, Row
from weft.testing import oracle


def measure_each(bench: Bench, inputs: Inputs) -> Measured:
    """Return what measure() does for every number of SMs that was asked for, baselines beside the first. Collective."""
    measured = measure(bench, inputs)
    for sms in bench.options.more_sms:
        bench.options = dataclasses.replace(bench.options, sms=sms, has_baselines=False)
        measured.rows.extend(measure(bench, inputs).rows)
    for row in measured.rows if bench.options.more_sms else ():
        row.series = f"{row.extra['sms']} SMs"
    return measured


def measure(bench: Bench, inputs: Inputs) -> Measured:
    """Check, measure, check again. Collective. The result is meant for rank 0 to report."""
    o, me = bench.options, bench.me
    payload: peers.Payload = inputs.mine
    if o.dtype == "fp8":  # as the check does it: a GPU's torch divides a little differently
        quantized, scales = oracle.quantize_fp8(inputs.rows[me.rank])
        payload = (quantized.to(bench.device), scales.to(bench.device))
    buffers = {"weft": weft.Buffer}
    deep_ep = peers.real_deep_ep() if bench.on_gpu and o.has_baselines else None
    if deep_ep is not None:
        buffers["deep_ep"] = deep_ep.Buffer
    if o.sms is not None:
        for kind in buffers.values():
            kind.set_num_sms(o.sms)
    worst_rows = o.tokens * me.size if o.is_captured else 0
    calls = {
        name: peers.HighThroughput(make_buffer(bench, kind), o.experts, worst_rows)
        for name, kind in buffers.items()
    }
    for of_peer in calls.values():
        _check(bench, inputs, payload, of_peer)
    if kind_of_v2 := getattr(deep_ep, "ElasticBuffer", None):
        calls["deep_ep_v2"] = elastic = make_elastic(bench, kind_of_v2, worst_rows)
        check_elastic(bench, inputs, elastic)

    traffic = inputs.traffic(o.experts)
    sent = Samples(bench, inputs, payload, calls, traffic)

    def take(index: int) -> None:
        sent.take(inputs.routes[index % len(inputs.routes)][me.rank])

    bench.run(take)
    times = bench.in_a_row(sent.turns())
    _check(bench, inputs, payload, calls["weft"])
    engine = calls["weft"].buffer.runtime
    sms = (o.sms or engine.planned_sms, o.sms or engine.planned_combine_sms)
    rows = _rows(bench, traffic, bench.samples_us(), *sms)
    sent.add_network(rows)
    _add_times(bench, rows, times)
    traces = bench.traces(calls["weft"].buffer, take)
    others = kernel_time.times_of_others(bench, calls, sent.calls_by_row)
    for of_peer in calls.values():
        of_peer.buffer.destroy()
    kernel_time.add_kernel_times(rows, _kernel_times(bench, inputs, payload, traffic), others)
    notes = [*method_notes(bench, deep_ep is not None), _ways_of_dispatch(rows[1])]
    return Measured(rows, notes, traces)


def _kernel_times(
    bench: Bench, inputs: Inputs, payload: peers.Payload, traffic: Traffic
) -> dict[str, list[float]]:
    """Return what kernels take by their own stamps, by the names of rows; {} beside a trace. Collective.

    A dispatch is two kernels: the exchange of counts, and the rows; the time between them is part of it.
    """
    if not kernel_time.is_possible(bench):
        return {}
    o = bench.options
    worst_rows = o.tokens * bench.me.size if o.is_captured else 0
    with kernel_time.noting_blocks():
        of_weft = peers.HighThroughput(make_buffer(bench, weft.Buffer), o.experts, worst_rows)
        samples = Samples(bench, inputs, payload, {"weft": of_weft}, traffic)
        times = kernel_time.kernel_times(bench, of_weft.buffer, samples.calls_by_row())
        of_weft.buffer.destroy()
    return times


class Samples:
    """Takes one sample of every call of every peer along given routes."""

    def __init__(
        self,
        bench: Bench,
        inputs: Inputs,
        payload: peers.Payload,
        calls: dict[str, peers.HighThroughput],
        traffic: Traffic,
    ) -> None:
        o, me = bench.options, bench.me
        self.bench, self.payload, self.calls, self.weights = bench, payload, calls, inputs.my_weights
        self.topk_idx = inputs.routes[0][me.rank].to(bench.device, copy=True)
        # Expert outputs are ordinary tensors, not the receive buffer itself, as they are in a model.
        most = max(int(oracle.layout(torch.cat(r), o.experts, me.size)[0].max()) for r in inputs.routes)
        self.y = torch.randn(max(most, calls["weft"].worst_rows), 8, device=bench.device).bfloat16()
        self.y = self.y.repeat(1, -(-o.hidden // 8))[:, : o.hidden].contiguous()
        self.all_to_all = peers.AllToAll(bench.group, me.rank, me.size, o.experts)
        far = far_messages(inputs.routes, o.experts, o.ranks_per_node or me.size)
        self._network = NetworkSamples(bench, far, far) if o.ranks_per_node else None
        received = round(traffic.received - far)
        self.copy_in = peers.Memcpy(received * row_bytes(o.dtype, o.hidden), bench.device)
        self.copy_back = peers.Memcpy(received * row_bytes("bf16", o.hidden), bench.device)
        self._kept: list[Any] = []
        captured = calls if o.is_captured else {}
        self.replays = {name: self._capture(of_peer) for name, of_peer in captured.items()}

    def _capture(self, of_peer: peers.HighThroughput) -> list[Callable[[], None]]:
        layout, routes = self.bench.captured(lambda: of_peer.layout(self.topk_idx))
        dispatch, results = self.bench.captured(
            lambda: of_peer.dispatch(self.payload, self.topk_idx, self.weights, routes)
        )
        combine, combined = self.bench.captured(lambda: of_peer.combine(self.y, results[4]))
        handle = self._lay_out_and_dispatch(dataclasses.replace(of_peer, worst_rows=0))[4]
        cached, again = self.bench.captured(lambda: of_peer.dispatch_cached(self.payload, handle))
        both, anew = self.bench.captured(lambda: self._lay_out_and_dispatch(of_peer))
        self._kept.append((routes, results, combined, handle, again, anew))  # replays read and write there
        return [layout, dispatch, combine, cached, both]

    def _lay_out_and_dispatch(self, of_peer: peers.HighThroughput) -> Any:
        return of_peer.dispatch(self.payload, self.topk_idx, self.weights, of_peer.layout(self.topk_idx))

    def take(self, topk_idx: Tensor) -> None:
        """Take one sample of everything along this rank's routes."""
        self.topk_idx.copy_(topk_idx)
        for name, of_peer in self.calls.items():
            if name in self.replays:
                steps = ("layout", "dispatch", "combine", "cached", "layout + dispatch")
                for step, replay in zip(steps, self.replays[name], strict=True):
                    self.bench.sample(f"{name} {step}", replay)
            else:
                self._take_eager(name, of_peer, self.bench.sample)
        self._take_baselines()

    def calls_by_row(self, name: str = "weft") -> dict[str, Callable[[], Any]]:
        """Return a peer's dispatch, its combine and a cached dispatch, to be called in turns."""
        if name in self.replays:
            _, dispatch, combine, cached, _ = self.replays[name]
            return {"ht_dispatch": dispatch, "ht_combine": combine, "cached": cached}
        of_peer = self.calls[name]
        results: list[Any] = []
        layout = of_peer.layout(self.topk_idx)

        def dispatch_now() -> None:
            results[:] = [of_peer.dispatch(self.payload, self.topk_idx, self.weights, layout)]

        def combine_now() -> None:
            of_peer.combine(self.y[: count_rows(results[0][0])], results[0][4])

        def cached_now() -> None:
            of_peer.dispatch_cached(self.payload, results[0][4])

        return {"ht_dispatch": dispatch_now, "ht_combine": combine_now, "cached": cached_now}

    def turns(self) -> list[Callable[[Eager], None]]:
        """Return every peer's calls, to be made in a row; the host waits for counts."""
        of_buffers: list[Callable[[Eager], None]] = [
            functools.partial(self._in_turn, name, dataclasses.replace(of_peer, worst_rows=0))
            for name, of_peer in self.calls.items()
        ]
        if not self.bench.options.has_baselines:
            return of_buffers
        return [*of_buffers, lambda clock: self._take_others(clock.call)]

    def _in_turn(self, name: str, of_peer: peers.HighThroughput, clock: Eager) -> None:
        self._take_eager(name, of_peer, clock.call)

    def _take_eager(self, name: str, of_peer: peers.HighThroughput, sample: Timed) -> None:
        layout = sample(f"{name} layout", lambda: of_peer.layout(self.topk_idx))
        results = sample(
            f"{name} dispatch", lambda: of_peer.dispatch(self.payload, self.topk_idx, self.weights, layout)
        )
        handle, count = results[4], count_rows(results[0])
        del results
        sample(f"{name} combine", lambda: of_peer.combine(self.y[:count], handle))
        sample(f"{name} cached", lambda: of_peer.dispatch_cached(self.payload, handle))
        sample(f"{name} layout + dispatch", lambda: self._lay_out_and_dispatch(of_peer))

    def _take_baselines(self) -> None:
        if self.bench.tracer:
            return
        if self._network:
            self._network.take()
        if self.bench.options.has_baselines:
            self._take_others(self.bench.sample)

    def add_network(self, rows: list[Row]) -> None:
        """Add to the floors of dispatch and combine what the network needs for the bytes that cross."""
        for row in rows:
            if self._network and row.call != "ht_layout":
                self._network.add_to(row, row.call.removeprefix("ht_"))

    def _take_others(self, sample: Timed) -> None:
        peer = self.all_to_all
        payload, topk_idx, weights = self.payload, self.topk_idx, self.weights
        results = sample("all_to_all dispatch", lambda: peer.dispatch(payload, topk_idx, weights))
        handle, count = results[3], count_rows(results[0])
        del results
        sample("all_to_all combine", lambda: peer.combine(self.y[:count], handle))
        sample("memcpy dispatch", self.copy_in.copy)
        sample("memcpy combine", self.copy_back.copy)


_META_BYTES = 1024  # at least the scales, ids and weights of a row
_MOST_OUTPUTS = 24


def make_buffer(bench: Bench, kind: Any) -> Any:
    me, hidden_bytes = bench.me, bench.options.hidden * 2
    configs = (kind.get_dispatch_config(me.size), kind.get_combine_config(me.size))
    nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, me.size) for config in configs)
    rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, me.size) for config in configs)
    if kind is weft.Buffer and bench.options.is_captured:
        # A captured call exchanges no counts with the host, so it can't grow the window, and its graph keeps its
        # outputs: room for those of every graph, each of the worst case.
        worst_bytes = bench.options.tokens * me.size * (hidden_bytes + _META_BYTES)
        nvl_bytes = max(nvl_bytes, _MOST_OUTPUTS * worst_bytes)
    return kind(me.group, nvl_bytes, rdma_bytes, explicitly_destroy=True)


def make_elastic(bench: Bench, kind: Any, worst_rows: int) -> peers.Elastic:
    """Return the calls of an ``ElasticBuffer`` with room for rows of bfloat16."""
    o = bench.options
    buffer = kind(
        bench.me.group,
        num_max_tokens_per_rank=o.tokens,
        hidden=o.hidden,
        num_topk=o.top_k,
        explicitly_destroy=True,
    )
    return peers.Elastic(buffer, o.experts, worst_rows)


def check_elastic(bench: Bench, inputs: Inputs, calls: peers.Elastic) -> None:
    """Check what a dispatch and its combine make of rows of bfloat16. Collective. Raises: Mismatch."""
    o, me = bench.options, bench.me
    topk_idx = inputs.routes[0][me.rank].to(bench.device)
    rows, _, _, _, handle, _ = calls.dispatch(inputs.mine, topk_idx, inputs.my_weights, None)
    combined = calls.combine(rows * check.rank_factor(me.rank), handle)
    per_node = o.ranks_per_node or me.size
    check.check_ht_combine(
        combined, inputs.rows[me.rank], inputs.routes[0][me.rank], o.experts, me.size, per_node
    )


def _check(bench: Bench, inputs: Inputs, payload: peers.Payload, calls: peers.HighThroughput) -> None:
    o, me = bench.options, bench.me
    routes = inputs.routes[0]
    topk_idx = routes[me.rank].to(bench.device)
    results = calls.dispatch(payload, topk_idx, inputs.my_weights, calls.layout(topk_idx))
    check.check_ht_dispatch(results, inputs.rows, inputs.weights, routes, o.experts, me.rank)
    back = oracle.ht_dispatch(routes, o.experts, me.rank).take(inputs.rows) * check.rank_factor(me.rank)
    y = torch.zeros(count_rows(results[0]), o.hidden, dtype=torch.bfloat16, device=bench.device)
    y[: back.shape[0]] = back
    combined = calls.combine(y, results[4])
    per_node = o.ranks_per_node or me.size
    check.check_ht_combine(combined, inputs.rows[me.rank], routes[me.rank], o.experts, me.size, per_node)


def _ways_of_dispatch(dispatch: Row) -> Note:
    with_layout, cached = dispatch.extra["with_layout_us"], dispatch.extra["cached_us"]
    return Note(
        f"layout and dispatch timed as one: {with_layout:,.1f} us; dispatch with a cached handle: {cached:,.1f} us"
    )


def _add_times(bench: Bench, rows: list[Row], times: dict[str, Times]) -> None:
    """Add columns to the rows of layout, dispatch and combine; a cached dispatch has its own beside dispatch's."""
    for row in rows:
        add_times(row, *times_of_step(bench, row.call.removeprefix("ht_"), times))
    cached, of_peers = times_of_step(bench, "cached", times)
    named = {f"{peer}_cached": of_peer for peer, of_peer in of_peers.items()}
    add_times(rows[1], None, named if cached is None else {"cached": cached, **named})


def _rows(
    bench: Bench, traffic: Traffic, us: dict[str, list[float]], num_sms: int, combine_sms: int
) -> list[Row]:
    o = bench.options
    sent_bytes, back_bytes = row_bytes(o.dtype, o.hidden), row_bytes("bf16", o.hidden)
    layout = Row("ht_layout", "int64", o.tokens, o.tokens * o.top_k * 8, us["weft layout"], checked=True)
    layout.extra = shape_columns(bench)
    rows = [layout]
    for step, dtype, bytes_per_row in (("dispatch", o.dtype, sent_bytes), ("combine", "bf16", back_bytes)):
        logical, egress = traffic.received * bytes_per_row, traffic.egress * bytes_per_row
        rows.append(make_row(bench, "ht", step, dtype, us, logical, egress))
    if bench.on_gpu or o.sms is not None:
        for row in rows:
            row.extra["sms"] = combine_sms if row.call == "ht_combine" else num_sms
    rows[1].extra["cached_us"] = round(statistics.median(us["weft cached"]), 3)
    rows[1].extra["with_layout_us"] = round(statistics.median(us["weft layout + dispatch"]), 3)
    if "deep_ep layout" in us:
        rows[0].baselines["deep_ep"] = statistics.median(us["deep_ep layout"])
    return rows
