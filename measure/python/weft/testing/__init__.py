# SPDX-License-Identifier: Apache-2.0
"""What tests of a program that uses Weft need: oracles, ranks as processes, numerics, timers."""
