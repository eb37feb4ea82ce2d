// SPDX-License-Identifier: Apache-2.0
//
// RowPipe: rows by loads and stores, as CDNA has no engine for whole rows.
#pragma once

#include "kernels/target/hip/groups.h"
#include "kernels/target/hip/memory.h"
#include "kernels/target/row_pipe_by_loads.h"

namespace weft {

inline constexpr bool kHasBulkCopies = false, kHasRowQueue = false;

}  // namespace weft
