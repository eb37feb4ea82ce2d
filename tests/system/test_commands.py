# SPDX-License-Identifier: Apache-2.0
"""``weft demo`` and ``weft bench moe`` as users start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from port_nodes import nodes
from programs import WEFT, run_program, torchrun

from weft.bench.report import check_document
from weft.demo.agreement import compare
from weft.demo.model import Shape
from weft.demo.train import Plan, train_on_one_rank, train_over_ranks
from weft.testing.ranks import run_ranks


def run(command: list[str], folder: Path) -> str:
    ran = run_program(command, folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_demo_trains_both_ways_and_draws(tmp_path: Path) -> None:
    sizes = ["--device", "cpu", "--ranks", "3", "--steps", "4", "--sequences", "5"]
    printed = run([*WEFT, "demo", *sizes], tmp_path)
    assert "they agree" in printed
    assert (tmp_path / "demo-out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "demo-out" / "losses.json").read_text())
    assert [len(losses) for losses in written["losses"].values()] == [4, 4]
    rows = 4 * 5 * 64 * 2 * 2  # steps, sequences, bytes, top-k, layers
    assert sum(map(sum, written["rows"])) == rows and len(written["rows"]) == 3


def test_experts_over_two_nodes_train_to_the_losses_of_one_rank() -> None:
    plan = Plan(Shape(experts=16), steps=2, sequences=4, seed=0, device="cpu")
    with nodes(2, "fabric:tcp"):
        over_nodes = run_ranks(4, train_over_ranks, plan, 2, with_gpus=False)[0]
    (alone,) = run_ranks(1, train_on_one_rank, plan, with_group=False, with_gpus=False)
    agreement = compare(alone.losses, over_nodes.losses)
    assert agreement.holds, agreement.sentence()


SHAPES = [
    ("ht", "bf16", ["--ranks", "3", "--tokens", "20", "--top-k", "3", "--experts", "12"]),
    ("ht", "fp8", ["--ranks", "2", "--tokens", "17", "--top-k", "2", "--experts", "8", "--routes", "zipf"]),
    ("ll", "bf16", ["--ranks", "2", "--tokens", "9", "--top-k", "2", "--experts", "6"]),
    ("ll", "fp8", ["--ranks", "2", "--tokens", "9", "--top-k", "2", "--experts", "6"]),
]


@pytest.mark.parametrize(("mode", "dtype", "shape"), SHAPES)
def test_bench_moe_checks_measures_and_writes(
    mode: str, dtype: str, shape: list[str], tmp_path: Path
) -> None:
    options = ["--mode", mode, "--dtype", dtype, "--hidden", "512", "--iterations", "2", "--warmup", "1"]
    files = ["--json", "out.json", "--plot", "out.png", "--device", "cpu"]
    if mode == "ht":
        files += ["--sms", "6,8"]
    run([*WEFT, "bench", "moe", *options, *shape, *files], tmp_path)
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    calls = {row["call"]: row for row in reversed(document["rows"])}  # the first of each
    assert set(calls) == {f"{mode}_dispatch", f"{mode}_combine"} | ({"ht_layout"} if mode == "ht" else set())
    assert calls[f"{mode}_dispatch"]["dtype"] == dtype
    assert all(row.get("sms") == (6 if mode == "ht" else None) for row in calls.values())
    others = [row for row in document["rows"] if row not in calls.values()]
    assert [row["sms"] for row in others] == [8, 8, 8] * (mode == "ht")
    assert all(row["checked"] and row["us"] > 0 and not row["baselines"] for row in others)
    for step in ("dispatch", "combine"):
        row = calls[f"{mode}_{step}"]
        assert row["checked"] and row["floor_us"] > 0 and set(row["baselines"]) == {"gloo", "memcpy"}
        assert row["enqueue_us"] > 0 and row["eager_us"] > 0
        assert row["gloo_eager_us"] > 0 and row["memcpy_eager_us"] > 0
    assert (tmp_path / "out.png").is_file()


@pytest.mark.parametrize(
    ("mode", "wait"), [("ht", "wait dispatch.rendezvous"), ("ll", "wait low_latency_dispatch.recv")]
)
def test_bench_moe_traces_and_names_the_slow_rank(mode: str, wait: str, tmp_path: Path) -> None:
    shape = ["--tokens", "20", "--hidden", "64", "--top-k", "3", "--experts", "12", "--ranks", "3"]
    slow = ["--iterations", "2", "--trace", "trace.json", "--straggler", "--delay", "1:100000"]
    printed = run([*WEFT, "bench", "moe", "--device", "cpu", "--mode", mode, *shape, *slow], tmp_path)
    assert "weft dispatch: rank 1 is slow" in printed and wait in printed
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1, 2}
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    waited = max(span["dur"] for span in spans if span["name"] == wait and span["args"]["peer"] == 1)
    assert waited > 50_000


def test_bench_moe_runs_under_torchrun(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tokens", "8", "--hidden", "64", "--top-k", "2", "--experts", "4"]
    run(
        [*torchrun(2), "-m", "weft", "bench", "moe", *options, "--iterations", "2", "--json", "out.json"],
        tmp_path,
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bench", "moe", "--tokens", "-1"], "tokens: got -1"),
        (["bench", "moe", "--delay", "soon"], "delay: got soon"),
        (["bench", "moe", "--sms", "7"], "sms: got 7"),
        (["bench", "moe", "--mode", "ll", "--sms", "8"], "sms: got 8"),
        (["bench", "moe", "--top-k", "9", "--experts", "8"], "top-k: got 9"),
        (["bench", "moe", "--dtype", "fp8", "--hidden", "200"], "hidden: got 200"),
        (["demo", "--out", "/proc/none"], "[Errno 2]"),
        # What the ranks find out; all of them say the same.
        (["bench", "moe", "--hidden", "60", "--tokens", "4", "--ranks", "2"], "x: got rows of 120 bytes"),
        (["bench", "moe", "--routes", "none.npy", "--tokens", "4", "--ranks", "2"], "routes: got none.npy"),
        (["bench", "moe", "--transport", "none", "--tokens", "4", "--ranks", "2"], "transport: got 'none'"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    ran = run_program([*WEFT, *options], tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"weft: {message}") and len(ran.stderr.splitlines()) == 1
