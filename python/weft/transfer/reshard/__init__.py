# SPDX-License-Identifier: Apache-2.0
"""Any sharding to any sharding: which bytes go where when two sides have different layouts of weights or caches.

    src = layout_of(model.state_dict())                       # trainers: DTensors
    dst = layout_by_rules(tensors, {"ep": 2, "tp": 2}, rules)   # servers
    made = plan(src, dst)
    verify(made)                                              # every byte once, from who holds it

Names of it stand in ``weft.transfer``. ``docs/resharding.md`` has the whole of it.
"""

from __future__ import annotations

from weft.transfer.reshard.dtensors import layout_of
from weft.transfer.reshard.layout import Box, Layout, TensorMeta
from weft.transfer.reshard.plan import Links, Plan
from weft.transfer.reshard.planner import plan
from weft.transfer.reshard.push import Arrivals, Push, Update, WriteList, write_lists
from weft.transfer.reshard.rules import Rule, Split, layout_by_rules
from weft.transfer.reshard.verify import verify

__all__ = [
    "Arrivals",
    "Box",
    "Layout",
    "Links",
    "Plan",
    "Push",
    "Rule",
    "Split",
    "TensorMeta",
    "Update",
    "WriteList",
    "layout_by_rules",
    "layout_of",
    "plan",
    "verify",
    "write_lists",
]
