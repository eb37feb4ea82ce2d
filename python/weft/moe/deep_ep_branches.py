# SPDX-License-Identifier: Apache-2.0
"""``deep_ep.Buffer`` as the branches of DeepEP that clients ship construct it.

    Buffer = buffer_of(_core.config().deep_ep_branch)
    Buffer(group, nvl_bytes, rdma_bytes, True, 24, True, True, True, False, True)    # positions mean the branch's

The first five positions, and every keyword, mean the same in all branches. A later position means another argument in
another one, so WEFT_DEEP_EP_BRANCH says which is meant.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from weft.moe.buffer import Buffer

_OF_ALL = ("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank")
_WITH_FABRIC = (
    *(*_OF_ALL, "allow_nvlink_for_low_latency_mode", "allow_mnnvl", "use_fabric"),
    *("explicitly_destroy", "enable_shrink", "comm"),
)
ORDERS = {
    "antgroup-opt": _WITH_FABRIC,
    "mori-ep": _WITH_FABRIC,
    "rocm": _WITH_FABRIC,
    "hybrid-ep": (
        *(*_OF_ALL, "allow_nvlink_for_normal_mode", "allow_nvlink_for_low_latency_mode", "allow_mnnvl"),
        *("use_fabric", "explicitly_destroy", "comm"),
    ),
}


@functools.cache
def buffer_of(branch: str) -> type[Buffer]:
    """Return weft.Buffer with the positions of a branch; main's are its own."""
    if branch == "main":
        return Buffer
    own = inspect.signature(Buffer.__init__).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    others = [p.replace(kind=keyword) for name, p in own.items() if name not in ("self", *ORDERS[branch])]
    by_position = [own[name].replace(kind=own["group"].kind) for name in ORDERS[branch]]
    signature = inspect.Signature([*by_position, *others])

    def construct(self: Buffer, *args: Any, **kwargs: Any) -> None:
        Buffer.__init__(self, **signature.bind(*args, **kwargs).arguments)

    names = {"__init__": construct, "__doc__": Buffer.__doc__, "__module__": Buffer.__module__}
    of_branch = type("Buffer", (Buffer,), names)
    of_branch.__signature__ = signature  # type: ignore[attr-defined]
    return of_branch
