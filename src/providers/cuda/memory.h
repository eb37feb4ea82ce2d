// SPDX-License-Identifier: Apache-2.0
//
// Memory of a rail as its peers find it, and a peer's memory as a rail finds it.
//   WEFT_TRY_ASSIGN(Enrolled* mine, own.enroll(range, access));                 // writes it on the control page
//   WEFT_TRY_ASSIGN(Found theirs, peer.find(key, address, bytes, kRemoteWrite)); // reads it there, each time
//   WEFT_TRY_ASSIGN(char* here, peer.map(theirs, copies));                      // of a GPU: its address in this process
// Keys are random and 64 bits long. A write looks for its key before it starts; a key that is taken back afterwards stops
// what has not started. Threads: one at a time.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "providers/cuda/control_page.h"
#include "providers/cuda/copies.h"
#include "providers/provider.h"

namespace weft::provider::cuda {

// What this rail registered.
struct Enrolled {
  Range range;
  uint32_t access = 0;
  uint64_t key = 0;
  Pinned pinned;                            // of the host
  std::vector<Segment> segments;            // kVmm: peers read them here
  std::vector<FileDescriptor> descriptors;  // theirs
  bool is_device() const { return range.kind == MemoryKind::kCuda; }
};

class OwnMemory {
 public:
  // `copies` may be null: a rail of the host alone.
  OwnMemory(ControlPage& page, const Copies* copies) : page_(page), copies_(copies) {}

  // Errors: kUnsupported for memory of a GPU that cannot be shared, kCapacity for one registration too many.
  Result<const Enrolled*> enroll(const Range& range, uint32_t access);
  void release(uint64_t key);
  const Enrolled* find(uint64_t key) const;
  // The registration if a peer may do this to it, or why not.
  Result<const Enrolled*> check(uint64_t key, uint64_t address, uint64_t bytes, Access wanted) const;

 private:
  Status write_export(Enrolled& enrolled, Export& place) const;

  ControlPage& page_;
  const Copies* copies_;
  std::unordered_map<uint64_t, std::unique_ptr<Enrolled>> enrolled_;
};

// A peer's registration, copied from its control page.
struct Found {
  uint64_t key = 0, base = 0, bytes = 0, block = 0, block_bytes = 0, segments_at = 0;
  uint64_t address = 0;
  uint32_t segments = 0;
  Place place = Place::kHost;
  char handle[kHandleBytes] = {};
  bool is_device() const { return place != Place::kHost; }
};

class PeerMemory {
 public:
  // Errors: kUnsupported where the system lets this process not into that one: another host, user or container.
  static Result<std::shared_ptr<PeerMemory>> open(const Contact& contact);
  ~PeerMemory();

  const Contact& contact() const { return contact_; }
  ControlPage& page() const { return *reinterpret_cast<ControlPage*>(shared_.data()); }
  bool is_this_process() const { return is_this_process_; }
  bool has_ended() const { return process_.has_ended(); }
  std::string who() const {
    return process_.is_named() ? process_.who() : text("pid {}", contact_.memory.pid);
  }

  // Errors: kInvalid "remote access error: ..." in words that a NIC would use.
  Result<Found> find(uint64_t key, uint64_t address, uint64_t bytes, Access wanted) const;
  // Where found.address is in this process; mapped at first use, and kept until its owner takes the key back.
  Result<char*> map(const Found& found, const Copies& copies);
  // Copies between host memory of two processes. 0, or an errno value.
  int move(Across way, void* here, uint64_t there, uint64_t bytes) const;
  // Unmaps what was taken back. Not while copies run.
  void sweep();

 private:
  struct Mapped {
    CUdeviceptr base = 0;  // of the block
    uint64_t bytes = 0;
    std::vector<uint64_t> segments;  // kVmm
    int device = -1;
    uint32_t keys = 0;  // that are in it
  };
  Result<Mapped> map_ipc(const Found& found, const Copies& copies) const;
  Result<Mapped> map_vmm(const Found& found, const Copies& copies) const;
  Status map_segments(const Found& found, const std::vector<Segment>& segments, const Copies& copies,
                      Mapped& mapped) const;
  void unmap(const Mapped& mapped) const;

  Contact contact_;
  SharedMemory shared_;
  NamedProcess process_;
  bool is_this_process_ = false;
  std::map<uint64_t, std::string> block_of_;  // by key
  std::map<std::string, Mapped>
      blocks_;  // one for each allocation: the same address may hold another one later
};

constexpr char kBeyond[] = "cuda: remote access error: beyond the registration";
inline bool is_within(uint64_t base, uint64_t size, uint64_t address, uint64_t bytes) {
  return address >= base && bytes <= size && address - base <= size - bytes;
}
// Why a peer may not do this to a registration; empty when it may.
std::string refusal(uint32_t access, uint64_t base, uint64_t size, uint64_t address, uint64_t bytes,
                    Access wanted);

}  // namespace weft::provider::cuda
