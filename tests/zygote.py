# SPDX-License-Identifier: Apache-2.0
"""Programs of tests without their import of torch, 3 s of CPU each: forks of one process that has it.

    with zygote.started(cpu_s):     # conftest.py, around all tests that start programs
        subprocess.run([quick_python.py, "-m", "weft", "info"])

quick_python.py asks, and says what differs from an interpreter of its own. The zygote imports no Weft: a program
reads its settings, registers its backend and imports its modules as ever. It has one thread, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import quick_python

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def started(cpu_s: Counter[str]) -> Iterator[None]:
    """Let quick_python.py fork programs, and add what CPU time they took for each file of tests.

    Who asks before torch is imported waits for it.
    """
    with tempfile.TemporaryDirectory(prefix="tests-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/zygote"
        listener.bind(address)
        listener.listen(128)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), f"{folder}/used"],
            pass_fds=[listener.fileno()],
            # The entry points of torch's backends are loaded in each program.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OPENBLAS_NUM_THREADS": "1"},
        )
        os.environ["TESTS_ZYGOTE"] = address
        try:
            yield
        finally:
            del os.environ["TESTS_ZYGOTE"]
            server.kill()
            server.wait()
            used = Path(folder, "used")
            for line in used.read_text().splitlines() if used.exists() else ():
                seconds, test = line.split(" ", 1)
                cpu_s[test.partition("::")[0]] += float(seconds)


class Program:
    """A program that runs, and the client that has asked for it."""

    def __init__(self, client: socket.socket, pid: int, test: str) -> None:
        self.client, self._pid, self._test = client, pid, test
        self.process = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it: its client has ended."""
        signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def report(self) -> None:
        """Tell the client how it ended, and note the time that it took."""
        _, wait_status, usage = os.wait4(self._pid, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        with open(sys.argv[2], "a") as used:
            used.write(f"{usage.ru_utime + usage.ru_stime:.3f} {self._test}\n")
        with contextlib.suppress(OSError):
            self.client.sendall(b"%d\n" % status)
        self.client.close()
        os.close(self.process)


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each request; it returns here with what was asked of it."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            program = key.data
            if program is None:
                request = take(listener, events)
                if request is not None:
                    return request
            elif key.fileobj is program.client:
                events.unregister(program.client)
                program.kill()
            else:
                events.unregister(program.process)
                with contextlib.suppress(KeyError):  # its client has ended first
                    events.unregister(program.client)
                program.report()


def take(listener: socket.socket, events: selectors.BaseSelector) -> dict[str, Any] | None:
    """Fork a process for who asks next. Returns: what was asked, in that process; None in this one."""
    client, _ = listener.accept()
    client.settimeout(60)
    try:
        client.sendall(json.dumps(quick_python.surroundings()).encode() + b"\n")
        text, files, _, _ = socket.recv_fds(client, 1 << 16, 3 + len(quick_python.JOINED))
        while text and not text.endswith(b"\n"):
            more = client.recv(1 << 16)
            text = text + more if more else b""
    except OSError:
        text = b""
    if not text:  # it becomes an interpreter of its own, or has ended
        client.close()
        return None
    request = json.loads(text)
    pid = os.fork()
    if pid == 0:
        for key in events.get_map().values():
            os.close(key.fd)
        events.close()
        os.close(client.detach())
        return {**request, "files": files}
    for file in files:
        os.close(file)
    program = Program(client, pid, request["environment"].get("PYTEST_CURRENT_TEST", "?"))
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % pid)
    events.register(client, selectors.EVENT_READ, program)
    events.register(program.process, selectors.EVENT_READ, program)
    return None


def become(request: dict[str, Any], path: list[str]) -> None:
    """Make this process what its client would have been. ``path``: the interpreter's own part of sys.path."""
    os.setsid()
    end_with_parent()
    for name, space in zip(quick_python.JOINED, request["files"][3:], strict=True):
        enter(name, space)
    for number, file in enumerate(request["files"]):
        if number < 3:
            os.dup2(file, number)
        os.close(file)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    open_again("stdin", 0, "r")
    open_again("stdout", 1, "w", line_buffering=os.isatty(1), write_through=request["unbuffered"])
    open_again("stderr", 2, "w", line_buffering=True, write_through=request["unbuffered"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*(os.path.abspath(entry) for entry in given if entry), *path]
    importlib.invalidate_caches()
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1" and hasattr(
        torch, "_import_device_backends"
    ):
        torch._import_device_backends()


def enter(name: str, space: int) -> None:
    """Go to a namespace, where this process is in another one."""
    if not os.path.sameopenfile(space, own := os.open(f"/proc/self/ns/{name}", os.O_RDONLY)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(own)


def open_again(name: str, number: int, mode: str, **options: Any) -> None:
    """Open one of Python's three files on what the client has."""
    before = getattr(sys, name)
    file = open(number, mode, encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
    file.reconfigure(**options)
    setattr(sys, name, file)
    setattr(sys, f"__{name}__", file)


def run(kind: str, arguments: list[str]) -> None:
    """Run -c CODE, -m MODULE or a file as the main program."""
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if kind == "-m":
        name, *rest = arguments
        sys.argv = ["-m", *rest]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # which the interpreter calls, too
    elif kind == "-c":
        code, *rest = arguments
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv = [kind, *arguments]
        sys.path.insert(0, str(Path(kind).resolve().parent))
        vars(main)["__file__"] = os.path.abspath(kind)
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def end(error: BaseException) -> None:
    """Say what ended the program, as the interpreter does, and end with its status."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.exit(1)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own_path = [entry for entry in sys.path[1:] if entry not in given]  # the first is this file's folder
    import torch
    import torch.distributed

    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    become(asked, own_path)
    try:
        run(asked["arguments"][0], asked["arguments"][1:])
    except Exception as raised:
        end(raised)
