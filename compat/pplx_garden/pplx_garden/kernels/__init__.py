# SPDX-License-Identifier: Apache-2.0
"""See pplx_garden.kernels.p2p_all_to_all."""
