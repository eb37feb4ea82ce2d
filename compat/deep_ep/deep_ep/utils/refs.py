# SPDX-License-Identifier: Apache-2.0
"""References of the elastic buffer's tests."""

from weft.testing.elastic_refs import (
    combine,
    dispatch,
    generate_pre_combine_data,
    ordered_accumulate,
)

__all__ = [
    "combine",
    "dispatch",
    "generate_pre_combine_data",
    "ordered_accumulate",
]
