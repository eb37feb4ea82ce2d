// SPDX-License-Identifier: Apache-2.0
//
// libibverbs, opened at run time and kept open. kUnsupported with the loader's words where there is none.
// Threads: any.
#pragma once

#include "base/status.h"
#include "providers/verbs/verbs.h"

namespace weft::provider::ib {

Result<Library> open_library();

// Entries that a completion queue may have on every RDMA device of this machine; 0: there is none.
uint32_t completion_entries_max();

}  // namespace weft::provider::ib
