# SPDX-License-Identifier: Apache-2.0
"""Timers of tests."""

from weft.testing.timing import (
    bench,
    bench_kineto,
)

__all__ = [
    "bench",
    "bench_kineto",
]
