# SPDX-License-Identifier: Apache-2.0
"""A rank of two with every kind of object, which forks children of every kind between its calls. For torchrun."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from expert_calls import MODES, Calls
from forked import WAYS, check_refused, fork

import weft
import weft.collectives.torch_backend
from weft.collectives.calls import Collectives
from weft.runtime.bootstrap import TorchGroup

TOKENS, HIDDEN, EXPERTS, TOP_K = 6, 64, 4, 2
TIMEOUT_S = 60.0


class Held:
    """Every kind of object that a rank may have, with the right results of each."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.bootstrap = TorchGroup(dist.group.WORLD)
        self.comm = weft.Communicator(self.bootstrap, device="cpu", timeout_s=TIMEOUT_S)
        self.window = weft.Window(self.comm, 4096)
        self.modes = {mode: Calls(mode, self.comm.bootstrap, rank, ranks, TIMEOUT_S) for mode in MODES}
        self.hybrid = weft.HybridEPBuffer(dist.group.WORLD, HIDDEN, TOKENS, EXPERTS // ranks)
        self.a2a = weft.P2PAllToAll(
            dist.group.WORLD,
            max_num_tokens=TOKENS,
            num_experts=EXPERTS,
            hidden_dim=HIDDEN,
            num_experts_per_token=TOP_K,
            device="cpu",
        )
        self.ids = torch.tensor([[rank, 2], [1, 3], [0, 1], [2, 3], [3, 0], [1, 2]])
        self.weights = torch.full((TOKENS, TOP_K), 0.5)
        self.x = torch.full((TOKENS, HIDDEN), 1.0 + rank).bfloat16()
        self.exchange: Any = None
        self.received: Any = None
        self.work: Any = None

    def use(self) -> None:
        """Call everything, and check what comes. Leaves exchanges half done, for the children."""
        ones = torch.full((5,), float(self.rank + 1))
        assert self.comm.all_reduce(ones).tolist() == [3.0] * 5
        dist.all_reduce(given := torch.full((5,), float(self.rank + 1)))
        assert given.tolist() == [3.0] * 5
        self.comm.barrier()
        if self.exchange is not None:
            rows = self.a2a.dispatch_recv(self.exchange)
            self.a2a.combine_send(rows.x, self.exchange)
            back = self.a2a.combine_recv(self.exchange)
            assert torch.equal(back.float(), self.x.float()), back
            for calls in self.modes.values():
                calls.combine()
            assert torch.equal(self.received.view(-1), self.received_before)
        self.exchange = self.a2a.dispatch_send(self.x, self.ids, self.weights)
        for calls in self.modes.values():
            calls.dispatch()
        self.received = self.window.tensor(self.rank, (16,), torch.int64)
        self.received_before = self.received.clone()
        self.work = dist.all_reduce(torch.ones(3), async_op=True)
        self.work.wait()

    def calls(self) -> dict[str, Any]:
        ones = torch.ones(4)
        routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
        probs = torch.zeros(TOKENS, EXPERTS)
        found = {
            "Communicator.all_reduce": lambda: self.comm.all_reduce(ones),
            "Communicator.send": lambda: self.comm.send(ones, 1 - self.rank),
            "Communicator.barrier": self.comm.barrier,
            "Communicator(comm)": lambda: weft.Communicator(self.comm),
            "Communicator(bootstrap)": lambda: weft.Communicator(self.bootstrap),
            "Communicator(group)": lambda: weft.Communicator(dist.group.WORLD),
            "Communicator()": weft.Communicator,
            "Collectives": lambda: Collectives(self.comm.core, TIMEOUT_S).all_reduce(ones),
            "bootstrap.all_gather": lambda: self.bootstrap.all_gather(b"", 1.0),
            "Window": lambda: weft.Window(self.comm, 4096),
            "Window.tensor": lambda: self.window.tensor(0, (4,), torch.int64),
            "Window.grow": lambda: self.window.grow(1 << 20),
            "P2PAllToAll.send": lambda: self.a2a.dispatch_send(self.x, self.ids, self.weights),
            "P2PAllToAll.recv": lambda: self.a2a.dispatch_recv(self.exchange),
            "P2PAllToAll.destroy": self.a2a.destroy,
            "HybridEPBuffer": lambda: self.hybrid.dispatch_with_permute(
                hidden=self.x, routing_map=routing_map, probs=probs, num_of_experts_per_rank=2
            ),
            "dist.new_group": lambda: dist.new_group([0, 1], backend="weft"),
            "dist.all_reduce": lambda: dist.all_reduce(ones),
            "dist.all_reduce, beside": lambda: dist.all_reduce(ones, async_op=True),
            "dist.broadcast": lambda: dist.broadcast(ones, 0),
            "dist.barrier": dist.barrier,
            "dist.send": lambda: dist.send(ones, 1 - self.rank),
            "dist.recv": lambda: dist.recv(ones),
            "dist.irecv": lambda: dist.irecv(ones, self.rank),
            "dist.monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(),
            "work.wait": self.work.wait,
        }
        for mode, calls in self.modes.items():
            found[f"{mode} dispatch"] = calls.dispatch
            found[f"{mode} combine"] = calls.combine
        return found


def main() -> None:
    dist.init_process_group("weft")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = {"all": Held(rank, ranks)}
    held["all"].use()
    for way in WAYS:
        said = fork(way, lambda: held["all"].calls(), held.clear)
        if way == "calls":
            check_refused(said)
        held["all"].use()
    # A child writes into what its parent's peers see; it has a copy. And it has ranks of its own.
    fork("calls", lambda: {"write": lambda: held["all"].received.fill_(7)}, held.clear)
    held["all"].use()
    said = fork("calls", lambda: {"own": _by_itself}, held.clear)
    assert said == {"own": ""}, said
    assert (dist.get_rank(), held["all"].comm.rank) == (rank, rank)
    held["all"].use()
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


def _by_itself() -> None:
    """Be the only rank of a communicator that a child makes."""
    from weft.runtime.bootstrap import SingleRank

    comm = weft.Communicator(SingleRank(), device="cpu")
    assert comm.all_reduce(torch.full((3,), 100.0)).tolist() == [100.0] * 3
    assert comm.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]]


if __name__ == "__main__":
    sys.exit(main())
