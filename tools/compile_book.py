# SPDX-License-Identifier: Apache-2.0
"""Compiles the built-in algorithms into the program book that libnccl loads, while Weft is being built.

Usage: python tools/compile_book.py FILE [--ranks 2-16]. Needs numpy; the core is not built yet, and not needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from weft.collectives.book import main

main()
