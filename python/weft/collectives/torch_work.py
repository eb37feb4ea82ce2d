# SPDX-License-Identifier: Apache-2.0
"""What torch sees of one call of the backend "weft": the work that its caller waits for, and a profiler's event."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._compile import _disable_dynamo

from weft import _core
from weft.errors import Error

profilers: Any = torch.autograd  # exports what it offers backends without a word of it in its types


class Event:
    """The profiler's event of one call. It ends in another thread, so that profilers count it as asynchronous."""

    def __init__(self, name: str, given: Any) -> None:
        tensors = _tensors(given)
        self._handle = profilers._record_function_with_args_enter(f"weft:{name}", *tensors)

    def end_here(self) -> None:
        """End it in this thread."""
        profilers._record_function_with_args_exit(self._handle)

    def end(self) -> None:
        """End it in a thread of its own."""
        ending = threading.Thread(target=self.end_here)
        ending.start()
        ending.join()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from _tensors(part)


def collective(name: str, given: int = 0) -> Callable[[Any], Any]:
    """Make a method that runs a collective and returns its result one that returns torch's work of it.

    A call that torch wants asynchronous, on tensors of the CPU, runs beside its caller; others in the caller's thread,
    and are finished. Either way after those before it. Profilers see it as "weft:``name``", with the tensors of
    positional argument ``given``. The last argument is the options. The method's object has ``_order`` and
    ``_in_order()``. torch.compile leaves it as it is, as outside_of_dynamo() says.
    """

    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            run = _run_outside_of_dynamo if torch.compiler.is_compiling() else _run
            return run(name, given, method, self, args, options)

        return call

    return wrap


def _run(name: str, given: int, method: Any, group: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    group.check_owner()
    call = functools.partial(method, group, *args, **options)
    event = None
    if profilers._profiler_enabled():
        event = Event(name, args[given] if given < len(args) else [])
    asked = options.get("opts", args[-1] if args else None)
    if getattr(asked, "asyncOp", False) and _is_on_cpu(args, asked):
        return group._in_order(name, call, event)
    try:
        return finished_work(group._order.here(call))
    finally:
        if event is not None:
            event.end()


_run_outside_of_dynamo = _disable_dynamo(_run)  # as in outside_of_dynamo(), with less on the way


def outside_of_dynamo(method: Any) -> Any:
    """Make a method one that torch.compile leaves as it is: what it runs, Dynamo neither traces nor looks into.

    torch.compiler.disable() would import Dynamo here, and lead each call through it, compiled or not.
    """
    outside = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else method)(*args, **options)

    return call


def _is_on_cpu(args: Sequence[Any], asked: Any) -> bool:
    tensors = list(_tensors(args))
    return all(tensor.is_cpu for tensor in tensors) and (
        bool(tensors) or not getattr(asked, "device_ids", None)
    )


def finished_work(result: Any) -> Any:
    """Return torch's work of a call that is finished, with its result."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def in_modes_of_now(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that runs in another thread as it would in this one, beside autograd."""
    is_inference = torch.is_inference_mode_enabled()

    def run() -> Any:
        with torch.inference_mode(is_inference), torch.no_grad():
            return call()

    return run


def run_into(
    future: Any, call: Callable[[], Any], event: Event | None, lost: Exception | None = None
) -> Exception | None:
    """Give a future what a call returns or raises, or ``lost`` in its place; return what went wrong, if anything."""
    result, error = None, lost
    if error is None:
        try:
            result = call()
        except Exception as failure:  # handed to whoever waits
            error = failure
    if event is not None:
        event.end_here()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return error


# How many works of a group live on of which Python knows no more, and C++ may. DDP holds one from a forward pass to the
# backward pass, and each keeps its result from being freed.
LEFT = 8


class Pending(torch._C._distributed_c10d.Work):
    """A call under way. torch's own work of a future forgets what went wrong when it is waited for.

    ``left``: keeps works that Python drops before they were waited for. C++ code may hold the other half of one, as
    DDP's reducer does with the works of join(), and would find the methods of the base class if this half ended.
    """

    def __init__(self, name: str, future: Any, left: deque[Pending] | None = None) -> None:
        super().__init__()
        self._owner = _core.OwnerProcess()
        self.name = name
        self._future = future
        self._shown: Any = None  # what get_future() returned
        self._left = left
        self.source = -1

    def __del__(self) -> None:  # called once, so that what a deque drops is gone
        if self._left is not None and self._shown is None:
            self._left.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; no timeout, or 0, is the group's.

        Raises: what the call raised; Error when the timeout passes first, and the call goes on, and in a forked child,
            which does not run it.
        """
        self._owner.check("work")
        self._left = None
        if timeout:
            is_over = threading.Event()
            self._future.add_done_callback(lambda _: is_over.set())
            if not is_over.wait(timeout.total_seconds()):
                raise Error(
                    f"{self.name}: not finished in the {timeout.total_seconds():g} s of wait()", "system"
                )
        if self._shown is not None:  # who has it finds it done
            with contextlib.suppress(RuntimeError):
                self._shown.wait()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        self._owner.check("work")
        return bool(self._future.done())

    def get_future(self) -> Any:
        """Return a future of the result, or of a RuntimeError that says what went wrong.

        What set_exception() leaves in a future is a result to C++ code such as DDP's, which fails at it.
        """
        if self._shown is None:
            self._shown = self._future.then(lambda done: done.wait())
        return self._shown

    def _source_rank(self) -> int:
        """Return the rank that sent what was received; -1 before it is known, and for a send."""
        return self.source
