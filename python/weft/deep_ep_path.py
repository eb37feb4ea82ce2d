# SPDX-License-Identifier: Apache-2.0
"""Where the DeepEP drop-in is, for PYTHONPATH: ``PYTHONPATH=$(python -m weft.deep_ep_path) python program.py``.

The folder holds the packages ``deep_ep`` and ``deep_ep_cpp``. Only who puts it on the path imports them, so a DeepEP
that is installed beside Weft stays as it is.
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import Error


def folder() -> Path:
    """Return the folder that holds ``deep_ep`` and ``deep_ep_cpp``. Raises: Error where it is not installed."""
    return drop_in_folder("deep_ep")


def drop_in_folder(name: str) -> Path:
    """Return the folder that holds the drop-in for a package. Raises: Error where it is not installed."""
    path = Path(__file__).parent / "compat" / name
    if not (path / name / "__init__.py").is_file():
        raise Error(f"{path} has no {name}: this installation of Weft lacks its drop-in", "unsupported")
    return path


if __name__ == "__main__":
    print(folder())
