# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 2 keeps the buffer of DeepEP 1."""

from deep_ep.buffer import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
