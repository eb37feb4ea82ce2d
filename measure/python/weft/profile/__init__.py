# SPDX-License-Identifier: Apache-2.0
"""What ``weft profile NAME`` looks into: where the time goes of what ``weft bench`` measures."""

from __future__ import annotations

# Name -> (module with add_arguments and run, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "host": ("weft.profile.host", "where the host's time of a call goes, function by function"),
    "first-use": (
        "weft.profile.first_use",
        "what a process's first calls cost, with and without a kernel cache",
    ),
    "phases": ("weft.profile.phases", "when each phase of the low-latency kernels begins and ends, on GPUs"),
    "constants": (
        "weft.profile.constants",
        "low-latency calls with each value of WEFT_LOW_LATENCY_CONSTANTS",
    ),
    "sides": ("weft.profile.sides", "one weft bench by turns, with other settings or another installation"),
    "nccl": ("weft.profile.nccl", "what calls of Weft's libnccl cost the host"),
}
