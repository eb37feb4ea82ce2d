# SPDX-License-Identifier: Apache-2.0
"""Where the pplx-garden drop-in is: ``PYTHONPATH=$(python -m weft.pplx_garden_path) python program.py``.

The folder holds the package ``pplx_garden``. The rule is that of weft.deep_ep_path.
"""

from __future__ import annotations

from pathlib import Path

from weft.deep_ep_path import drop_in_folder


def folder() -> Path:
    """Return the folder that holds ``pplx_garden``. Raises: Error where it is not installed."""
    return drop_in_folder("pplx_garden")


if __name__ == "__main__":
    print(folder())
