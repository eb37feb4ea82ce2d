// SPDX-License-Identifier: Apache-2.0
//
// A Window is memory allocated alike on every rank of a communicator, so that (rank, offset) names a byte.
//   WEFT_TRY_ASSIGN(std::unique_ptr<Window> window, Window::create(comm, 64 << 20));
//   window->base(peer) + offset        // load from and store to it, from host or device code of this rank
// Bytes are zero when the window is created or grown. Addresses never change.
// Threads: const methods may run concurrently; create() and grow() are collective calls of the communicator.
// Lifetime: must outlive every kernel that was given base() or table(); on a GPU, destroying it waits for the
// device. A rank may destroy its window before others do: the memory lives until the last rank has unmapped
// it (but not with CUDA IPC, the fallback: see ipc_range.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "comm/communicator.h"
#include "memory/device_memory.h"
#include "memory/range.h"

namespace weft {

struct SegmentOffer;
class LinkRange;

class Window {
 public:
  // Collective. `bytes` (at least 1, the same on all ranks) is rounded up to pages; bytes() says to what.
  // Errors, the same on all ranks: kInvalid when ranks ask for different sizes; kCapacity or kSystem when a
  // rank cannot allocate or map, naming it; kPeerLost naming the rank that is gone or stayed away.
  // `port_bytes`: port peers write to the first so many bytes alone, at places that kernels take from PortPlaces
  // (kernels/core/reach.cuh): then the window may have a host part for what they write. 0: they write anywhere, and all of it
  // lies where they can.
  // `word_bytes`: of these, the first so many hold all words and records; 0: they stand anywhere. Then the host part is that
  // short where payload lies in memory of the device.
  static Result<std::unique_ptr<Window>> create(std::shared_ptr<Communicator> comm, uint64_t bytes,
                                                uint64_t port_bytes = 0, uint64_t word_bytes = 0);
  ~Window();

  Status check_owner() const { return comm_->check_owner("window"); }
  uint64_t bytes() const { return bytes_; }
  // Whether it has a host part; else whether GPUs find all of it in pinned memory of the host.
  bool has_host_part() const { return host_bytes_ > 0; }
  bool is_pinned() const { return !has_host_part() && comm_->sharing() == Sharing::kCudaPinned; }
  // Among the windows of its communicator, the same on all ranks.
  int number() const { return number_; }
  // This process' mapping of a rank's window; null where the rank is not mapped.
  std::byte* base(int rank) const { return bases_[rank]; }
  std::byte* local() const { return bases_[comm_->rank()]; }
  // base() of all ranks, and the same in memory that device code of this rank can read.
  std::byte* const* bases() const { return bases_.data(); }
  std::byte* const* table() const { return table_; }
  const std::shared_ptr<Communicator>& communicator() const { return comm_; }
  // The mesh that kernels of this rank use to reach every peer's part, mapped or through a port.
  const MeshPart& mesh() const { return mesh_; }
  // Before each launch on it: see MappedRange::used().
  void used() const { own_->used(); }

  // Collective. Makes bytes() at least `at_least_bytes` (the same on all ranks); contents and addresses stay.
  // Not more than that: nothing changes. Errors as in create(), and kUnsupported with CUDA IPC or memory of a transport; after an
  // error the window is as before.
  Status grow(uint64_t at_least_bytes);

 private:
  Window(std::shared_ptr<Communicator> comm, uint64_t port_bytes, uint64_t word_bytes);
  Status add_host_part(uint64_t at_least_bytes, std::string_view operation);
  Status change_size(uint64_t at_least_bytes, std::string_view operation);
  Status add_segment(uint64_t at_least_bytes, SegmentOffer& offer, FdMessage& segment);
  Status exchange(const Status& added, const SegmentOffer& offer, FdMessage segment,
                  std::string_view operation);
  Status make_ranges(uint64_t bytes);
  Result<std::shared_ptr<MappedRange>> new_range(uint64_t bytes) const;
  Status import_all(const std::vector<SegmentOffer>& offers, const std::vector<FdMessage>& messages);
  Status import_from(int rank, const SegmentOffer& offer, const FdMessage& handle);
  Status agree(const Status& mine, std::string_view operation);
  Status publish_table();
  Status exchange_ports(const Status& mapped, uint64_t asked_bytes, uint64_t bytes,
                        std::string_view operation);
  Status make_mesh();
  WindowView view(uint64_t bytes) const;
  void cut_to(uint64_t bytes);

  std::shared_ptr<Communicator> comm_;
  uint64_t bytes_ = 0;
  uint64_t port_bytes_ = 0;  // where ports write; 0 without a host part
  uint64_t host_bytes_ = 0;  // of the host part
  int number_;               // among the communicator's windows
  bool is_known_ = false;    // to the communicator, by that number
  std::shared_ptr<MappedRange> own_;
  std::shared_ptr<LinkRange> brought_;  // own_, where the transport brings the memory; else null
  std::vector<std::shared_ptr<MappedRange>> ranges_;    // by rank; null where not mapped
  std::vector<std::shared_ptr<MappedRange>> imported_;  // those of ranges_ that this rank maps for itself
  std::vector<std::byte*> bases_;                       // by rank
  std::unique_ptr<DeviceCopy> device_table_;            // bases_ in GPU memory; null on the host
  std::byte* const* table_ = nullptr;                   // bases_, or its copy in GPU memory
  MeshPart mesh_;
};

}  // namespace weft
