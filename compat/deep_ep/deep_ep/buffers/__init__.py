# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 2 keeps its buffers: legacy (Buffer) and elastic."""
