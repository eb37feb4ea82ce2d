# SPDX-License-Identifier: Apache-2.0
"""The one exception type of Weft, and its one refinement for peers that are gone."""

from __future__ import annotations


class Error(ValueError, RuntimeError):
    """Anything Weft refuses or fails at. ``code`` says which kind; the message says what and what is allowed.

    It is a ``ValueError`` and a ``RuntimeError`` so that programs written for DeepEP, which catch either,
    keep working.
    Codes: invalid, capacity, peer_lost, unsupported, system, closed.
    """

    def __init__(self, message: str, code: str = "invalid") -> None:
        super().__init__(message)
        self.code = code

    def one_line(self) -> str:
        """Return what a command prints of it."""
        return str(self)


class NotInstalled(Error, ModuleNotFoundError):
    """A Python package is missing that something of Weft needs; also a ``ModuleNotFoundError`` with its ``name``."""

    def __init__(self, needed_by: str, package: str) -> None:
        super().__init__(
            f"{package} is not installed, which {needed_by} needs: {install_command(package)}", "unsupported"
        )
        self.name = package


def install_command(package: str) -> str:
    """Return the line that installs a Python package; torch asks for numpy beside it."""
    return f"pip install {package} numpy" if package == "torch" else f"pip install {package}"


class PeerLost(Error):
    """A peer died or stayed silent past the deadline. The message names it and says what was waited for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "peer_lost")


def shortened(value: object) -> str:
    """Return a value's type and text on one line, short enough for a message."""
    if _holds_tensors(value):
        return _without_elements(value)
    return " ".join(f"{type(value).__name__} {value!r}".split())[:80]


def quoted(value: object) -> str:
    """Return repr() of a value, or, of one with tensors in it, what can be said without their elements."""
    return _without_elements(value) if _holds_tensors(value) else repr(value)[:200]


def invalid(argument: str, given: object, allowed: str) -> Error:
    """Return the error for a bad argument: its name, what was given, what is allowed."""
    shown = _without_elements(given) if _holds_tensors(given) else given
    return Error(f"{argument}: got {shown}, allowed: {allowed}")


def _holds_tensors(value: object) -> bool:
    """Return whether a value has tensors in it: their elements may lie in memory that is gone."""
    if isinstance(value, dict):
        return _holds_tensors(list(value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(_holds_tensors(item) for item in value)
    return hasattr(type(value), "data_ptr")


def _without_elements(value: object) -> str:
    if hasattr(type(value), "data_ptr"):
        return f"a {type(value).__name__} of {getattr(value, 'dtype', 'no type')}"
    return f"a {type(value).__name__} with tensors"


def from_core(code: str, message: str) -> Error:
    """Return the exception for a failed core call; called by the extension."""
    if code != "peer_lost":
        return Error(message, code)
    from weft.runtime import call_record

    call_record.write_if_asked()
    return PeerLost(message)
