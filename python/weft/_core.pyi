# SPDX-License-Identifier: Apache-2.0
# The extension's names are untyped for mypy: what they take and return stands in src/bind.
from typing import Any

def __getattr__(name: str) -> Any: ...
