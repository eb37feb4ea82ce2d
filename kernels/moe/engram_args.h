// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for engram reads: the table whose entries are spread over the ranks' windows.
#pragma once

#include "kernels/core/wait.cuh"

namespace weft {

// Entry e of the whole table is entry e % entries_per_rank of rank e / entries_per_rank.
struct EngramArgs {
  WaitRule wait;
  const void* indices;  // [count] of id_bytes
  uint64_t count;
  uint64_t entries_per_rank;
  uint64_t row_bytes;  // of an entry, in windows from offset 0 on and in `out`
  std::byte* out;      // [count] entries
  uint32_t id_bytes;
  uint32_t reserved;
};

// Nothing of it is worth a constant: a row's bytes decide between widths at run time.
struct EngramShape {};

}  // namespace weft
