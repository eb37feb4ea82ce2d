# SPDX-License-Identifier: Apache-2.0
"""Watching a job: counters, Prometheus, the start report, torch's profiler and flight recorder, weft top."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import PYTHON, ROOT, WEFT, environment, run_program

import weft
from weft.runtime import top
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import LoopbackNetwork, TransferEngine

torch = pytest.importorskip("torch")

# Two ranks make five calls; then rank 1 makes no sixth until it is told to, and rank 0 waits for it.
JOB = """
import os, pathlib, sys, time
import torch, weft
comm = weft.Communicator()
for _ in range(4):
    comm.all_reduce(torch.ones(1024))
buffer = weft.Buffer(comm=comm, num_nvl_bytes=1 << 20, device="cpu")
x = torch.randn(8, 256).bfloat16()
ids = torch.arange(8).view(8, 1) % 4
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
rows, *_, handle, _ = buffer.dispatch(
    x, topk_idx=ids, topk_weights=torch.ones(8, 1), num_tokens_per_rank=per_rank,
    num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
buffer.combine(rows, handle)
with torch.profiler.profile() as profile:
    comm.all_reduce(torch.ones(1024))
assert any(event.key == "weft::all_reduce" for event in profile.key_averages()), "no record"
comm.all_reduce(torch.ones(1024))
pathlib.Path(f"ready{comm.rank}").touch()
if comm.rank == 1:
    while not os.path.exists("go"):
        time.sleep(0.05)
comm.all_reduce(torch.ones(1024))
"""
CALLS = 7


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Job:
    """A job that stands still, what was seen of it meanwhile, and what it left."""

    folder: Path
    looks: list[top.Look]
    reports: list[str]
    top: subprocess.CompletedProcess[str]
    scraped: str
    errors: list[str]
    records: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    pytest.importorskip("prometheus_client")
    folder = tmp_path_factory.mktemp("job")
    port = _free_port()
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WEFT_LOG": "info",
        "WEFT_METRICS_PORT": str(port),
        "WEFT_CALL_RECORD": str(folder / "calls_"),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB],
            cwd=folder,
            env=environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 120
        while len(list(folder.glob("ready*"))) < 2:
            assert all(rank.poll() is None for rank in ranks), [rank.communicate()[1] for rank in ranks]
            assert time.monotonic() < until
            time.sleep(0.05)
        pids = [rank.pid for rank in ranks]
        time.sleep(1.2)  # a shorter wait is not told of
        looks = top.look(pids)
        only = [word for pid in pids for word in ("--pid", str(pid))]
        shown = run_program([*WEFT, "top", "--once", "--seconds", "0.2", *only], folder)
        recorded = run_program([*WEFT, "top", "--record", str(folder / "hung_"), *only], folder)
        assert recorded.returncode == 0, recorded.stderr
        scraped = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        (folder / "go").touch()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
    finally:
        for rank in ranks:
            rank.kill()
    yield Job(folder, looks, top.waits(looks), shown, scraped, errors, folder)


def test_counts_are_seen_from_outside(job: Job) -> None:
    assert [top._main_group(look)["rank"] for look in job.looks] == [0, 1]
    operations = {row["operation"]: row for row in job.looks[1].counted["operations"]}
    assert operations["all_reduce"]["calls"] == CALLS - 1
    assert operations["all_reduce"]["bytes"] == (CALLS - 1) * 4096
    assert operations["dispatch"]["calls"] == operations["combine"]["calls"] == 1
    assert operations["dispatch.counts"]["wait_seconds"] <= operations["dispatch.counts"]["seconds"]
    assert sum(operations["all_reduce"]["took"]) == CALLS - 1
    to_other = next(row for row in job.looks[1].counted["peers"] if row["transport"] == "mapped")
    # Of the dispatch and the combine: four rows of 256 bf16 each; an all-reduce moves at least half of its bytes.
    assert to_other["bytes"] >= 2 * 4 * 512 + (CALLS - 1) * 2048


def test_top_says_who_waits_for_whom(job: Job) -> None:
    assert len(job.reports) == 1
    assert re.match(
        r"rank 0 is in all_reduce, call 7, for [\d.]+ s; waits for rank 1 \(process \d+\)", job.reports[0]
    )
    assert "which left all_reduce, call 6" in job.reports[0]
    assert job.top.returncode == 0, job.top.stderr
    assert "waits for rank 1" in " ".join(job.top.stdout.split())
    assert max(map(len, job.top.stdout.splitlines())) <= 80


def late_in_the_last_call(rank: Rank) -> tuple[dict[str, Any], str]:
    """Rank 1 comes to the last call when rank 0 has been seen in it for a while."""
    comm = weft.Communicator(rank.group)
    comm.all_reduce(torch.ones(8))
    before = weft.metrics()
    if rank.rank == 0:
        (rank.folder / "pid").write_text(str(os.getpid()))
    rank.meet()
    if rank.rank == 1:
        waiting = int((rank.folder / "pid").read_text())
        until = time.monotonic() + 30
        while not top.waits(top.look([waiting])):
            assert time.monotonic() < until
            time.sleep(0.05)
    comm.all_reduce(torch.ones(8))
    counts = weft.metrics()
    (row,) = (row for row in counts.operations if row["operation"] == "all_reduce")
    (earlier,) = (row for row in before.operations if row["operation"] == "all_reduce")
    return {name: row[name] - earlier[name] for name in ("seconds", "waits", "wait_seconds")}, str(counts)


def test_waiting_for_a_peer_is_counted_as_waiting_and_shown_as_such() -> None:
    (added, shown), _ = run_ranks(2, late_in_the_last_call, with_gpus=False)
    assert added["waits"] == 1 and 0 < added["wait_seconds"] <= added["seconds"]
    assert "Calls, rank 0" in shown and "Peers, rank 0" in shown and "waiting" in shown
    assert max(map(len, shown.splitlines())) <= 80
    (line,) = (line for line in shown.splitlines() if line.startswith("all_reduce"))
    assert line.split()[1:3] == ["mapped", "2"]


def test_top_without_a_job_says_so(tmp_path: Path) -> None:
    answer = run_program([*WEFT, "top", "--once", "--pid", str(os.getppid())], tmp_path)
    assert answer.returncode == 1
    assert "no process" in answer.stderr


def test_a_scrape_has_every_family(job: Job) -> None:
    labels = r'operation="all_reduce",rank="(\d)",transport="mapped"'
    found = re.search(rf"weft_calls_total{{{labels}}} ([\d.]+)", job.scraped)
    assert found, job.scraped
    assert float(found[2]) in (CALLS - 1, CALLS)
    assert 'weft_call_seconds_bucket{le="+Inf",' in job.scraped
    for family in (
        "weft_bytes_total",
        "weft_errors_total",
        "weft_peer_bytes_total",
        "weft_peer_faults_total",
    ):
        assert f"# TYPE {family.removesuffix('_total')}" in job.scraped


def test_the_log_begins_with_what_runs_and_ends_with_what_was_done(job: Job) -> None:
    for rank, error in enumerate(job.errors):
        assert f"weft info: rank {rank} of 2, 1 nodes: weft {weft.__version__} on cpu" in error
        assert re.search(rf"rank {rank}: reaches rank {1 - rank} by mapped \(", error)
        assert "settings that differ from their defaults: " in error
        assert "WEFT_LOG=info" in error
        assert f"rank {rank}: all_reduce over mapped: {CALLS} calls, " in error
    assert "NICs: RDMA" in job.errors[0]
    assert "NICs: RDMA" not in job.errors[1]


def _analyse(prefix: str, folder: Path) -> Any:
    """Return what torch's analyser makes of the dumps: its database of collectives and calls."""
    program = (
        "import sys, pickle\n"
        "from torch.distributed.flight_recorder import fr_trace\n"
        "fr_trace.main([sys.argv[1], '-p', sys.argv[2], '-o', 'built'])\n"
    )
    ran = run_program([*PYTHON, "-c", program, str(folder), prefix], folder)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout + ran.stderr


def test_torch_reads_the_last_calls(job: Job) -> None:
    pytest.importorskip("torch.distributed.flight_recorder")
    dump = pickle.loads((job.records / "calls_0").read_bytes())
    reduces = [entry for entry in dump["entries"] if entry["profiling_name"] == "weft:all_reduce"]
    assert len(reduces) == CALLS
    assert {entry["state"] for entry in reduces} == {"completed"}
    assert reduces[0]["input_sizes"] == [[1024]]
    assert reduces[0]["input_dtypes"] == ["Float"]
    assert {"dispatch", "combine"} <= {entry["frames"][0]["name"] for entry in dump["entries"]}
    assert "ismatch" not in _analyse("calls_", job.records)


def test_torch_finds_who_is_missing_in_the_calls_of_a_job_that_hangs(job: Job) -> None:
    pytest.importorskip("torch.distributed.flight_recorder")
    stuck, other = (pickle.loads((job.records / f"hung_{rank}").read_bytes())["entries"] for rank in range(2))
    assert stuck[-1]["state"] == "started"
    assert len(stuck) == len(other) + 1
    assert "1" in re.findall(r"missing ranks[^\d]*([\d, ]+)", _analyse("hung_", job.records), re.I)[0]


LOSS = """
import torch, weft
comm = weft.Communicator(device="cpu", timeout_s=60)
comm.all_reduce(torch.ones(8))
if comm.rank == 0:  # the other one ends
    try:
        comm.all_reduce(torch.ones(8))
    except weft.PeerLost:
        print("faults", [row["faults"] for row in weft.metrics().peers if row["peer"] == "1"])
"""


def test_a_lost_peer_is_counted_and_leaves_a_record(tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WEFT_CALL_RECORD": str(tmp_path / "lost_"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*PYTHON, "-c", LOSS],
            cwd=tmp_path,
            env=environment() | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert "faults [1]" in said[0]
    last = pickle.loads((tmp_path / "lost_0").read_bytes())["entries"][-1]
    assert last["collective_seq_id"] == 2
    assert last["state"] == "started"


def test_transfers_are_counted_by_peer() -> None:
    network = LoopbackNetwork()
    with TransferEngine(network, name="watched-a") as one, TransferEngine(network, name="watched-b") as two:
        one.connect(two.address)
        remote = one.attach(two.register(bytearray(4096), remote_write=True).descriptor)
        before = _transfers("write")
        one.write(one.register(bytearray(b"x" * 4096)), remote).wait(10)
    after = _transfers("write")  # an engine counts a transfer once those who wait for it have been told
    assert (after["calls"] - before["calls"], after["bytes"] - before["bytes"]) == (1, 4096)
    assert after["seconds"] > before["seconds"]
    peer = next(row for row in weft.metrics().peers if row["peer"] == "watched-b")
    assert peer["bytes"] >= 4096


def _transfers(kind: str) -> dict[str, Any]:
    """Return what is counted of the loopback network; other tests of this process use others."""
    counted = ((row["operation"], row["transport"], row) for row in weft.metrics().operations)
    return next(row for *of, row in counted if of == [f"transfer.{kind}", "loopback"])


def test_a_program_with_handlers_gets_records(tmp_path: Path) -> None:
    program = (
        "import logging\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s|%(levelname)s|%(message)s')\n"
        "import weft\n"
        "comm = weft.Communicator(device='cpu')\n"
        "try:\n"
        "    weft.Communicator(device='cpu', transport='none')\n"
        "except weft.Error:\n"
        "    pass\n"
    )
    ran = run_program([*PYTHON, "-c", program], tmp_path, more={"WEFT_LOG": "info"})
    assert ran.returncode == 0, ran.stderr
    assert "weft.start|INFO|rank 0 of 1" in ran.stderr
    assert re.search(r"weft\.core\|INFO\|.*none", ran.stderr)
    assert "weft info:" not in ran.stderr  # nothing comes twice


@pytest.mark.skipif(hasattr(torch._C, "_nvtx"), reason="this torch has NVTX")
def test_nvtx_without_cuda_is_refused(tmp_path: Path) -> None:
    ran = run_program([*PYTHON, "-c", "import weft; weft.Buffer"], tmp_path, more={"WEFT_NVTX": "1"})
    assert "WEFT_NVTX: got 1" in ran.stderr


def test_metrics_before_anything_are_empty(tmp_path: Path) -> None:
    ran = run_program(
        [
            *PYTHON,
            "-c",
            "import weft, json; print(json.dumps([weft.metrics().operations, weft.metrics().peers]))",
        ],
        tmp_path,
    )
    assert json.loads(ran.stdout) == [[], []]


# ---- a real Prometheus


def _asked(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


def test_prometheus_scrapes_a_benchmark_as_the_document_says(tmp_path: Path) -> None:
    """Its own file of settings, with other ports, while the benchmark runs: all ranks' counters come, and only rise."""
    pytest.importorskip("prometheus_client")
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt install prometheus")
    text = (ROOT / "docs" / "watching.md").read_text()
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    first, page = _free_port(), _free_port()
    for at in range(4):
        settings = settings.replace(f"127.0.0.1:{9400 + at}", f"127.0.0.1:{first + at}")
    (tmp_path / "prometheus.yml").write_text(settings.replace("interval: 1s", "interval: 200ms"))
    command = ["prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{page}"], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as prometheus:
        try:
            bench = ["bench", "collective", "--ranks", "2", "--device", "cpu", "--calls", "all_reduce"]
            sizes = ["-b", "64K", "-e", "1M", "-n", "500", "-w", "1", "--no-baseline"]
            until = time.monotonic() + 100
            seen, rates = [], []
            while not (seen and rates) and time.monotonic() < until:  # Prometheus may take a while to begin
                ran = run_program([*WEFT, *bench, *sizes], tmp_path, more={"WEFT_METRICS_PORT": str(first)})
                assert ran.returncode == 0, ran.stderr[-2000:]
                with contextlib.suppress(urllib.error.URLError):
                    seen = _asked(page, 'max_over_time(weft_calls_total{operation="all_reduce"}[10m])')
                    rates = _asked(page, "max_over_time(rate(weft_bytes_total[2s])[10m:1s])")
            assert sorted(row["metric"]["rank"] for row in seen) == ["0", "1"]
            assert all(float(row["value"][1]) > 0 for row in seen)
            assert any(float(row["value"][1]) > 0 for row in rates)
            below = "histogram_quantile(0.99, max_over_time(weft_call_seconds_bucket[10m]))"
            assert any(0 < float(row["value"][1]) < 60 for row in _asked(page, below))
        finally:
            prometheus.terminate()
