# SPDX-License-Identifier: Apache-2.0
"""Every way for ranks to find each other makes working communicators and names who is missing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PYTHON, run_program
from torch import distributed

import weft
from weft import _core
from weft.errors import Error, PeerLost
from weft.runtime.bootstrap import (
    LAUNCHERS,
    Environment,
    SingleRank,
    TcpAddress,
    TorchGroup,
    _master,
    find_bootstrap,
    find_launcher,
    first_host,
)
from weft.runtime.bootstrap_secret import launcher_secret
from weft.testing.ranks import Rank, run_ranks


def free_port() -> int:
    """Return a port whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)


def on_threads(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Run body(rank) on one thread per rank; return results, or the exceptions, in rank order."""
    results: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def check_windows(comm: weft.Communicator) -> None:
    """Every rank stores its number into every window at its own place; all must be there."""
    window = weft.Window(comm, 4 * comm.size)
    for peer in range(comm.size):
        window.tensor(peer, (1,), torch.int32, offset=4 * comm.rank).fill_(comm.rank + 1)
    comm.barrier()
    assert window.tensor(comm.rank, (comm.size,), torch.int32).tolist() == list(range(1, comm.size + 1))
    comm.barrier()


def gather_twice(bootstrap: Any, timeout_s: float = 20) -> None:
    for word in (b"", b"round two"):
        data = bytes([bootstrap.rank]) + word
        everyone = bootstrap.all_gather(data, timeout_s)
        assert everyone == [bytes([rank]) + word for rank in range(bootstrap.size)]


# ---- torch process groups ----


def _torch_group(rank: Rank) -> None:
    for _ in range(2):  # two communicators on one group do not mix up
        check_windows(weft.Communicator(rank.group))
    check_windows(weft.Communicator())  # the default group
    gather_twice(TorchGroup(rank.group))
    evens = distributed.new_group([0, 2])
    if rank.rank != 1:
        comm = weft.Communicator(evens)
        assert (comm.rank, comm.size) == (rank.rank // 2, 2)
        check_windows(comm)
    else:
        with pytest.raises(Error, match="group"):
            weft.Communicator(evens)


def test_torch_group() -> None:
    run_ranks(3, _torch_group)


def _late_rank(rank: Rank) -> str:
    if rank.rank == 1:
        return ""
    with pytest.raises(PeerLost) as caught:
        weft.Communicator(rank.group, timeout_s=0.5)
    return str(caught.value)


def test_torch_group_names_the_rank_that_stays_away() -> None:
    messages = run_ranks(3, _late_rank)
    assert "rank 0, bootstrap.all_gather, waited 0.5 s for rank 1" in messages[0]
    assert "rank 2, bootstrap.all_gather, waited 0.5 s for rank 1" in messages[2]


def test_without_torch_distributed_is_refused() -> None:
    with pytest.raises(Error, match="init_process_group"):
        TorchGroup(None)


# ---- a TCP address ----


def _tcp(rank: Rank, port: int) -> None:
    if rank.rank == 0:
        time.sleep(0.2)  # the others come before anybody listens
    bootstrap = TcpAddress(f"127.0.0.1:{port}", rank.rank, rank.size, secret=b"warp and weft")
    gather_twice(bootstrap)
    check_windows(weft.Communicator(bootstrap))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_tcp_address(ranks: int) -> None:
    run_ranks(ranks, _tcp, free_port(), with_group=False)


def test_tcp_wrong_secret_is_told_to_the_one_who_has_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    secrets = [b"right", b"right", b"wrong"]
    results = on_threads(
        3, lambda rank: TcpAddress(address, rank, 3, secrets[rank]).all_gather(b"", timeout_s=1.0)
    )
    assert "waited 1 s for rank 2" in str(results[0])
    assert isinstance(results[1], PeerLost) and "rank 2" in str(results[1])
    assert isinstance(results[2], Error) and "secret" in str(results[2])


@pytest.mark.parametrize("wrong", [b"", b"another job's"])
def test_tcp_rank_0_says_who_was_refused(wrong: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    secrets = [b"this job's", wrong]
    results = on_threads(
        2, lambda rank: TcpAddress(address, rank, 2, secrets[rank]).all_gather(b"", timeout_s=1.0)
    )
    assert "waited 1 s for rank 1" in str(results[0])
    assert "refused 1 without the secret, from 127.0.0.1" in str(results[0])
    assert isinstance(results[1], Error) and "secret: the one given differs" in str(results[1])
    refused = r"from 127.0.0.1:\d+ is refused: it does not know this job's secret"
    assert re.search(refused, capfd.readouterr().err)


def overhear(port: int, size: int) -> bytes:
    """Return what a rank with the secret says to a listener that is not rank 0, for a nonce of rank 0's."""
    with socket.create_server(("127.0.0.1", 0)) as false_0:
        address = f"127.0.0.1:{false_0.getsockname()[1]}"
        rank = threading.Thread(
            target=lambda: on_threads(
                1, lambda _: TcpAddress(address, 1, size, b"secret").all_gather(b"", 1.0)
            )
        )
        rank.start()
        connection, _ = false_0.accept()
        said = b""
        with connection, socket.create_connection(("127.0.0.1", port)) as real_0:
            for each in (connection, real_0):
                each.settimeout(10)
            while len(said) < OPENING + CLAIM:  # both ways, as they come
                said += connection.recv(OPENING + CLAIM - len(said))
                if len(said) == OPENING:
                    real_0.sendall(said)
                    connection.sendall(exactly(real_0, OPENING + CHALLENGE))
    rank.join()
    return said


OPENING, CHALLENGE, CLAIM = 16, 24, 64  # bytes: src/base/stream.h, src/bootstrap/listener.h


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more
        data += more
    return data


def test_tcp_a_handshake_that_was_overheard_lets_nobody_in() -> None:
    port = free_port()

    def body(rank: int) -> list[bytes]:
        if rank == 1:
            time.sleep(0.2)
            said = overhear(port, 2)
            with socket.create_connection(("127.0.0.1", port), 10) as again:
                again.sendall(said)
                exactly(again, OPENING + CHALLENGE)
                assert b"secret" in exactly(again, 16)
        return TcpAddress(f"127.0.0.1:{port}", rank, 2, b"secret").all_gather(b"%d" % rank, timeout_s=20)

    assert on_threads(2, body) == [[b"0", b"1"], [b"0", b"1"]]


def test_tcp_a_flood_of_silent_and_wrong_connections_keeps_nobody_out() -> None:
    port = free_port()
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            try:
                held.append(socket.create_connection(("127.0.0.1", port), 1))
            except OSError:
                continue
            if len(held) % 3 == 0:
                with contextlib.suppress(OSError):
                    held[-1].sendall(bytes(100))
            if len(held) > 400:
                held.pop(0).close()
        for each in held:
            each.close()

    def body(rank: int) -> list[bytes]:
        time.sleep(0.5 * rank)
        return TcpAddress(f"127.0.0.1:{port}", rank, 3, b"secret").all_gather(b"%d" % rank, timeout_s=25)

    stranger = threading.Thread(target=flood)
    stranger.start()
    try:
        assert on_threads(3, body) == [[b"0", b"1", b"2"]] * 3
    finally:
        over.set()
        stranger.join()


def test_tcp_listens_at_its_address_alone() -> None:
    port = free_port()

    def body(rank: int) -> list[bytes]:
        if rank == 1:
            time.sleep(0.3)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), 5)
        return TcpAddress(f"127.0.0.1:{port}", rank, 2).all_gather(b"", timeout_s=20)

    assert on_threads(2, body) == [[b"", b""]] * 2


def test_tcp_sizes_must_agree() -> None:
    address = f"127.0.0.1:{free_port()}"
    results = on_threads(2, lambda rank: TcpAddress(address, rank, 2 + rank).all_gather(b"", timeout_s=1.0))
    assert "size: got 2 on rank 0, 3 on rank 1" in str(results[1])


def test_tcp_ignores_strangers() -> None:
    port = free_port()

    def body(rank: int) -> list[bytes]:
        if rank == 1:
            time.sleep(0.3)
            for junk in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(junk)
        return TcpAddress(f"127.0.0.1:{port}", rank, 2).all_gather(b"%d" % rank, timeout_s=20)

    assert on_threads(2, body) == [[b"0", b"1"], [b"0", b"1"]]


def test_tcp_everybody_hears_who_is_missing() -> None:
    address = f"127.0.0.1:{free_port()}"

    def body(rank: int) -> Any:
        bootstrap = TcpAddress(address, rank, 3)
        bootstrap.all_gather(b"", timeout_s=10)
        if rank == 2:
            time.sleep(1.0)
            return None
        return bootstrap.all_gather(b"", timeout_s=0.3)

    results = on_threads(3, body)
    for rank in (0, 1):
        assert isinstance(results[rank], PeerLost) and "for rank 2" in str(results[rank])


def test_tcp_a_closed_connection_is_noticed_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()

    def body(rank: int) -> Any:
        bootstrap = TcpAddress(address, rank, 3)
        bootstrap.all_gather(b"", timeout_s=10)
        if rank == 2:
            bootstrap.close()
            return None
        return bootstrap.all_gather(b"", timeout_s=25)

    results = on_threads(3, body)
    assert time.monotonic() - start < 10
    for rank in (0, 1):
        assert isinstance(results[rank], PeerLost) and "rank 2 (which has left)" in str(results[rank])


def test_tcp_nobody_listening_names_rank_0() -> None:
    with pytest.raises(
        PeerLost, match=r"rank 1, bootstrap\.all_gather, waited 0.2 s for rank 0 at 127.0.0.1"
    ):
        TcpAddress(f"127.0.0.1:{free_port()}", 1, 2).all_gather(b"", timeout_s=0.2)


def test_tcp_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Error, match=f"cannot listen at 127.0.0.1:{port}"):
            TcpAddress(f"127.0.0.1:{port}", 0, 2).all_gather(b"", timeout_s=1)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:port"])
def test_tcp_bad_address(address: str) -> None:
    with pytest.raises(Error, match="address: got"):
        TcpAddress(address, 0, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_tcp_bad_rank(rank: int, size: int) -> None:
    with pytest.raises(Error, match="rank and size: got"):
        TcpAddress("localhost:1", rank, size)


def test_tcp_is_closed_after_a_failure() -> None:
    bootstrap = TcpAddress(f"127.0.0.1:{free_port()}", 1, 2)
    with pytest.raises(PeerLost):
        bootstrap.all_gather(b"", timeout_s=0.1)
    with pytest.raises(Error, match="closed"):
        bootstrap.all_gather(b"", timeout_s=0.1)


# ---- launchers ----


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ("torchrun", 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ("Open MPI", 0, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, ("MPICH", 2, 3)),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, ("Slurm", 7, 8)),
    ],
)
def test_find_launcher(variables: dict[str, str], expected: object) -> None:
    assert find_launcher(variables) == expected


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("x", "4"), ("-1", "4"), ("0", "")])
def test_launcher_with_nonsense_is_refused(rank: str, size: str) -> None:
    with pytest.raises(Error, match="RANK and WORLD_SIZE: got"):
        find_launcher({"RANK": rank, "WORLD_SIZE": size})


def _environment(rank: Rank, port: int) -> None:
    variables = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for _ in range(2):
        check_windows(weft.Communicator(Environment(variables)))
    os.environ.update(variables)
    check_windows(weft.Communicator())


def test_environment_without_an_agent() -> None:
    run_ranks(3, _environment, free_port(), with_group=False)


def _agent(rank: Rank, port: int) -> None:
    variables = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    for _ in range(2):
        check_windows(weft.Communicator(Environment(variables)))


def test_environment_meets_in_torchruns_store() -> None:
    agent = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    run_ranks(2, _agent, agent.port, with_group=False)


def test_environment_names_what_is_not_set() -> None:
    with pytest.raises(Error, match="MASTER_ADDR and MASTER_PORT: not set"):
        Environment({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(Error, match="MASTER_PORT: got 'x'"):
        Environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"})
    with pytest.raises(Error, match="no launcher"):
        Environment({})


def test_one_rank_needs_no_address() -> None:
    check_windows(weft.Communicator(Environment({"RANK": "0", "WORLD_SIZE": "1"})))
    check_windows(weft.Communicator(SingleRank()))


# ---- the job's secret ----

OPEN_MPI = {"OMPI_MCA_orte_precondition_transports": "0123456789abcdef-0123456789abcdef"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "3f2b8a52-6b41-4a3c-9d6e-0f4a1c2b3d4e"}


@pytest.mark.parametrize(
    ("variables", "secret"),
    [
        ({}, None),
        (OPEN_MPI, b"0123456789abcdef-0123456789abcdef"),
        (TORCHRUN, b"3f2b8a52-6b41-4a3c-9d6e-0f4a1c2b3d4e"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "4711", "PMI_RANK": "0"}, None),
    ],
)
def test_launchers_secret(variables: dict[str, str], secret: bytes | None) -> None:
    assert launcher_secret(variables) == secret


def _with_secret(rank: Rank, port: int, names: tuple[str, str], more: dict[str, str]) -> None:
    variables = {
        names[0]: str(rank.rank),
        names[1]: str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }
    check_windows(weft.Communicator(Environment(variables)))


@pytest.mark.parametrize("names", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_ranks_of_every_launcher_meet(names: tuple[str, str]) -> None:
    more = OPEN_MPI if "OMPI" in names[0] else TORCHRUN if names[0] == "RANK" else {}
    run_ranks(2, _with_secret, free_port(), names, more, with_group=False)


def _own_secret(rank: Rank) -> str:
    return str(_core.config().job_secret)


AGREES = """
import hashlib, sys
import weft
from weft import _core
from weft.transfer import TransferEngine
if len(sys.argv) > 1:
    from torch import distributed
    distributed.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
comm = weft.Communicator()
secret = _core.config().job_secret
TransferEngine("loopback").close()
assert not _core.awaits_job_secret() and _core.config().job_secret == secret
sys.stdout.write(f"{len(secret)} {hashlib.sha256(secret.encode()).hexdigest()}\\n")
"""


def test_ranks_of_torchrun_agree_on_a_secret(tmp_path: Path) -> None:
    (tmp_path / "agrees.py").write_text(AGREES)
    launch = [*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "this-is-no-secret"]
    ran = run_program([*launch, "agrees.py"], tmp_path, more={"WEFT_JOB_SECRET": "auto"})
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.split("\n")[:-1]
    assert len(said) == 2 and len(set(said)) == 1 and said[0].startswith("64 "), ran.stdout


def test_ranks_of_a_process_group_agree_on_a_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        where = f"tcp://127.0.0.1:{free_port()}"
        commands = [[*PYTHON, "-c", AGREES, where, str(rank)] for rank in range(2)]
        more = {"WEFT_JOB_SECRET": "auto"}
        ran = list(pool.map(lambda command: run_program(command, tmp_path, more=more), commands))
    assert all(one.returncode == 0 for one in ran), [one.stderr for one in ran]
    assert ran[0].stdout == ran[1].stdout and ran[0].stdout.startswith("64 ")


@pytest.mark.parametrize(
    "making",
    [
        "from weft.transfer import TransferEngine; TransferEngine('loopback')",
        "from weft.runtime.bootstrap import TcpAddress; TcpAddress('127.0.0.1:1', 0, 2)",
    ],
)
def test_auto_without_anything_to_agree_over_is_refused(making: str, tmp_path: Path) -> None:
    ran = run_program([*PYTHON, "-c", making], tmp_path, more={"WEFT_JOB_SECRET": "auto"})
    assert "weft.errors.Error: WEFT_JOB_SECRET: got auto, but nothing is there" in ran.stderr


def test_our_launcher_makes_up_a_secret_for_each_job() -> None:
    first = run_ranks(2, _own_secret, with_group=False)
    second = run_ranks(2, _own_secret, with_group=False)
    assert len(first[0]) == 64 and first[0] == first[1]
    assert second[0] == second[1] != first[0]
    assert _core.config().job_secret == ""


SHOWS = """
import weft
from weft import _core
print(_core.config_table())
print(_core.config().job_secret == "a secret of sixteen or more")
"""


def test_the_setting_is_taken_and_never_shown() -> None:
    def run(secret: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "WEFT_JOB_SECRET": secret}
        return subprocess.run(
            [sys.executable, "-c", SHOWS], capture_output=True, text=True, env=env, check=False
        )

    right = run("a secret of sixteen or more")
    assert "True" in right.stdout and "sixteen" not in right.stdout.replace("True", ""), right
    short = run("tiny-one")
    assert (
        "WEFT_JOB_SECRET: got 8 characters" in short.stderr and "tiny-one" not in short.stdout + short.stderr
    )


# ---- MPI ----

# Without torch, which takes seconds to import on each rank.
MPI_PROGRAM = """
import ctypes, weft
from mpi4py import MPI
from weft.runtime.bootstrap import Mpi
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
bootstrap = Mpi(MPI.COMM_WORLD)
for word in (b"", b"round two"):
    assert bootstrap.all_gather(b"%d" % rank + word, 20) == [b"%d" % r + word for r in range(size)]
comm = weft.Communicator(MPI.COMM_WORLD)
window = weft.Window(comm, size)
for peer in range(size):
    ctypes.memset(window.address(peer) + rank, rank + 1, 1)
comm.barrier()
assert ctypes.string_at(window.address(rank), size) == bytes(range(1, size + 1))
comm.barrier()
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Barrier()
else:
    try:
        weft.Communicator(MPI.COMM_WORLD, timeout_s=0.3)
    except weft.PeerLost as error:
        assert "for rank 1" in str(error), error
    else:
        raise AssertionError("rank 1 never came")
    MPI.COMM_WORLD.Barrier()
"""


def test_mpi4py(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs mpirun")
    program = tmp_path / "program.py"
    program.write_text(MPI_PROGRAM)
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what users pass ----


def test_anything_else_is_refused() -> None:
    for group in (3, "localhost:1", object()):
        with pytest.raises(Error, match="group: got"):
            find_bootstrap(group)


def test_python_objects_serve_as_bootstraps() -> None:
    bootstraps = _core.thread_bootstraps(3)

    class Mine:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 3

        def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
            answer: list[bytes] = bootstraps[self.rank].all_gather(data, timeout_s)
            return answer

    assert on_threads(3, lambda rank: check_windows(weft.Communicator(Mine(rank)))) == [None] * 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [(["text", "text"], "list of bytes"), ([b""], "answers, allowed: 2"), (None, "TypeError")],
)
def test_a_broken_bootstrap_is_an_error(answer: Any, message: str) -> None:
    class Broken:
        rank, size = 0, 2

        def all_gather(self, data: bytes, timeout_s: float) -> Any:
            return answer

    with pytest.raises(Error, match=message):
        weft.Communicator(Broken())


def test_an_exception_in_a_bootstrap_is_told() -> None:
    class Failing:
        rank, size = 0, 2

        def all_gather(self, data: bytes, timeout_s: float) -> Any:
            raise OSError("the cable is cut")

    with pytest.raises(Error, match="OSError: the cable is cut") as caught:
        weft.Communicator(Failing())
    assert caught.value.code == "system"


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cpu:1", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(Error, match="device: got"):
        weft.Communicator(SingleRank(), device=device)


def test_the_device_comes_from_a_tensor() -> None:
    assert weft.Communicator(SingleRank(), device=torch.zeros(1)).device == "cpu"
    assert weft.Communicator(SingleRank(), device=torch.device("cpu")).device == "cpu"


def test_transports_are_chosen_when_the_communicator_is_made() -> None:
    bootstraps = _core.thread_bootstraps(2)
    comms = on_threads(2, lambda rank: weft.Communicator(bootstraps[rank], transport="mapped"))
    assert [comms[0].transport_to(1), comms[0].transport_to(0)] == ["mapped", None]
    with pytest.raises(Error, match="transport: got 'pigeons', allowed: auto, mapped"):
        weft.Communicator(SingleRank(), transport="pigeons")


def test_bad_timeout_is_refused() -> None:
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(Error, match="timeout_s"):
            weft.Communicator(SingleRank(), timeout_s=timeout_s)


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[03-17,21],other7", "node03"),
        ("node1,node2", "node1"),
        ("gpu[7]-ib", "gpu7-ib"),
        ("one", "one"),
        ("rack2-[010,012]", "rack2-010"),
    ],
)
def test_ranks_of_a_slurm_step_meet_on_its_first_node(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
    own = _master(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert own[0] == first and own == _master(SLURM | {"SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": "3"})
    assert own[1] != _master(SLURM | {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": "1"})[1]
    given = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert _master(SLURM | {"SLURM_STEP_NODELIST": nodes} | given) == ("head", 1234)


def test_open_mpi_without_an_address_is_told_of_mpi4py() -> None:
    with pytest.raises(Error, match=r"MASTER_ADDR and MASTER_PORT: not set.*MPI\.COMM_WORLD"):
        Environment({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
