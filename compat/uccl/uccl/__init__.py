# SPDX-License-Identifier: Apache-2.0
"""Weft under the names that programs written for UCCL-EP import. Nothing is implemented here."""

from weft import __version__ as _weft_version

__version__ = f"0.1.1+weft.{_weft_version}"
