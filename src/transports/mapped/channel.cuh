// SPDX-License-Identifier: Apache-2.0
//
// The channel to a peer whose window this rank can load and store: NVLink, PCIe peer memory, shared memory.
#pragma once

#include "kernels/core/channel.cuh"
#include "kernels/core/copy.cuh"

namespace weft {

class MappedChannel {
 public:
  WEFT_DEVICE MappedChannel(std::byte* own, std::byte* peer) : own_(own), peer_(peer) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    copy_bytes(group, peer_ + dst, own_ + src, bytes);
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    put(group, dst, src, bytes);
    group.sync();
    if (group.rank() == 0) put_value(word, value);
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) {
    store_release(reinterpret_cast<uint64_t*>(peer_ + word), value);
  }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) {
    add_release(reinterpret_cast<uint64_t*>(peer_ + word), n);
  }
  WEFT_DEVICE void flush() {}
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    copy_bytes(group, own_ + dst, peer_ + src, bytes);
    group.sync();
    if (group.rank() == 0) store_release(reinterpret_cast<uint64_t*>(own_ + word), value);
  }
  WEFT_DEVICE std::byte* mapped() const { return peer_; }

 private:
  std::byte* own_;
  std::byte* peer_;
};
static_assert(MappedReach<MappedChannel>, "MappedChannel must model Channel");

// The channels to all mapped peers. Passed to kernels by value. Beside ports (kernels/core/hybrid.cuh) the
// window of a peer that is not mapped is null; alone, none is.
struct MappedMesh {
  static constexpr uint32_t kNear = 16;

  std::byte* const* windows;  // [ranks], in memory that device code can read
  uint32_t self;
  uint32_t count;
  std::byte* near[kNear];  // the first of them, which come with the launch: a kernel starts with these

  // `bases` can be read here, `windows` in kernels; both are [count].
  static WEFT_DEVICE MappedMesh of(std::byte* const* bases, std::byte* const* windows, uint32_t self,
                                   uint32_t count) {
    MappedMesh mesh{windows, self, count, {}};
    for (uint32_t peer = 0; peer < count && peer < kNear; ++peer) mesh.near[peer] = bases[peer];
    return mesh;
  }

  WEFT_DEVICE std::byte* window(uint32_t peer) const { return peer < kNear ? near[peer] : windows[peer]; }
  WEFT_DEVICE MappedChannel to(uint32_t peer) const { return {local(), window(peer)}; }
  WEFT_DEVICE uint32_t rank() const { return self; }
  WEFT_DEVICE uint32_t ranks() const { return count; }
  WEFT_DEVICE std::byte* local() const { return window(self); }
};
static_assert(MappedMeshOnly<MappedMesh>, "MappedMesh must model Mesh");

}  // namespace weft
