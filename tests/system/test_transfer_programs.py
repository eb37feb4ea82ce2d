# SPDX-License-Identifier: Apache-2.0
"""``weft bench transfer`` and the transfer examples as users start them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import PYTHON, ROOT, WEFT, environment, run_program

from weft.bench.report import check_document
from weft.transfer import nics

SECRET = {"WEFT_JOB_SECRET": "a secret of these tests"}
QUICK = ["--quick", "--rounds", "1", "--no-pin"]


def skip_unless_usable(provider: str) -> None:
    unusable = [nic.unusable_because for nic in nics(f"fabric:{provider}")]
    if all(unusable):
        pytest.skip(unusable[0])


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_bench_transfer_measures_checks_and_writes(provider: str, tmp_path: Path) -> None:
    skip_unless_usable(provider)
    files = ["--json", "out.json", "--plot", "out.png"]
    ran = run_program(
        [*WEFT, "bench", "transfer", "--local", "--provider", provider, *QUICK, *files], tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    calls = {row["call"] for row in document["rows"]}
    assert calls == {"write", "write_imm_latency", "write_rate", "paged_write", "read", "scatter"}
    assert all(row["checked"] and row["baselines"]["raw"] > 0 for row in document["rows"])
    assert (tmp_path / "out.png").is_file()


@contextmanager
def bench_server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server of the benchmark; yield it and its address."""
    skip_unless_usable("tcp")
    server = subprocess.Popen(
        [*WEFT, "bench", "transfer", "server", "--no-pin", "--host", "127.0.0.1"],
        cwd=folder,
        env={**environment(), **SECRET},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server, "127.0.0.1:" + server.stdout.readline().strip().rsplit(":", 1)[1]
    finally:
        server.kill()
        server.wait(30)


def test_bench_transfer_runs_as_server_and_client(tmp_path: Path) -> None:
    with bench_server(tmp_path) as (server, address):
        client = ["bench", "transfer", "client", address, "--calls", "write_rate", *QUICK]
        strange = run_program([*WEFT, *client], tmp_path, more={"WEFT_JOB_SECRET": "a secret of others"})
        assert strange.returncode == 1
        assert "secret: the one given differs" in strange.stderr
        ran = run_program([*WEFT, *client], tmp_path, more=SECRET)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert server.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "command: got nothing, allowed: server, client ADDRESS, or --local"),
        (["client"], "address: got nothing, allowed: HOST:PORT"),
        (["client", "127.0.0.1:http"], "address: got 127.0.0.1:http, allowed: HOST:PORT"),
        (["client", "127.0.0.1:1"], "no server answers at 127.0.0.1:1"),
        (["client", "no-such-host.invalid:99"], "no server answers at no-such-host.invalid:99"),
        (["--local", "--provider", "pigeon"], "provider: got pigeon, allowed: auto, fabric:efa"),
        (["--local", "--nics", "eth99"], "nics: got eth99, allowed with fabric:tcp:"),
        (["--local", "--calls", "wriet"], "--calls: got wriet, allowed: write_imm_latency, write_rate"),
        (["--local", "--rounds", "0"], "--rounds: got 0, allowed: 1 or more"),
    ],
)
def test_bench_transfer_names_mistakes_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    skip_unless_usable("tcp")
    ran = run_program([*WEFT, "bench", "transfer", *arguments], tmp_path)
    assert ran.returncode == 1
    assert says in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr


def test_bench_transfer_says_when_the_library_is_missing(tmp_path: Path) -> None:
    missing = {"WEFT_LIBFABRIC": "/nowhere/libfabric.so"}
    ran = run_program([*WEFT, "bench", "transfer", "--local"], tmp_path, more=missing)
    assert ran.returncode == 1
    assert "/nowhere/libfabric.so: cannot open shared object file" in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr


@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_bench_transfer_client_survives_a_killed_server(after_s: float, tmp_path: Path) -> None:
    with bench_server(tmp_path) as (server, address):
        client = subprocess.Popen(
            [*WEFT, "bench", "transfer", "client", address, "--calls", "write", "--rounds", "1000"],
            cwd=tmp_path,
            env={**environment(), **SECRET},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline().startswith("fabric:tcp, 1 rails: ")  # the client is there
        time.sleep(after_s)  # whatever the two are at by then
    _, said = client.communicate(timeout=60)
    assert client.returncode == 1
    # The engine's words, the raw loop's, or the control connection's: whichever was under way.
    losses = (
        "peer 'server' is lost",
        "no answer of peer 'server'",
        "the other side is lost",
        "the other side closed its connection",
    )
    assert any(loss in said for loss in losses), said
    assert said.strip().count("\n") == 0, said


@pytest.mark.parametrize("provider", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("example", "sizes"),
    [
        ("transfer_kv_cache.py", ["--layers", "3", "--tokens", "256"]),
        ("transfer_weight_broadcast.py", ["--workers", "2", "--megabytes", "4", "--updates", "2"]),
    ],
)
def test_examples_verify_what_they_move(
    example: str, sizes: list[str], provider: str, tmp_path: Path
) -> None:
    skip_unless_usable(provider)
    command = [*PYTHON, str(ROOT / "examples" / example), "--provider", provider, *sizes]
    ran = run_program(command, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verified" in ran.stdout
