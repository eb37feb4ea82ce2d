# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other before any window exists.

    comm = weft.Communicator(group)      # a torch process group, gloo or nccl
    comm = weft.Communicator()           # torch's default group, or the launcher's variables
    comm = weft.Communicator(TcpAddress("10.0.0.1:29600", rank, size, secret=b"..."))
    comm = weft.Communicator(MPI.COMM_WORLD)

Each way is a class with ``rank``, ``size`` and the collective ``all_gather(data, timeout_s)``, which moves a
few hundred bytes; anything else with those three serves too. Every wait ends at its deadline with
``PeerLost``, which names the ranks that stayed away. Threads: one call at a time per object.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from weft import _core
from weft.errors import Error, PeerLost, invalid
from weft.runtime.bootstrap_secret import launcher_secret, settle_job_secret
from weft.runtime.forks import claim
from weft.runtime.roll_call import Gathering, RollCall, lost_message

__all__ = ["Bootstrap", "Environment", "Mpi", "SingleRank", "TcpAddress", "TorchGroup", "find_bootstrap"]


@runtime_checkable
class Bootstrap(Protocol):
    """What a Communicator needs to find its ranks."""

    @property
    def rank(self) -> int:
        """This process among ``size``."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give ``data`` to every rank; return everyone's in rank order. Collective.

        Raises: PeerLost after ``timeout_s`` seconds, naming the ranks that stayed away.
        """


def find_bootstrap(group: Any = None) -> Bootstrap:
    """Return the bootstrap that ``group`` stands for.

    Args:
        group: a Bootstrap; a torch process group; an mpi4py communicator; or None, which takes torch's
            default group if there is one, else what the launcher (torchrun, mpirun, srun) has set, else a
            single rank.
    Raises: Error for anything else, for what another process uses from which this one was forked, and where ranks are
        to agree on a secret (``WEFT_JOB_SECRET=auto``) and cannot.
    """
    found = _bootstrap_of(group)
    if found.size > 1:
        settle_job_secret()
    return found


def _bootstrap_of(group: Any) -> Bootstrap:
    if group is None:
        return _default_bootstrap()
    claim("group", group)
    if hasattr(group, "all_gather") and isinstance(getattr(group, "size", None), int):
        return group  # type: ignore[no-any-return]
    if hasattr(group, "Get_rank") and hasattr(group, "Get_size"):
        return Mpi(group)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(group, distributed.ProcessGroup):
        return TorchGroup(group)
    raise invalid("group", repr(group), "a torch process group, an mpi4py communicator or a Bootstrap")


def _default_bootstrap() -> Bootstrap:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchGroup(None)
    if find_launcher(os.environ) is not None:
        return Environment()
    return SingleRank()


def _torch_distributed() -> Any:
    """Return the module, which only those need who use it; untyped, since its exports are."""
    return importlib.import_module("torch.distributed")


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Return ``[data]``."""
        return [data]


@dataclass
class _OnGroup:
    """What is kept of a process group.

    made: bootstraps so far; equal on all its ranks, so it keeps their keys apart.
    roll: which processes its ranks are.
    """

    roll: RollCall
    made: int = 0


_on_groups: weakref.WeakKeyDictionary[Any, _OnGroup] = weakref.WeakKeyDictionary()


class TorchGroup:
    """The ranks of a ``torch.distributed`` process group; None is the default group.

    Uses the group's key-value store, not its collectives: so it works alike for every backend, launches
    nothing on a device, and the deadline is Weft's own.
    """

    def __init__(self, group: Any = None) -> None:
        distributed = _torch_distributed()
        if not distributed.is_initialized():
            raise Error("group: torch.distributed is not initialised; call init_process_group first")
        self._group = distributed.group.WORLD if group is None else group
        for used in (self._group, distributed.group.WORLD):  # whose store a group of its ranks has
            claim("group", used)
        self.rank: int = distributed.get_rank(self._group)
        self.size: int = distributed.get_world_size(self._group)
        if self.rank < 0:
            raise invalid("group", "a group without this rank", "a group that this rank belongs to")
        self._ranks = self._meet_in_store()

    def _meet_in_store(self) -> Gathering | None:
        distributed = _torch_distributed()
        # Not public, but the same since torch 2.1; without it the group's own all_gather_object has to do.
        store_of = getattr(distributed.distributed_c10d, "_get_process_group_store", None)
        if store_of is None:
            return None
        store = store_of(self._group)
        known = _on_groups.get(self._group)
        if known is None:
            known = _on_groups[self._group] = _OnGroup(
                RollCall(distributed.PrefixStore("weft", store), self.rank)
            )
        prefix = f"weft/{known.made}"
        known.made += 1
        return Gathering(distributed.PrefixStore(prefix, store), known.roll, self.rank, self.size)

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        claim("bootstrap", self)
        if self._ranks is not None:
            return self._ranks.all_gather(data, timeout_s)
        everyone: list[Any] = [None] * self.size
        _torch_distributed().all_gather_object(everyone, data, group=self._group)
        return everyone


# Launcher -> its variables for rank and number of ranks.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}


def find_launcher(variables: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return (launcher, rank, size) from its variables, or None where no launcher has set any."""
    for launcher, names in LAUNCHERS.items():
        given = [variables[name] for name in names if name in variables]
        if len(given) < len(names):
            continue
        if not all(value.isdigit() for value in given) or int(given[0]) >= int(given[1]):
            raise invalid(" and ".join(names), " and ".join(given), "whole numbers with 0 <= rank < size")
        return launcher, int(given[0]), int(given[1])
    return None


class Environment:
    """The ranks that a launcher started, without ``torch.distributed``: torchrun, mpirun or srun.

    The launcher's variables give rank and size; MASTER_ADDR and MASTER_PORT say where rank 0 is, and where they are
    not set under Slurm, its list of nodes and the job's number do. Under torchrun, whose agent holds that port, ranks
    meet in the agent's store; else rank 0 listens on MASTER_PORT + 1, so that a later ``init_process_group`` finds
    MASTER_PORT free.

    Args:
        variables: what to read instead of the process' environment.
    """

    _made = 0  # in this process; equal on all ranks, so it keeps their keys apart

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(os.environ if variables is None else variables)
        found = find_launcher(self._variables)
        if found is None:
            raise Error(f"group: no launcher has set rank and size (known: {', '.join(LAUNCHERS)})")
        _, self.rank, self.size = found
        self._number = Environment._made
        Environment._made += 1
        if self.size > 1:
            self._host, self._port = _master(self._variables)
        self._ranks: Bootstrap | None = None

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        claim("bootstrap", self)
        until = time.monotonic() + timeout_s
        if self._ranks is None:
            self._ranks = self._connect(timeout_s)
        return self._ranks.all_gather(data, until - time.monotonic())

    def _connect(self, timeout_s: float) -> Bootstrap:
        if self.size == 1:
            return SingleRank()
        claim("group", Environment)  # of all objects of this class: this process is the rank
        if self._variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            secret = launcher_secret(self._variables)
            return TcpAddress(f"{self._host}:{self._port + 1}", self.rank, self.size, secret)
        distributed = _torch_distributed()
        limit = timedelta(seconds=timeout_s)
        store = distributed.TCPStore(self._host, self._port, self.size, is_master=False, timeout=limit)
        prefix = f"weft/{self._variables.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self._number}"
        store = distributed.PrefixStore(prefix, store)
        return Gathering(store, RollCall(store, self.rank), self.rank, self.size)


_SLURM_PORTS = range(20000, 30000)


def _master(variables: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port of rank 0 that the launcher, or the user, has set."""
    variables = {**_slurm_master(variables), **variables}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        hint = "; or give mpi4py's MPI.COMM_WORLD" if "OMPI_COMM_WORLD_RANK" in variables else ""
        raise Error(f"{' and '.join(missing)}: not set, allowed: the address and port of rank 0{hint}")
    port = variables["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 65535:
        raise invalid("MASTER_PORT", f"'{port}'", "1 to 65534")
    return variables["MASTER_ADDR"], int(port)


def _slurm_master(variables: Mapping[str, str]) -> dict[str, str]:
    """Return where ranks of a Slurm step meet, from its list of nodes and its number; nothing under other launchers."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    job = variables.get("SLURM_JOB_ID", "")
    launcher = find_launcher(variables)
    if not nodes or not job.isdigit() or launcher is None or launcher[0] != "Slurm":
        return {}
    step = variables.get("SLURM_STEP_ID", "0")
    number = 100 * int(job) + (int(step) if step.isdigit() else 0)
    # MASTER_PORT + 1 is used, too.
    port = _SLURM_PORTS[2 * number % len(_SLURM_PORTS)]
    return {"MASTER_ADDR": first_host(nodes), "MASTER_PORT": str(port)}


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of hosts: node03 of "node[03-17,21],other7"."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


class TcpAddress:
    """``size`` ranks that meet at ``address``, "host:port" of the machine that rank 0 runs on.

    Args:
        address: where rank 0 listens, reachable from every rank; IPv6 hosts in brackets.
        rank, size: this process, and how many there are.
        secret: the same bytes on every rank; None takes ``WEFT_JOB_SECRET``. Empty, or None without that setting,
            trusts whoever can reach the address.
    Both ends prove that they know the secret; it is never sent. What they say is encrypted with ``WEFT_TLS=1``.
    Connects at the first all_gather. Ranks may start in any order: whoever finds nobody listening tries again until
    the deadline, as rank 0 may only be starting. After an error it is closed. Raises: Error with the argument's name.
    """

    def __init__(self, address: str, rank: int, size: int, secret: bytes | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise invalid("address", f"'{address}'", "host:port with a port from 1 to 65535")
        if size < 1 or not 0 <= rank < size:
            raise invalid("rank and size", f"{rank} and {size}", "0 <= rank < size")
        self.rank, self.size = rank, size
        if secret is None:
            settle_job_secret()
            secret = _core.config().job_secret.encode()
        self._core = _core.bootstrap_at(host.strip("[]"), int(port), rank, size, secret)

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        everyone: list[bytes] = self._core.all_gather(data, timeout_s)
        return everyone

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._core.close()


class Mpi:
    """The ranks of an mpi4py communicator.

    Messages carry a tag of their own, so the communicator stays free for the program's other messages.
    """

    _TAG = 0x5EF7

    def __init__(self, communicator: Any) -> None:
        self._mpi = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        claim("bootstrap", self)
        until = time.monotonic() + timeout_s
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sending = {peer: self._mpi.isend(data, dest=peer, tag=self._TAG) for peer in peers}
        received = {self.rank: data}
        while len(received) < self.size or sending:
            for peer in peers:
                if peer not in received and self._mpi.iprobe(source=peer, tag=self._TAG):
                    received[peer] = self._mpi.recv(source=peer, tag=self._TAG)
            sending = {peer: request for peer, request in sending.items() if not request.test()[0]}
            if time.monotonic() > until:
                missing = [peer for peer in peers if peer not in received] or list(sending)
                raise PeerLost(lost_message(self.rank, timeout_s, missing))
            time.sleep(0.0005)
        return [received[rank] for rank in range(self.size)]
