// SPDX-License-Identifier: Apache-2.0
//
// SharedAddresses: memory that needs no window, because all ranks of a communicator are threads of one process and reach it
// under the same addresses. On the host that is all memory; on GPUs what cudaMalloc gives, once peer access is enabled, and
// what cuMemCreate gives, where all ranks' GPUs were given access, as ncclMemAlloc does.
//   WEFT_TRY_ASSIGN(SharedAddresses addresses, SharedAddresses::probe(comm));   // collective
//   const Communicator::WindowPlace place = addresses.find(memory);             // number < 0: peers do not reach it
// Kernels know windows alone, so the address space is cut into pieces, each of which is a window that begins at the same
// address on every rank. The driver is asked at the first byte of a buffer. Pools (cudaMallocAsync) have rights of their
// own, and do not count. Peer access stays enabled until the process ends, as other users of the process may need it.
// Threads: any, after probe(). Errors: kPeerLost, kSystem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "kernels/collective/exchange_args.h"
#include "memory/local_memory.h"

namespace weft {

// Numbers below are those of windows of a communicator whose memory peers may use directly.
inline constexpr int kMaxWindows = 767;

class SharedAddresses {
 public:
  // As long as a descriptor's offset reaches; user space has 47 bits.
  static constexpr uint64_t kPieceBytes = uint64_t{16} << kDescriptorOffsetBits;
  static constexpr uint64_t kPieces = (uint64_t{1} << 47) / kPieceBytes;
  static_assert(kMaxWindows + kPieces < uint64_t{1} << kDescriptorWindowBits);

  SharedAddresses() = default;
  static Result<SharedAddresses> probe(Communicator& comm);

  // Puts the pieces' tables behind those of the windows, in the table of `tables` at `windows_at`.
  Status write_tables(LocalMemory& tables, uint64_t windows_at) const;
  Communicator::WindowPlace find(const std::byte* memory) const;
  // Of a number that find() gave: base addresses by rank.
  std::byte* const* table(int number) const;

 private:
  bool is_reached(const std::byte* memory) const;

  Device device_{};
  std::vector<int> ordinals_;           // by rank: its GPU
  std::unique_ptr<LocalMemory> bases_;  // [kPieces][ranks]; null: ranks share no addresses
};

}  // namespace weft
