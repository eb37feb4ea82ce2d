# SPDX-License-Identifier: Apache-2.0
"""Where NVIDIA's Python packages are installed."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

from weft.errors import Error


def find_pkg_root(name: str, lib_name: str | None = None, optional: bool = False) -> str | None:
    """Return the folder of package nvidia-``name``*: of its lib/``lib_name``, or nvidia/``name``.

    Returns None when it is not installed and ``optional``. Raises: weft.Error when it is not installed.
    """
    for distribution in distributions():
        package = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if not package.startswith(f"nvidia-{name}"):
            continue
        for file in distribution.files or []:
            if lib_name is not None and file.name.startswith(lib_name):
                folder = Path(str(file.locate())).parent
                return str(folder.parent if folder.name == "lib" else folder)
            if lib_name is None and file.parts[:2] == ("nvidia", name):
                return str(Path(str(distribution.locate_file(""))) / "nvidia" / name)
    if optional:
        return None
    raise Error(f"package nvidia-{name} is not installed", "unsupported")


@lru_cache
def find_nccl_root(optional: bool = False) -> str | None:
    """Return the folder above lib/libnccl.so*; see find_pkg_root."""
    return find_pkg_root("nccl", "libnccl.so", optional)


def get_nccl_lib_name(root: str) -> str:
    """Return the file name of the NCCL library in ``root``/lib. Raises: weft.Error when there is none."""
    names = sorted(path.name for path in (Path(root) / "lib").glob("libnccl.so*"))
    if not names:
        raise Error(f"no libnccl.so under {root}/lib", "unsupported")
    return names[0]
