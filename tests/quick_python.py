#!/usr/bin/env -S python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""The Python that tests start programs with. It has a process that has torch imported fork them: zygote.py.

A program runs with the same arguments, environment, folder, open files and exit status as with the tests' interpreter.
A signal goes on to the program, and a program whose starter is killed is killed, too. But the program has a process, a
session and a parent of its own: tests that look at those start sys.executable.
This process becomes the tests' interpreter where a fork would not do: for options other than -u, in another namespace
of processes, of another user, with other libraries, with more open files.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

# What an interpreter or a library reads when it is loaded, but for what zygote.py sees to, or what is read later.
READ_EARLY = (
    "LD_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "LC_",
    "LANG",
)
NOT_EARLY = {
    *(
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTHONFAULTHANDLER",
        "OMP_NUM_THREADS",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    *("PYTHON_EXEC", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OPENBLAS_NUM_THREADS"),
}
FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
NAMESPACES = ("pid", "user", "ipc", "uts")
JOINED = ("net", "mnt")  # namespaces that a fork enters: those of `ip netns exec`


def surroundings() -> list[Any]:
    """Return what a program has in common with the process that it is forked from."""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    user = [list(os.getresuid()), list(os.getresgid()), sorted(os.getgroups())]
    early = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(READ_EARLY) and name not in NOT_EARLY
    }
    return [spaces, user, early]


def request_of(arguments: list[str]) -> dict[str, Any] | None:
    """Return what to ask for; None where the program needs an interpreter of its own."""
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    while arguments and arguments[0] == "-u":
        unbuffered, arguments = True, arguments[1:]
    starts = arguments[:1] in (["-c"], ["-m"]) and len(arguments) > 1
    starts |= bool(arguments) and not arguments[0].startswith("-")
    with os.scandir("/proc/self/fd") as files:  # which is one of them
        open_files = {int(file.name) for file in files}
    if not starts or not {0, 1, 2} <= open_files or len(open_files) > 4:
        return None
    return {
        "arguments": arguments,
        "unbuffered": unbuffered,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0o77),
        "ignored": [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN],
    }


def follow(program: int, answers: Any) -> None:
    """End as the program does, and hand signals on to it until then."""

    def forward(number: int, _: object) -> None:
        os.kill(program, number)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    with open("/proc/self/comm", "w") as name:  # for those who look for the processes of a test
        name.write(f"for {program}")
    status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:
        number = -status
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)


def main() -> None:
    """Have the program forked; or become its interpreter."""
    arguments, address = sys.argv[1:], os.environ.get("TESTS_ZYGOTE", "")
    request = request_of(arguments)
    if request is not None and os.path.exists(address):
        zygote = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        zygote.connect(address)
        answers = zygote.makefile("r")
        if json.loads(answers.readline()) == surroundings():
            text = json.dumps(request).encode() + b"\n"
            spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in JOINED]
            sent = socket.send_fds(zygote, [text], [0, 1, 2, *spaces])
            zygote.sendall(text[sent:])
            follow(int(answers.readline()), answers)
        os.umask(request["umask"])
    os.execv(os.environ["TESTS_PYTHON"], [os.environ["TESTS_PYTHON"], *arguments])


if __name__ == "__main__":
    main()
