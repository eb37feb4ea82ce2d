# SPDX-License-Identifier: Apache-2.0
"""Where libnccl-rma-weft.so is, for NCCL: ``NCCL_RMA_PLUGIN=$(python -m weft.nccl_rma_path) torchrun ...``."""

from __future__ import annotations

from pathlib import Path

from weft.errors import Error


def library() -> Path:
    """Return the path of libnccl-rma-weft.so. Raises: Error where Weft was built without it."""
    path = Path(__file__).parent / "nccl" / "libnccl-rma-weft.so"
    if not path.is_file():
        raise Error(f"{path} is missing: Weft was built without WEFT_NCCL_RMA", "unsupported")
    return path


if __name__ == "__main__":
    print(library())
