# SPDX-License-Identifier: Apache-2.0
"""Real processes that are killed or stopped in the middle of transfers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from victims import BYTES, PEER_DEAD_S, TIMEOUT_S, victim

from weft import _core
from weft.errors import Error, PeerLost
from weft.runtime.bootstrap import TorchGroup
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import Peer, Remote, TransferEngine, nics


class Scene:
    """An engine here, and any number of victims in processes of their own."""

    def __init__(self, provider: str) -> None:
        if all(nic.unusable_because for nic in nics(provider)):
            pytest.skip(f"{provider} is unusable here")
        self.provider = provider
        self.engine = TransferEngine(
            provider, name="survivor", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
        )
        self.buffer = bytearray(BYTES)
        self.memory = self.engine.register(self.buffer, remote_read=True, remote_write=True)

    def start(self) -> tuple[multiprocessing.process.BaseProcess, Peer, Remote]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=victim, args=(self.provider, theirs), daemon=True)
        process.start()
        address, descriptor = ours.recv()
        ours.send((self.engine.address, self.memory.descriptor))
        peer = self.engine.connect(address)
        remote = self.engine.attach(descriptor)
        assert ours.recv() == "ready"
        return process, peer, remote


@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_survivor_names_the_victim_and_goes_on(provider: str, how: signal.Signals) -> None:
    scene = Scene(provider)
    process, peer, _ = scene.start()
    other, other_peer, other_remote = scene.start()
    try:
        scene.engine.imm(peer, 1).wait(3)
        waiting = scene.engine.recv(peer, scene.engine.register(bytearray(8)))
        counter = scene.engine.imm(peer, 2)
        assert process.pid is not None
        os.kill(process.pid, how)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="victim"):
            waiting.wait()
        assert time.monotonic() - began < TIMEOUT_S / 2
        with pytest.raises(PeerLost, match="victim"):
            counter.wait(1)
        assert not peer.is_alive
        assert peer.why
        seen = scene.engine.imm(other_peer, 1)
        seen.wait(seen.value + 3)
        scene.engine.write(scene.memory, other_remote, 4096).wait()
        again, _, third_remote = scene.start()  # a new process takes its place
        scene.engine.write(scene.memory, third_remote, 4096).wait()
        again.kill()
    finally:
        process.kill()
        other.kill()
        scene.engine.close()


def test_what_the_killed_leave_in_shared_memory_is_removed_and_never_in_the_way() -> None:
    scene = Scene("fabric:shm")
    folder = Path("/dev/shm")
    taken = folder / f"{os.getpid()}:{os.getuid()}:0"  # as libfabric alone would name the next region
    taken.touch()
    try:
        process, _, _ = scene.start()
        left = [path for path in folder.glob("weft-*") if f"-{process.pid}-" in path.name]
        assert left
        process.kill()
        process.join()
        TransferEngine("fabric:shm").close()
        assert not [path for path in left if path.exists()]
    finally:
        taken.unlink()
        scene.engine.close()


def report_who_closed(rank: Rank, provider: str) -> str:
    """Rank 2 ends badly; rank 0 notices and closes its engine; rank 1, which waits for rank 0 alone, is told why."""
    engine = TransferEngine(
        provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S, peer_dead_s=2 * TIMEOUT_S
    )
    addresses = TorchGroup(rank.group).all_gather(engine.address, TIMEOUT_S)
    peers = {other: engine.connect(addresses[other]) for other in range(rank.size) if other != rank.rank}
    engine.barrier(list(peers.values()), 1)
    rank.meet()
    if rank.rank == 2:
        os._exit(3)
    memory = engine.register(bytearray(8))
    with pytest.raises(PeerLost) as raised:
        engine.recv(peers[2 if rank.rank == 0 else 0], memory).wait()
    engine.close()
    return str(raised.value)


@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
def test_who_closes_because_of_a_death_names_the_dead(provider: str) -> None:
    if all(nic.unusable_because for nic in nics(provider)):
        pytest.skip(f"{provider} is unusable here")
    messages = run_ranks(3, report_who_closed, provider, lost={2}, deadline_s=60, with_gpus=False)
    assert "peer 'rank 2' is lost: its process (pid " in messages[0] and "exited with status 3" in messages[0]
    assert "peer 'rank 0' is lost: it closed its engine after it had lost peer 'rank 2': " in messages[1]
    assert "exited with status 3" in messages[1]


def look_at_process(rank: Rank, provider: str) -> tuple[str, float]:
    """Rank 1 dies when it has shown its engine's address, before the others connect."""
    engine = TransferEngine(
        provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S, peer_dead_s=2 * TIMEOUT_S
    )
    ranks = TorchGroup(rank.group)
    addresses = ranks.all_gather(engine.address, TIMEOUT_S)
    names = ranks.all_gather(_core.this_process_name(), TIMEOUT_S)
    rank.meet()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not _core.NamedProcess(names[1]).has_ended:
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        engine.connect(addresses[1])
    engine.close()
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
def test_who_connects_to_a_dead_engine_is_told_at_once(provider: str) -> None:
    if all(nic.unusable_because for nic in nics(provider)):
        pytest.skip(f"{provider} is unusable here")
    message, waited_s = run_ranks(2, look_at_process, provider, lost={1}, deadline_s=90, with_gpus=False)[0]
    assert "rank 1" in message and ("was killed by signal 9" in message or "Connection refused" in message)
    assert waited_s < TIMEOUT_S / 2


def use_memory_of_one_that_gave_up(rank: Rank, provider: str, call: str) -> str:
    """Rank 0 is stopped; rank 1 gives it up and closes its engine, and lives. Rank 0 goes on with rank 1's memory."""
    engine = TransferEngine(
        provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
    )
    own = engine.register(bytearray(BYTES), remote_read=True, remote_write=True)
    ranks = TorchGroup(rank.group)
    addresses = ranks.all_gather(pickle.dumps((engine.address, own.descriptor, os.getpid())), TIMEOUT_S)
    address, descriptor, pid = pickle.loads(addresses[1 - rank.rank])
    peer = engine.connect(address)
    remote = engine.attach(descriptor)
    rank.meet()
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank.rank == 1:
        with pytest.raises(PeerLost, match="no sign of life"):
            engine.recv(peer, own).wait()
        engine.close()
        os.kill(pid, signal.SIGCONT)
        return ""
    with pytest.raises(PeerLost) as raised:
        getattr(engine, call)(own, remote, 4096).wait()
    engine.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("provider", "call"), [("fabric:tcp", "read"), ("fabric:shm", "read"), ("fabric:shm", "write")]
)
def test_one_that_was_given_up_while_it_was_stopped_has_lost_its_peer(provider: str, call: str) -> None:
    if all(nic.unusable_because for nic in nics(provider)):
        pytest.skip(f"{provider} is unusable here")
    message = run_ranks(2, use_memory_of_one_that_gave_up, provider, call, deadline_s=90, with_gpus=False)[0]
    assert "peer 'rank 1' is lost: " in message, message


def read_what_came_of_one_that_gave_up(rank: Rank, provider: str) -> bool:
    """Rank 0 is stopped; rank 1 writes to it with an immediate, gives up, and uses its memory again, and lives.

    Return whether the immediate came, on rank 0: then the bytes must have come, too.
    """
    engine = TransferEngine(
        provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
    )
    buffer = bytearray(BYTES)
    own = engine.register(buffer, remote_write=True)
    ranks = TorchGroup(rank.group)
    addresses = ranks.all_gather(pickle.dumps((engine.address, own.descriptor, os.getpid())), TIMEOUT_S)
    address, descriptor, pid = pickle.loads(addresses[1 - rank.rank])
    peer = engine.connect(address)
    remote, counter = engine.attach(descriptor), engine.imm(peer, 1)
    rank.meet()
    sent = bytes(range(1, 256)) * (BYTES // 255)
    if rank.rank == 1:
        while "stopped" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.001)
        buffer[: len(sent)] = sent
        transfer = engine.write(own, remote, len(sent), imm=1)
        with contextlib.suppress(Error):  # it may be there, or never get there
            transfer.wait(0.5)
        engine.close()
        buffer[:] = bytes(BYTES)
        os.kill(pid, signal.SIGCONT)
        return False
    os.kill(os.getpid(), signal.SIGSTOP)
    came = True
    try:
        counter.wait(1)
    except PeerLost:
        came = False
    engine.close()
    assert not came or buffer[: len(sent)] == sent
    return came


@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
def test_an_immediate_of_one_that_gave_up_comes_with_its_bytes(provider: str) -> None:
    if all(nic.unusable_because for nic in nics(provider)):
        pytest.skip(f"{provider} is unusable here")
    came, _ = run_ranks(2, read_what_came_of_one_that_gave_up, provider, deadline_s=60, with_gpus=False)
    assert came or provider == "fabric:tcp"
