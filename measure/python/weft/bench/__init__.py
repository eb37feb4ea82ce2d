# SPDX-License-Identifier: Apache-2.0
"""The benchmarks behind ``weft bench NAME``; all write the JSON, table and plot of ``weft.bench.report``."""

from __future__ import annotations

# Name -> (module with add_arguments and run, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "moe": ("weft.bench.moe", "dispatch and combine of a mixture-of-experts layer"),
    "transfer": ("weft.bench.transfer", "the transfer engine: writes, reads, scatter, latency, message rate"),
    "transfer-gpu": ("weft.bench.transfer_gpu", "the transfer engine between two GPUs of this host"),
    "channel": ("weft.bench.channel", "the calls of kernels to a peer: latency, rate, bandwidth, by network"),
    "floor": ("weft.bench.floor", "the least time of an exchange on this machine: bare kernels, any size"),
    "collective": ("weft.bench.collective", "collectives over sizes, in the manner of nccl-tests"),
}
