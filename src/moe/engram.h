// SPDX-License-Identifier: Apache-2.0
//
// Engram is a table whose entries are spread over the ranks, and read by any of them without the owner's
// help.
//   WEFT_TRY_ASSIGN(auto table, Engram::create(buffer, entries_per_rank, row_bytes));
//   ... fill table->local(), meet the other ranks ...
//   WEFT_TRY(table->fetch({indices, 4, count, out, stream}));
// Entry e is entry e % entries_per_rank of rank e / entries_per_rank. On CUDA fetch() enqueues on `stream`
// and can be captured in a graph; on the host it returns when it is done. Threads: one caller at a time.
// Lifetime: must not outlive the buffer, whose faults it shares. Errors: kInvalid for an index that names no
// entry, on CUDA at the next call; that entry's place in `out` is left as it was.
#pragma once

#include <memory>

#include "moe/buffer.h"

namespace weft {

struct EngramFetch {
  const void* indices;  // [count]
  uint32_t id_bytes;    // 4 or 8
  uint64_t count;
  std::byte* out;  // [count] entries
  void* stream;
};

class Engram {
 public:
  // Collective: every rank with the same sizes, else kInvalid. Errors: those of Window::create.
  static Result<std::unique_ptr<Engram>> create(MoeBuffer& buffer, uint64_t entries_per_rank,
                                                uint64_t row_bytes);

  Status fetch(const EngramFetch& call);

  Window& window() { return *window_; }
  uint64_t entries_per_rank() const { return entries_per_rank_; }
  uint64_t row_bytes() const { return row_bytes_; }

 private:
  Engram(MoeBuffer& buffer, std::unique_ptr<Window> window, uint64_t entries_per_rank, uint64_t row_bytes)
      : buffer_(buffer),
        window_(std::move(window)),
        entries_per_rank_(entries_per_rank),
        row_bytes_(row_bytes) {}

  MoeBuffer& buffer_;
  std::unique_ptr<Window> window_;
  uint64_t entries_per_rank_;
  uint64_t row_bytes_;
};

}  // namespace weft
