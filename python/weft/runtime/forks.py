# SPDX-License-Identifier: Apache-2.0
"""Keeps a forked child from using its parent's objects.

    claim("group", bootstrap)      # this process uses it; in a child that is forked later, the same line raises

A child has a copy of every object, but ranks, threads and connections are its parent's. Objects of the core refuse a
child by themselves (src/base/owner_process.h). Objects of others, such as a torch process group or the program's own
bootstrap, belong to the process that was the first to use them here. Threads: any.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

from weft import _core

# By id(): what is claimed need not be hashable.
_claims: dict[int, tuple[weakref.ref[Any], Any]] = {}


def claim(argument: str, thing: Any) -> None:
    """Note that this process uses ``thing``.

    Raises: weft.Error that names ``argument`` where this process was forked from the one that uses it.
    """
    known = _claims.get(id(thing))
    if known is not None and known[0]() is thing:
        known[1].check(argument)
        return
    key = id(thing)
    try:
        _claims[key] = (weakref.ref(thing, lambda _: _claims.pop(key, None)), _core.OwnerProcess())
    except TypeError:  # nothing can be noted of it
        return


def _claim_torch_groups() -> None:
    """Before a fork: torch's process groups meet in stores whose connections a child shares with this process."""
    torch_groups = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    for group in list(getattr(torch_groups, "pg_map", ())):
        if id(group) not in _claims:
            claim("group", group)


os.register_at_fork(before=_claim_torch_groups)

__all__ = ["claim"]
