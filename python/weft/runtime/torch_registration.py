# SPDX-License-Identifier: Apache-2.0
"""The name "weft" among the backends of torch.distributed, without an import of torch.

    import weft
    torch.distributed.init_process_group("weft")

`import weft` calls register(). Where Weft is installed torch calls it, too, when it is imported (its entry point group
"torch.backends", from torch 2.5 on), so that a program that takes the name of a backend needs no `import weft`.
The backend itself, weft.collectives.torch_backend, is imported when the first group is made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "weft"
_MODULE = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make the backend known: at once where torch is imported, else as soon as it is. More than once does no harm."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _register_in(module)
    elif not any(isinstance(finder, _WithTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithTorch())


class _WithTorch(MetaPathFinder):
    """Finds torch's module of process groups as Python would, once, and registers the backend when it has run."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register_in(module)

            loader.exec_module = run_and_register
        return spec


class _Devices(Sequence[str]):
    """The types of devices that torch may take the backend for: "cuda" only where there is such a device.

    torch asks for each group that it makes, and uses a type other than "cpu" for the data of some of its calls. A
    program that only imports torch does not start the driver.
    """

    def __getitem__(self, index: Any) -> Any:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())

    @staticmethod
    def _now() -> list[str]:
        import torch

        return ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]


def device_types() -> list[str]:
    """Return the types of devices that a group serves here."""
    return list(_Devices())


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch import distributed

    from weft.collectives.torch_backend import WeftGroup
    from weft.runtime.forks import claim

    if (
        distributed.is_initialized()
    ):  # a child that was forked would answer in the store of its parent's groups
        claim("group", distributed.group.WORLD)
    return WeftGroup(store, rank, size, timeout)


def _register_in(module: Any) -> None:
    backends = module.Backend
    if _NAME not in backends.backend_list:
        backends.register_backend(_NAME, _create, devices=["cpu", "cuda"])
        backends.backend_capability[_NAME] = _Devices()
