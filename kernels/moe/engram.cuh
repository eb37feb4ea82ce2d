// SPDX-License-Identifier: Apache-2.0
//
// engram.cuh: reads entries of a table that is spread over the ranks. Only the reading rank takes part in a read.
// Steps: every warp takes kLandings entries. 1 It finds the rank of each, and copies it out of that rank's window, or asks
// its port to get it   2 It copies out what was asked for, entry by entry as they land.
// Waits: step 2, for one entry of one rank.
// Cost:  row_bytes per entry, over the link where the entry is another rank's; through a port in whole units of 16 bytes,
// and once more from where they land.
#pragma once

#include "kernels/core/copy.cuh"
#include "kernels/core/reach.cuh"
#include "kernels/core/roles.cuh"
#include "kernels/moe/engram_args.h"
#include "kernels/moe/routes.cuh"

namespace weft {
namespace engram {

// An entry that a port was asked for: where it lands, and what its word says then.
struct Asked {
  uint32_t rank;
  uint64_t item;
  uint64_t word;
  uint64_t want;
  int64_t entry;  // where it begins in this rank's window, whose host part stands before it
};

template <class MeshT>
class Fetch {
 public:
  WEFT_DEVICE Fetch(const EngramArgs& a, Warp warp, const MeshT& mesh, uint64_t number)
      : a_(a), warp_(warp), mesh_(mesh), number_(number) {}

  // Entries item, item + step, ...: at most kLandings. False: one did not come, and a fault says so.
  WEFT_DEVICE bool run(uint64_t item, uint64_t step) {
    uint32_t asked = 0;
    Asked waiting[kLandings];
    for (uint32_t i = 0; i < kLandings && item < a_.count; ++i, item += step) {
      uint64_t at = 0;
      uint32_t rank = 0;
      if (!find(item, rank, at)) continue;
      if (is_port(mesh_, rank)) {
        waiting[asked] = ask(asked, rank, at, item);
        ++asked;
        continue;
      }
      copy_any(warp_, a_.out + item * a_.row_bytes, near_window(mesh_, rank) + at, a_.row_bytes);
    }
    for (uint32_t i = 0; i < asked; ++i)
      if (!take(waiting[i])) return false;
    return true;
  }

 private:
  // An index that names no entry leaves its row as it is, and a fault says so.
  WEFT_DEVICE bool find(uint64_t item, uint32_t& rank, uint64_t& at) const {
    const int64_t index = expert_at(a_.indices, a_.id_bytes, item);
    const uint64_t entries = a_.entries_per_rank * mesh_.ranks();
    if (index < 0 || static_cast<uint64_t>(index) >= entries) {
      if (warp_.rank() == 0)
        raise(a_.wait.fault, Site::kEngramIndex, a_.wait.self, a_.wait.self, entries,
              static_cast<uint64_t>(index), 0);
      return false;
    }
    rank = static_cast<uint32_t>(static_cast<uint64_t>(index) / a_.entries_per_rank);
    at = a_.at.entries + static_cast<uint64_t>(index) % a_.entries_per_rank * a_.row_bytes;
    return true;
  }

  // In the warp's place number i.
  WEFT_DEVICE Asked ask(uint32_t i, uint32_t rank, uint64_t at, uint64_t item) const {
    const uint64_t place = number_ * kLandings + i, begin = at / 16 * 16;
    const uint64_t landing = a_.at.landings + place * a_.at.landing_bytes;
    const int64_t payload = payload_of(mesh_, rank);
    Asked asked{rank, item, a_.at.words + place * 8, 0,
                static_cast<int64_t>(landing + (at - begin)) + payload};
    uint64_t said = 0;
    if (warp_.rank() == 0) said = load_relaxed(word(asked));
    asked.want = warp_.broadcast(said) + 1;
    const uint64_t bytes = (at - begin + a_.row_bytes + 15) / 16 * 16;
    mesh_.to(rank).get(warp_, in_part(landing, payload), in_part(begin, payload), bytes,
                       in_part(asked.word, records_of(mesh_, rank)), asked.want);
    return asked;
  }

  WEFT_DEVICE bool take(const Asked& asked) const {
    bool came = true;
    if (warp_.rank() == 0) {
      uint64_t seen = 0, waited_ns = 0;
      const Span traced(a_.wait.trace, Site::kEngramFetch, asked.rank);
      came = poll_host_signal(word(asked), asked.want, a_.wait, seen, waited_ns);
      if (!came)
        raise(a_.wait.fault, Site::kEngramFetch, a_.wait.self, asked.rank, asked.want, seen, waited_ns);
    }
    if (warp_.any(!came)) return false;
    warp_.sync();
    copy_any(warp_, a_.out + asked.item * a_.row_bytes, mesh_.local() + asked.entry, a_.row_bytes);
    return true;
  }
  WEFT_DEVICE const uint64_t* word(const Asked& asked) const {
    return word_from(mesh_, asked.rank, asked.word);
  }

  const EngramArgs& a_;
  const Warp warp_;
  const MeshT& mesh_;
  const uint64_t number_;  // of the warp
};

}  // namespace engram

template <class MeshT, class Shape>
WEFT_KERNEL void engram_fetch(const EngramArgs& a, const MeshT& mesh, const Shape& /*shape*/) {
  const Block block;
  const Warp warp;
  const Share share = share_of(block, warp, {0, block.warps()});
  engram::Fetch<MeshT> fetch(a, warp, mesh, share.index);
  for (uint64_t item = share.index; item < a.count; item += share.total * kLandings)
    if (!fetch.run(item, share.total)) return;
}

}  // namespace weft
