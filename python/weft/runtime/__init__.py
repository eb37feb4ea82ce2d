# SPDX-License-Identifier: Apache-2.0
"""Ranks, the memory they share, and what the machine under them can do."""
