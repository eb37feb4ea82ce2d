# SPDX-License-Identifier: Apache-2.0
"""Neutral stand-ins for the functions of torch.cuda that programs call where no GPU is: work on the CPU is finished
when a call returns, so a stream and an event have nothing to order.

    cuda_stand_ins.install()    # before megatron.core is imported

They replace these functions alone, and let all_to_all_single() take sizes as a CPU tensor: Megatron makes an array of
sizes only where it copies them from a GPU. Megatron's own files stay as they are, and so does all that they compute.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0  # ms; times mean nothing here


class Stream:
    """A stream on which everything is done."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Event:
        return event or Event()


_THE_STREAM = Stream()


def install() -> None:
    """Put the stand-ins into torch.cuda. Raises: RuntimeError where there is a GPU, which needs none."""
    if torch.cuda.is_available():
        raise RuntimeError("stand-ins for torch.cuda: this machine has a GPU")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda device=None: _THE_STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.Stream, cuda.Event = Stream, Event
    cuda._sleep = lambda cycles: None
    cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=8, name="none")
    dist.all_to_all_single = _with_plain_sizes(dist.all_to_all_single)


def _with_plain_sizes(all_to_all_single: Any) -> Any:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def call(output: Any, input: Any, *sizes: Any, **options: Any) -> Any:
        named = {name: plain(value) for name, value in options.items()}
        return all_to_all_single(output, input, *map(plain, sizes), **named)

    return call
