# SPDX-License-Identifier: Apache-2.0
"""How commands write files: completely or not at all, and never through a link that another user has put there.

    write_file(Path("out.json"), text)        # a reader sees the old file or the new one
    with open(journal, "a", opener=own_file) as file: ...

A link of this user or of root is followed; what stands for a device or a pipe, such as /dev/stdout, is written to.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file beside ``path`` under a free name, and rename it. Raises: OSError, with the path and why."""
    content = content.encode() if isinstance(content, str) else content
    place = _place_of(path)
    if _is_of_kernel(place) or (place.exists() and not place.is_file()):
        with open(place, "wb", opener=own_file) as device:
            device.write(content)
        return
    beside = place.with_name(f".{place.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(beside, _NEW, 0o666), "wb") as file:
            file.write(content)
            if place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
        os.replace(beside, place)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def own_file(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=own_file)``: no link of another user. Raises: OSError."""
    place = _place_of(Path(path))
    links = 0 if _is_of_kernel(place) else os.O_NOFOLLOW
    return os.open(place, flags | links | os.O_NOCTTY | os.O_CLOEXEC, 0o666)


def _place_of(path: Path) -> Path:
    """Return where a path leads once its last part, if it is a link, has been found to be one of ours."""
    for _ in range(40):  # as many links as the kernel follows
        if _is_of_kernel(path) or not path.is_symlink():
            return path
        owner = path.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            why = f"a link of user {owner}, allowed: a file, or a link of this user"
            raise OSError(errno.ELOOP, why, str(path))
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_of_kernel(path: Path) -> bool:
    """Return whether ``path`` is a descriptor, whose link names no path: /proc/self/fd/1, where /dev/stdout leads."""
    return str(path).startswith(("/proc/", "/dev/fd/"))


__all__ = ["own_file", "write_file"]
