# SPDX-License-Identifier: Apache-2.0
"""What a measurement of ``weft bench moe`` reports: rows with their columns, and what the columns mean."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from weft.bench.eager import Times
from weft.bench.moe import network, peers
from weft.bench.moe.clock import Bench
from weft.bench.moe.trace import CallsOfRanks
from weft.bench.report import Note, Row


class Measured(NamedTuple):
    """What rank 0 reports."""

    rows: list[Row]
    notes: list[Note]
    traces: CallsOfRanks  # [] unless asked for


def make_row(
    bench: Bench,
    mode: str,
    step: str,
    dtype: str,
    us: dict[str, list[float]],
    logical_bytes: float,
    egress_bytes: float,
) -> Row:
    """Return the row of one step of Weft beside its baselines.

    Args:
        step: ``dispatch`` or ``combine``; samples are found under ``<peer> <step>``.
        us: the slowest rank's samples by name.
        logical_bytes, egress_bytes: moved, own rank included, and leaving a rank; means over ranks.
    """
    o = bench.options
    names = _baselines(bench)
    made = Row(f"{mode}_{step}", dtype, o.tokens, round(logical_bytes), us[f"weft {step}"], checked=True)
    measured = {name: us.get(f"{key} {step}") for key, name in names.items()}
    made.baselines = {name: statistics.median(samples) for name, samples in measured.items() if samples}
    cold_us = None
    if bench.on_gpu and not o.ranks_per_node:
        made.floor_us, cold_us = bench.exchange_floors(egress_bytes)
    elif o.has_baselines:
        made.floor_us = min(us[f"memcpy {step}"])
    made.extra = shape_columns(bench)
    if cold_us is not None:
        made.extra["floor_cold_us"] = round(cold_us, 3)
    made.extra["logical_gbs"] = round(logical_bytes / made.us / 1e3, 3)
    made.extra["egress_gbs"] = round(egress_bytes / made.us / 1e3, 3)
    return made


def times_of_step(bench: Bench, step: str, times: dict[str, Times]) -> tuple[Times | None, dict[str, Times]]:
    """Return Weft's times of a step, and those of the peers by the names of baselines."""
    names = _baselines(bench)
    of_peers = {name: times.get(f"{key} {step}") for key, name in names.items()}
    return times.get(f"weft {step}"), {name: of for name, of in of_peers.items() if of is not None}


def shape_columns(bench: Bench) -> dict[str, Any]:
    """Return what every row of a run repeats: the shape, the routes, the machine's side."""
    o = bench.options
    return {
        "mode": o.mode,
        "ranks": bench.me.size,
        "hidden": o.hidden,
        "top_k": o.top_k,
        "experts": o.experts,
        "routes": o.routes,
        "transport": o.transport,
        "device": o.device,
        "ranks_per_node": o.ranks_per_node,
        "provider": o.provider,
        "clock": "host" if not bench.on_gpu else "events around a graph" if o.is_captured else "events",
    }


def _baselines(bench: Bench) -> dict[str, str]:
    """Return the columns of peers by what their samples are called."""
    same = {name: name for name in ("memcpy", "deep_ep", "deep_ep_v2", "low_latency", "high_throughput")}
    return {"all_to_all": all_to_all_name(bench), **same}


def all_to_all_name(bench: Bench) -> str:
    """Return which library carries torch.distributed's all-to-all here."""
    return "nccl" if bench.on_gpu else "gloo"


def method_notes(bench: Bench, has_deep_ep: bool) -> list[Note]:
    """Return the lines that say what the columns of this run mean."""
    gloo = all_to_all_name(bench)
    notes = [
        Note(
            "size or MB: bytes of the rows that a rank receives, its own included, as a mean over ranks "
            "(low latency: bytes of its (token, expert) pairs). Times are those of the slowest rank"
        ),
        Note(f"{gloo}: the same work with torch.distributed all-to-all", (f"{gloo} us (ratio)",)),
        Note(
            "memcpy: each rank copies the bytes that it receives, each row once, with one thread, all ranks at once",
            ("memcpy us (ratio)", "floor us", "over floor"),
        ),
        Note("enqueue us: host time of an eager call; on the CPU without its kernels", ("enqueue us",)),
        Note("eager us: time of one eager call in a row of them, kernels included", ("eager us",)),
        Note(
            "kernel us: from the first block's start to the last block's end, by time stamps of the kernels in a "
            "second buffer",
            ("kernel us", "cached kernel us"),
        ),
        Note("kernel warm us: kernel us of calls in a row", ("kernel warm us",)),
        Note(
            "deep ep kernel us: from the first kernel's start to the last kernel's end, by torch's profiler",
            ("deep ep kernel us", "deep ep v2 kernel us"),
        ),
    ]
    if bench.options.ranks_per_node:
        notes += _node_notes(bench)
    elif bench.on_gpu:
        notes += [
            Note(
                "floor: a bare exchange of the bytes that leave a GPU, measured in this run by the best way of "
                "weft bench floor; kernel time of launches in a row: compare it with kernel warm us",
                _FLOORS,
            ),
            Note(
                "floor cold us: the floor of one launch after the L2 cache was emptied: compare it with kernel us",
                ("floor cold us",),
            ),
        ]
    else:
        notes.append(Note("floor: the fastest of the memcpy samples", _FLOORS))
    if not has_deep_ep:
        notes.append(Note("deep_ep: not measured, DeepEP itself is not installed here"))
    return notes


_FLOORS = ("floor us", "over floor")


def _node_notes(bench: Bench) -> list[Note]:
    notes = [
        Note(
            "floor: network us plus the fastest memcpy of the rows that do not cross nodes. network us: the provider's "
            "own loop for what a rank sends to other nodes, one half of the ranks after the other; each row once per "
            "node, or once per rank where fan out is direct",
            (*_FLOORS, "network us"),
        ),
        Note("raw us: network us of the slower half of the ranks", ("raw us",)),
    ]
    if bench.options.mode == "ll":
        notes.append(
            Note(
                f"bound us: {network.RAW_FACTOR:.1f} times raw us, plus {network.RAW_BEYOND_US:.0f} us: the aim for a "
                "call where each rank has a core and a NIC",
                ("bound us",),
            )
        )
    return notes


def count_rows(rows: peers.Payload) -> int:
    """Return how many rows a payload has."""
    return (rows[0] if isinstance(rows, tuple) else rows).shape[0]
