# SPDX-License-Identifier: Apache-2.0
"""Where the UCCL-EP drop-in is: ``PYTHONPATH=$(python -m weft.uccl_path) python program.py``.

The folder holds the package ``uccl``, of which only ``uccl.ep`` is served. The rule is that of weft.deep_ep_path.
"""

from __future__ import annotations

from pathlib import Path

from weft.deep_ep_path import drop_in_folder


def folder() -> Path:
    """Return the folder that holds ``uccl``. Raises: Error where it is not installed."""
    return drop_in_folder("uccl")


if __name__ == "__main__":
    print(folder())
