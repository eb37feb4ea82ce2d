# SPDX-License-Identifier: Apache-2.0
"""NCCL communicators of process groups. Weft makes none of its own: a handle wraps torch's."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import Error


class NCCLCommHandle:
    """A borrowed ncclComm_t; ``managed`` tells whether dropping the handle destroys it."""

    def __init__(self, nccl_comm: int, managed: bool = False) -> None:
        self.nccl_comm = nccl_comm
        self.managed = managed

    def get(self) -> int:
        """Return the ncclComm_t as an integer."""
        return self.nccl_comm


_handles: dict[Any, NCCLCommHandle] = {}
_num_ranks: dict[int, int] = {}


def get_nccl_comm_handle(group: Any, force_new_comm: bool = False) -> NCCLCommHandle:
    """Return the cached handle of torch's NCCL communicator of ``group``.

    Raises: weft.Error when the group has none (gloo, or no collective has run yet), or for force_new_comm.
    """
    if group not in _handles:
        backend: Any = group._get_backend(torch.device("cuda")) if torch.cuda.is_available() else None
        pointer = backend._comm_ptr() if hasattr(backend, "_comm_ptr") else 0
        if not pointer or force_new_comm:
            raise Error("group: got one without an NCCL communicator, allowed: one that has used NCCL")
        _handles[group] = NCCLCommHandle(pointer)
        _num_ranks[pointer] = group.size()
    return _handles[group]


def num_ranks_of(nccl_comm: int) -> int:
    """Return how many ranks a communicator has that get_nccl_comm_handle() gave. Raises: weft.Error for others."""
    if nccl_comm not in _num_ranks:
        raise Error(f"nccl_comm: got {nccl_comm!r}, allowed: what get_nccl_comm_handle(group).get() returned")
    return _num_ranks[nccl_comm]


def destroy_all_managed_nccl_comm() -> None:
    """Forget every handle."""
    _handles.clear()
    _num_ranks.clear()
