# SPDX-License-Identifier: Apache-2.0
"""Where libnccl.so.2 is, for LD_PRELOAD: ``LD_PRELOAD=$(python -m weft.nccl_path) torchrun ...``."""

from __future__ import annotations

from pathlib import Path

from weft.errors import Error


def library() -> Path:
    """Return the path of libnccl.so.2. Raises: Error where Weft was built without it."""
    path = Path(__file__).parent / "nccl" / "libnccl.so.2"
    if not path.is_file():
        raise Error(f"{path} is missing: Weft was built without WEFT_NCCL", "unsupported")
    return path


if __name__ == "__main__":
    print(library())
