// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for engram reads: the table whose entries are spread over the ranks' windows.
#pragma once

#include "kernels/core/carver.h"
#include "kernels/core/wait.cuh"

namespace weft {

// Entries that a warp fetches through ports at a time.
inline constexpr uint32_t kLandings = 16;

// Offsets in every rank's window. Words come first, as they alone need a host part. Where all ranks map each other there
// are neither words nor landings.
struct EngramLayout {
  uint64_t words;     // u64[warps][kLandings]: grows by 1 with each entry that has landed
  uint64_t landings;  // [warps][kLandings] of landing_bytes
  uint64_t landing_bytes;
  uint64_t entries;  // [entries_per_rank] of row_bytes
  uint64_t end;
};

// What a network moves is whole units of 16 bytes: those that hold an entry, wherever it begins.
WEFT_DEVICE constexpr uint64_t landing_bytes_of(uint64_t row_bytes) {
  return (row_bytes + 15) / 16 * 16 + 16;
}

// Entry e of the whole table is entry e % entries_per_rank of rank e / entries_per_rank.
struct EngramArgs {
  WaitRule wait;
  EngramLayout at;
  const void* indices;  // [count] of id_bytes
  uint64_t count;
  uint64_t entries_per_rank;
  uint64_t row_bytes;  // of an entry
  std::byte* out;      // [count] entries
  uint32_t id_bytes;
  uint32_t reserved;
};

// It has no constants: the bytes of a row choose the copy's width at run time.
struct EngramShape {};

}  // namespace weft
