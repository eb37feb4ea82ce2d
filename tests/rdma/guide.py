# SPDX-License-Identifier: Apache-2.0
"""The guide's program that hands a KV cache over, with its two processes on two machines and over RDMA.

guide.main: decode | prefill 10.9.0.1       # the program is that of docs/guides/kv-cache.md; only the provider changes
"""

from __future__ import annotations

import re
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch  # noqa: F401  the guide's program uses it: imported once, before the forks
from guests import ROOT
from warm import SECRET, configure

PROVIDER, PORT = "verbs", 7200
MEET_SECONDS = 60.0


def program() -> dict[str, Any]:
    """Return the functions of the guide's program."""
    page = (ROOT / "docs" / "guides" / "kv-cache.md").read_text()
    found = re.search(r"```python\n(# handover.py\n.*?)```", page, re.DOTALL)
    assert found
    source = found.group(1).replace('"fabric:shm"', f'"{PROVIDER}"')
    assert PROVIDER in source
    names: dict[str, Any] = {"__name__": "handover"}
    exec(compile(source, "handover.py", "exec"), names)
    return names


def meet(host: str | None) -> Connection:
    """Return a line to the other machine, where the guide has a pipe."""
    if host is None:
        with Listener(("", PORT), authkey=SECRET.encode()) as listener:
            return listener.accept()
    end = time.monotonic() + MEET_SECONDS
    while True:
        try:
            return Client((host, PORT), authkey=SECRET.encode())
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def main() -> int:
    """Be one of the two processes."""
    configure({"WEFT_JOB_SECRET": SECRET})
    role, *host = sys.argv[1:]
    program()[role](meet(host[0] if host else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
