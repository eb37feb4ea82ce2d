// SPDX-License-Identifier: Apache-2.0
//
// NVSHMEM in this process. It starts once, with the ranks of the first communicator that asks for it, and ends with the
// process. Its calls know no deadline, so each that waits for other ranks runs on a thread of its own: one that stays
// away past the deadline leaves the session broken, and that thread behind.
//   WEFT_TRY(Session::of_process().start(group, library));
//   WEFT_TRY_ASSIGN(int block, session.take(bytes, exchange));      // collective
//   session.give(block);                                            // local
// Giving memory back to NVSHMEM is collective, and windows are not destroyed together: a block that its rank has no
// more use for is kept, and used again once every rank has given it back.
// Threads: any; one caller of take() at a time.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "transports/nvshmem/library.h"
#include "transports/transport.h"

namespace weft::nvshmem_link {

// Shows `mine` to all ranks and returns what everyone showed, by rank.
using Exchange = std::function<Result<std::vector<std::string>>(const std::string& mine)>;

class Session {
 public:
  static Session& of_process();

  // Collective over the group. Errors: kInvalid where it runs with other ranks already; kPeerLost, kSystem.
  Status start(const Group& group, const Library& library, const UniqueId& id);
  bool is_running() const;
  // The library that it runs with; null before the start.
  const Library* library() const { return library_; }

  // A block of at least `bytes` bytes at every rank; its number, the same on all. Collective.
  Result<int> take(uint64_t bytes, const Exchange& exchange, double timeout_s);
  void give(int block);
  // Returns when every rank has come here, and what NVSHMEM had begun by then is done. Collective.
  Status meet(double timeout_s);
  // Where this rank finds the block of `peer`; null where it cannot load from it.
  std::byte* part(int block, int peer) const;

 private:
  struct Block {
    void* at = nullptr;
    uint64_t bytes = 0;
    bool is_free = false;
  };
  Status within(double timeout_s, const char* call, std::function<Status()> run);
  std::string free_blocks() const;
  int common_free_block(const std::vector<std::string>& all, uint64_t bytes) const;

  mutable std::mutex mutex_;
  const Library* library_ = nullptr;
  Device device_;
  int rank_ = 0, ranks_ = 0;
  std::vector<Block> blocks_;  // in the order of their making, which is the same on all ranks
  Status broken_;
};

}  // namespace weft::nvshmem_link
