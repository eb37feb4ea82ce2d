# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def load_text(limit_bytes: int = 4_000_000) -> torch.Tensor:
    """Return uint8[n], n <= limit_bytes: the library's modules, smaller folders' first, in a fixed order.

    Every process of a machine gets the same bytes, so ranks need not send them to each other.
    """
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, sequences: int, length: int, seed: int) -> torch.Tensor:
    """Return int64[sequences, length + 1]: the bytes that step ``step`` trains on, the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, text.numel() - length - 1, (sequences,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
