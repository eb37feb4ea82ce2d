# SPDX-License-Identifier: Apache-2.0
"""Measures the split all-to-all: pairs of phases beside low-latency calls, each phase by itself once its peers have
sent, and how much of a pair a matrix product between its phases hides: see p2p_overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from weft.bench.moe import check, high_throughput, p2p_overlap, peers
from weft.bench.moe.clock import Bench, Inputs
from weft.bench.moe.low_latency import CALLS_IN_A_ROW, FEW_TOKENS, Samples, make_buffer
from weft.bench.moe.rows import Measured, method_notes, shape_columns
from weft.bench.report import Note, Row
from weft.testing import oracle

PHASES = ("dispatch.send", "dispatch.receive", "combine.send", "combine.receive")
SCALE_GROUP = 128


def measure(bench: Bench, inputs: Inputs) -> Measured:
    """Check, measure, check again. Collective. The result is meant for rank 0 to report."""
    o, me = bench.options, bench.me
    x = oracle.quantize_fp8(inputs.mine) if o.dtype == "fp8" else inputs.mine
    split = peers.P2P(_make(bench), x, inputs.my_weights)
    # Of many tokens, low latency's buffer and rows of all experts do not fit most hosts' memory.
    is_prefill = o.tokens > FEW_TOKENS and not bench.on_gpu and not o.ranks_per_node
    name, beside = _high_throughput(bench, inputs) if is_prefill else _low_latency(bench)
    calls = {"weft": split, name: beside}
    _check(bench, inputs, split)
    traffic = inputs.traffic(o.experts)
    in_a_row = CALLS_IN_A_ROW if o.tokens <= FEW_TOKENS and not bench.on_gpu else 1
    samples = Samples(bench, inputs, calls, traffic, in_a_row, beside)
    phases = _Phases(bench, split, samples.y["weft"])
    y = samples.y["weft"]
    overlap = None
    if o.overlap_us:
        overlap = p2p_overlap.Overlap(bench, inputs, x, y, lambda sms: _make(bench, sms))
        for on_few in overlap.splits:
            _check(bench, inputs, on_few)

    def take(index: int) -> None:
        topk_idx = inputs.routes[index % len(inputs.routes)][me.rank]
        samples.take(topk_idx)
        for _ in range(0 if bench.tracer else in_a_row):
            phases.take(samples.topk_idx)
            if overlap is not None:
                overlap.take(samples.topk_idx)

    if is_prefill:
        samples.touch([routes[me.rank] for routes in inputs.routes])
    bench.run(take)
    times = bench.in_a_row(samples.turns())
    _check(bench, inputs, split)
    us = bench.samples_us(in_a_row)
    rows = samples.rows("p2p", traffic, us, times)
    rows += [_phase_row(bench, phase, us[f"phase {phase}"]) for phase in PHASES]
    if overlap is not None:
        rows += overlap.rows(us)
        overlap.destroy()
    traces = bench.traces(split.buffer, take)
    split.buffer.destroy()
    beside.buffer.destroy()
    return Measured(rows, [*method_notes(bench, has_deep_ep=False), *_notes(bench)], traces)


class _Phases:
    """Samples of single phases."""

    def __init__(self, bench: Bench, split: peers.P2P, y: Tensor) -> None:
        self._bench, self._split, self._y = bench, split, y

    def take(self, topk_idx: Tensor) -> None:
        """Take each phase when all ranks are done with the one before. Collective."""
        bench, a2a = self._bench, self._split.buffer
        handle = bench.sample("phase dispatch.send", lambda: self._split.send(topk_idx))
        bench.sample("phase dispatch.receive", lambda: a2a.dispatch_recv(handle))
        bench.sample("phase combine.send", lambda: a2a.combine_send(self._y, handle))
        bench.sample("phase combine.receive", lambda: a2a.combine_recv(handle))


def _make(bench: Bench, sms: int = 0) -> weft.P2PAllToAll:
    o = bench.options
    is_fp8 = o.dtype == "fp8"
    return weft.P2PAllToAll(
        bench.me.group,
        max_num_tokens=max(o.tokens, 1),
        num_experts=o.experts,
        hidden_dim=o.hidden,
        num_experts_per_token=o.top_k,
        in_dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16,
        out_dtype=torch.bfloat16,
        hidden_dim_scale=o.hidden // SCALE_GROUP if is_fp8 else None,
        scale_dtype=torch.float32 if is_fp8 else None,
        max_in_flight=1,
        num_sms=sms,
        device=bench.device,
    )


def _low_latency(bench: Bench) -> tuple[str, Any]:
    o = bench.options
    buffer = make_buffer(bench, weft.Buffer)
    return "low_latency", peers.LowLatency(buffer, o.experts, max(o.tokens, 1), o.dtype == "fp8")


def _high_throughput(bench: Bench, inputs: Inputs) -> tuple[str, Any]:
    o, me = bench.options, bench.me
    payload = oracle.quantize_fp8(inputs.rows[me.rank]) if o.dtype == "fp8" else inputs.mine
    calls = peers.HighThroughput(high_throughput.make_buffer(bench, weft.Buffer), o.experts)
    return "high_throughput", peers.HighThroughputPairs(calls, payload, inputs.my_weights)


def _phase_row(bench: Bench, phase: str, us: list[float]) -> Row:
    o = bench.options
    made = Row(
        f"p2p_{phase}", o.dtype if phase.startswith("dispatch") else "bf16", o.tokens, 0, us, checked=True
    )
    made.extra = shape_columns(bench) | {"clock": "events" if bench.on_gpu else "host"}
    return made


def _notes(bench: Bench) -> list[Note]:
    lines = [
        "low_latency: weft.Buffer's calls of the same tokens. p2p gets rows that are already quantised",
        "high_throughput: weft.Buffer's other calls, instead of low_latency, for many tokens on one host's CPU: "
        "layout and dispatch as one, and a sum without weights. They move fewer bytes: a row for each (token, rank), "
        "not for each (token, expert), and results that their rank has already summed",
        "send, receive: each starts when all ranks have finished the phase before, so a receive finds its rows. "
        "Between send and receive no kernel of the exchange runs",
    ]
    notes = [
        Note(lines[0], ("low_latency us (ratio)",)),
        Note(lines[1], ("high_throughput us (ratio)",)),
        Note(lines[2]),
    ]
    return notes + p2p_overlap.notes() if bench.options.overlap_us else notes


def _check(bench: Bench, inputs: Inputs, split: peers.P2P) -> None:
    o, me = bench.options, bench.me
    routes = inputs.routes[0]
    topk_idx = routes[me.rank].to(bench.device)
    rows, counts, handle = split.dispatch(inputs.mine, topk_idx)
    check.check_p2p_dispatch(rows, inputs.rows, routes, o.experts, me.rank)
    y = torch.empty(rows.x.shape, dtype=torch.bfloat16, device=bench.device)  # of which most is never touched
    received = int(counts.sum())  # rows are packed without padding
    held = rows.x[:received]
    y[:received] = held if rows.x_scale is None else check.dequantized((held, rows.x_scale[:received]))
    del rows, held
    combined = split.combine(y, topk_idx, inputs.my_weights, handle)
    check.check_ll_combine(
        combined, inputs.rows[me.rank], routes[me.rank], inputs.weights[me.rank], o.dtype == "fp8"
    )
