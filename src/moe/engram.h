// SPDX-License-Identifier: Apache-2.0
//
// Engram is a table whose entries are spread over the ranks, and read by any of them without the owner's
// help.
//   Engram table(buffer);
//   WEFT_TRY(table.resize(entries_per_rank, row_bytes, "bfloat16"));
//   ... fill table.window().local() + table.entries_at(), meet the other ranks ...
//   WEFT_TRY(table.fetch({indices, 4, count, out, stream}));
// Entry e is entry e % entries_per_rank of rank e / entries_per_rank. On CUDA fetch() enqueues on `stream`
// and can be captured in a graph; on the host it returns when it is done. Threads: one caller at a time.
// Lifetime: must not outlive the buffer, whose faults it shares. Errors: kInvalid for an index that names no
// entry, on CUDA at the next call; that entry's place in `out` is left as it was; kPeerLost names a rank behind a port
// whose entry did not come.
#pragma once

#include <memory>

#include "kernels/moe/engram_args.h"
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
  explicit Engram(MoeBuffer& buffer) : buffer_(buffer), fetches_(buffer.tally().operation("engram_fetch")) {}

  // Makes room for so many entries; what it held is gone, unless nothing changes. Collective: every rank with
  // the same sizes and type, else kInvalid, and the table is as before. Errors otherwise those of Window::create,
  // after which the table is empty.
  Status resize(uint64_t entries_per_rank, uint64_t row_bytes, const std::string& type);

  Status fetch(const EngramFetch& call) {
    return buffer_.tally().count(fetches_, {call.count * row_bytes_, call.count, -1, false},
                                 [&] { return run_fetch(call); });
  }

  Status check_owner() const { return buffer_.check_owner(); }
  Window& window() { return *window_; }                // once resize() has succeeded
  uint64_t entries_at() const { return at_.entries; }  // their offset in window()
  uint64_t entries_per_rank() const { return entries_per_rank_; }
  uint64_t row_bytes() const { return row_bytes_; }

 private:
  bool has_ports() const;
  Status run_fetch(const EngramFetch& call);

  MoeBuffer& buffer_;
  TallyOperation& fetches_;
  std::unique_ptr<Window> window_;
  EngramLayout at_{};
  uint64_t entries_per_rank_ = 0;
  uint64_t row_bytes_ = 0;
};

}  // namespace weft
