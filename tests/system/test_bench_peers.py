# SPDX-License-Identifier: Apache-2.0
"""Peers that benchmarks call by DeepEP's signatures, with Weft's own buffers in their place."""

from __future__ import annotations

from weft.bench.moe import high_throughput, peers
from weft.bench.moe.clock import Bench, Inputs, Options
from weft.moe.buffer import Buffer
from weft.moe.elastic import ElasticBuffer
from weft.testing.ranks import Rank, run_ranks


def _elastic_beside_weft(rank: Rank) -> list[str]:
    options = Options("ht", 33, 256, 3, 8, "bf16", "uniform", "auto", "cpu", 2, 1, seed=1, eager=True)
    bench = Bench(rank, options)
    inputs = Inputs.make(bench)
    elastic = high_throughput.make_elastic(bench, ElasticBuffer, worst_rows=0)
    high_throughput.check_elastic(bench, inputs, elastic)
    weft_calls = peers.HighThroughput(high_throughput.make_buffer(bench, Buffer), options.experts)
    samples = high_throughput.Samples(
        bench,
        inputs,
        inputs.mine,
        {"weft": weft_calls, "deep_ep_v2": elastic},
        inputs.traffic(options.experts),
    )
    return list(bench.in_a_row(samples.turns()))


def test_an_elastic_buffer_is_measured_beside_wefts() -> None:
    for names in run_ranks(2, _elastic_beside_weft):
        for step in ("dispatch", "combine", "cached"):
            assert {f"weft {step}", f"deep_ep_v2 {step}"} <= set(names), names
