# SPDX-License-Identifier: Apache-2.0
"""Compiles the built-in algorithms into the program book that libnccl loads, while Weft is being built.

Usage: python tools/compile_book.py FILE [--ranks 2-16]. Needs numpy, but not the core, which is not built yet.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.modules["weft._core"] = MagicMock(__file__=__file__)

from weft.collectives.book import main  # noqa: E402

main()
