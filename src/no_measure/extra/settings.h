// SPDX-License-Identifier: Apache-2.0
//
// Rows that a build adds to the table of settings (base/config.h): none in this one. A house beside the library has a header
// of this name, and the build puts its folder before this one: see measure/README.md.
#pragma once

#define WEFT_EXTRA_OPTIONS(WEFT_OPTION)
