# SPDX-License-Identifier: Apache-2.0
"""Unbalanced routing scores."""

from weft.testing.gate import (
    get_unbalanced_scores,
)

__all__ = [
    "get_unbalanced_scores",
]
