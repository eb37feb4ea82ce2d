# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: the tokens of a mixture-of-experts layer go to their experts and come back."""
