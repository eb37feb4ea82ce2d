# SPDX-License-Identifier: Apache-2.0
"""Runs programs of this folder in forks of a process that has imported them: in a guest an import takes seconds.

    python warm.py /ctl/torch ranks guide   # a job of a guest; then each file /ctl/torch-NAME.fork is run:
                                            # its words are one of those programs, and the arguments of its main()

It says "warm" when it has imported them. What a fork says goes to torch-NAME.out, its status to torch-NAME.rc, as for a
job of the agent. The process has the name of its first argument, so that a test can kill it by that.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

from weft import _core

PAUSE_SECONDS = 0.2
PR_SET_NAME = 15
SECRET = "what both guests know"  # WEFT_JOB_SECRET


def configure(variables: dict[str, str]) -> None:
    """Set variables of Weft in a fork: the process that it is of has read them already."""
    os.environ.update(variables)
    _core.config_reload()


def run(program: ModuleType, words: list[str], out: Path) -> None:
    """Be a fork that runs the program."""
    os.setsid()
    to = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(to, stream)
    ctypes.CDLL(None).prctl(PR_SET_NAME, words[0].encode(), 0, 0, 0)
    status = 1
    try:
        sys.argv = [str(program.__file__), *words]
        status = program.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 2
        if not isinstance(end.code, int):
            print(end.code)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Fork for each file that comes, until the guest ends."""
    folder, prefix = os.path.split(sys.argv[1])
    programs = {name: importlib.import_module(name) for name in sys.argv[2:]}
    print("warm", flush=True)
    running: dict[int, Path] = {}
    while True:
        for file in Path(folder).glob(f"{prefix}-*.fork"):
            name, *words = shlex.split(file.read_text())
            file.unlink()
            if (child := os.fork()) == 0:
                run(programs[name], words, file.with_suffix(".out"))
            running[child] = file
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            new = running[child].with_suffix(".rc.new")
            new.write_text(str(os.waitstatus_to_exitcode(status) % 256))
            new.rename(running.pop(child).with_suffix(".rc"))
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
