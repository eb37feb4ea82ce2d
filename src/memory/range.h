// SPDX-License-Identifier: Apache-2.0
//
// A MappedRange is one rank's window as this process sees it: a fixed range of addresses that is filled
// from the front with segments of memory. The owner extends its own range; each peer imports the offer.
//   WEFT_TRY_ASSIGN(auto range, make_range({.device = cpu, .reserve_bytes = 1 << 30}));
//   WEFT_TRY_ASSIGN(FdMessage offer, range->extend(1 << 20));    // zero-filled; the offer travels to a peer ...
//   WEFT_TRY(peers_range->import(offer, 1 << 20));            // ... who sees the bytes at its own address
// One file per way of sharing: host_range.cc (memfd, for GPUs pinned), vmm_range.cc (CUDA VMM handles),
// ipc_range.cc (CUDA IPC). Threads: one caller at a time; base() and bytes() may be read at any time between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/status.h"
#include "bootstrap/fd_exchange.h"
#include "topology/topology.h"

namespace weft {

// kCudaPinned: memory of the host that kernels of GPUs use directly, and hosts. kByTransport: memory that the transport brings
// (Link::allocate()); no range of this layer.
enum class Sharing { kHostMemory, kCudaVmm, kCudaIpc, kCudaPinned, kByTransport };

inline std::ostream& operator<<(std::ostream& out, Sharing sharing) {
  switch (sharing) {
    case Sharing::kHostMemory:
      return out << "host memory";
    case Sharing::kCudaVmm:
      return out << "CUDA VMM";
    case Sharing::kCudaIpc:
      return out << "CUDA IPC";
    case Sharing::kCudaPinned:
      return out << "pinned host memory";
    case Sharing::kByTransport:
      return out << "memory of the transport";
  }
  return out << "?";
}

class MappedRange {
 public:
  virtual ~MappedRange() = default;

  // First address; fixed once bytes() > 0. Null before that where the address comes with the first segment
  // (CUDA IPC).
  virtual std::byte* base() const = 0;
  // Bytes from base() that may be used; a multiple of granularity().
  virtual uint64_t bytes() const = 0;
  virtual uint64_t granularity() const = 0;

  // Owner: adds `bytes` zero-filled bytes (a multiple of granularity()) at the end and returns what peers
  // import(). Errors: kCapacity beyond the reserved addresses, kUnsupported where the way of sharing cannot
  // grow, kSystem.
  virtual Result<FdMessage> extend(uint64_t bytes) = 0;
  // Peer: maps the segment of `bytes` bytes that the owner offered, after what is mapped already.
  virtual Status import(const FdMessage& offer, uint64_t bytes) = 0;
  // Unmaps what lies past the first `bytes` bytes: undoes an extend() or import() that some rank failed at.
  virtual void cut(uint64_t bytes) = 0;

  // Owner: a launch is about to use it. Host memory that is in use goes to huge pages, a part at a time.
  virtual void used() {}

  // Another name for this range inside the process; 0 where there is none. See find_range().
  virtual uint64_t local_name() const { return 0; }
};

// Bytes from the start of a range's host part to base(): the part, in whole huge pages, and addresses that nothing lies at.
// Everything that is counted from a window's base then means one thing on all ranks.
constexpr uint64_t kPartMultiple = uint64_t{2} << 20;
constexpr uint64_t before_base(uint64_t host_bytes) {
  return host_bytes == 0 ? 0
                         : (host_bytes + kPartMultiple - 1) / kPartMultiple * kPartMultiple + kPartMultiple;
}

struct RangeOptions {
  Device device;
  Sharing sharing = Sharing::kHostMemory;
  uint64_t reserve_bytes = 0;  // addresses to set aside; where the system allows less, less
  uint64_t least_bytes = 0;    // ... but never below this
  // Of memory of the host before base(), a multiple of kPartMultiple: the first segment of the range, of just so many bytes,
  // which bytes() does not count. 0: none.
  uint64_t host_bytes = 0;
};

// An empty range. Errors: kSystem when no addresses are left, kUnsupported when the device cannot share that
// way.
Result<std::shared_ptr<MappedRange>> make_range(const RangeOptions& options);

// The live range of this process with that local_name(), or null. Ranks that are threads of one process use
// each other's range itself: with a second mapping, a race detector would not see that two addresses are one
// memory.
std::shared_ptr<MappedRange> find_range(uint64_t local_name);

// How the ranks in `members` share memory; the same answer on every rank. `wanted`: "auto" takes VMM handles
// when every GPU has them, else CUDA IPC; "vmm" and "ipc" insist. Ignored on the host, and where `is_pinned`: some
// rank has port peers through a network that does not reach memory of GPUs. Errors: kInvalid for another word,
// kUnsupported when a rank cannot, naming it.
Result<Sharing> choose_sharing(const std::vector<RankFacts>& facts, const std::vector<int>& members,
                               std::string_view wanted, bool is_pinned);

// kCapacity where `more` bytes do not fit the addresses that were reserved for the range.
Status check_room(const MappedRange& range, uint64_t more, uint64_t reserved_bytes);

// One per way of sharing; make_range() picks.
Result<std::shared_ptr<MappedRange>> make_host_range(const RangeOptions& options);
Result<std::shared_ptr<MappedRange>> make_vmm_range(const RangeOptions& options);
Result<std::shared_ptr<MappedRange>> make_ipc_range(const RangeOptions& options);

}  // namespace weft
