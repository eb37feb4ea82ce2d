// SPDX-License-Identifier: Apache-2.0
//
// Rows that a build adds to the list of kernels (jit/kernel_list.h): none in this one. See settings.h.
#pragma once

#define WEFT_EXTRA_KERNELS(WEFT_ROW)
