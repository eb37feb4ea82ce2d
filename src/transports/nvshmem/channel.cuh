// SPDX-License-Identifier: Apache-2.0
//
// The channel to a peer through NVSHMEM's device calls (calls.cuh).
//   put               nvshmem_putmem_nbi, by the whole warp where one calls
//   put_value         nvshmem_fence, then nvshmemx_signal_op(SET); signal_add: (ADD)
//   put_with_signal   put, then put_value: the fence covers its bytes and those of earlier puts
//   get               nvshmem_getmem, which returns with the bytes, then a store of the word
//   flush             nvshmem_quiet, of everything that this rank has put to anyone
// Words: the peer's kernels poll them as any others; NVSHMEM's contract lets signal calls alone change them from afar.
// Waits: none where NVSHMEM maps the peer. Else inside of NVSHMEM, without a deadline, in all of these calls: they are
// counted, and the host reports the rank and the peer of a stuck call (ports.h).
// No state: captured graphs replay.
#pragma once

#include "kernels/core/fault.h"
#include "transports/nvshmem/calls.cuh"

namespace weft {

struct NvshmemMesh;

class NvshmemChannel {
 public:
  WEFT_DEVICE NvshmemChannel(const NvshmemMesh& mesh, uint32_t peer) : mesh_(&mesh), peer_(peer) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    group.sync();  // every thread's part of the source is written
    move(Way::kPut, group, dst, src, bytes);
    group.sync();
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    put(group, dst, src, bytes);
    if (group.rank() == 0) put_value(word, value);
    group.sync();
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value);
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n);
  WEFT_DEVICE void flush();
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value);

 private:
  enum class Way { kPut, kGet };
  template <class Group>
  WEFT_DEVICE void move(Way way, Group group, WindowOffset dst, WindowOffset src, uint64_t bytes);
  WEFT_DEVICE void move(Way way, Warp warp, WindowOffset dst, WindowOffset src, uint64_t bytes);
  WEFT_DEVICE void move(Way way, Block block, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    if (block.rank() < Warp().size()) move(way, Warp(), dst, src, bytes);
  }
  WEFT_DEVICE bool is_inside(WindowOffset dst, WindowOffset src, uint64_t bytes) const;
  WEFT_DEVICE bool is_word(WindowOffset word) const;
  WEFT_DEVICE void begin() const;
  WEFT_DEVICE void end() const;

  const NvshmemMesh* mesh_;
  uint32_t peer_;
};

// The channels to all peers, the own rank included. Passed to kernels by value.
struct NvshmemMesh {
  const shmem::HostCalls* calls;  // on CPUs
  shmem::Watch* watch;            // [ranks]; null where NVSHMEM maps every peer
  std::byte* own;                 // this rank's window
  uint64_t bytes;                 // of it
  FaultBox* fault;
  uint32_t self, count;

  WEFT_DEVICE NvshmemChannel to(uint32_t peer) const { return NvshmemChannel(*this, peer); }
  WEFT_DEVICE uint32_t rank() const { return self; }
  WEFT_DEVICE uint32_t ranks() const { return count; }
  WEFT_DEVICE std::byte* local() const { return own; }
  WEFT_DEVICE std::byte* mapped_window(uint32_t) const { return nullptr; }
  // Every thread of a kernel, first of all. A module that NVSHMEM has not initialised is found here.
  WEFT_DEVICE void attend() const {
    if (Block().rank() != 0) return;
    const uint32_t rank = shmem::rank(self);
    if (rank != self) raise(fault, Site::kPortLayout, self, self, self, rank, 0);
  }
};
static_assert(sizeof(NvshmemMesh) == 48);

WEFT_DEVICE void NvshmemChannel::begin() const {
  if (mesh_->watch) add_release(&mesh_->watch[peer_].began, uint64_t{1});
}
WEFT_DEVICE void NvshmemChannel::end() const {
  if (mesh_->watch) add_release(&mesh_->watch[peer_].ended, uint64_t{1});
}

WEFT_DEVICE bool NvshmemChannel::is_inside(WindowOffset dst, WindowOffset src, uint64_t bytes) const {
  const uint64_t room = mesh_->bytes;
  if (bytes <= room && dst <= room - bytes && src <= room - bytes && (dst | src | bytes) % 16 == 0)
    return true;
  raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, room, dst, 0);
  return false;
}

WEFT_DEVICE bool NvshmemChannel::is_word(WindowOffset word) const {
  if (word % 8 == 0 && mesh_->bytes >= 8 && word <= mesh_->bytes - 8) return true;
  raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, mesh_->bytes, word, 0);
  return false;
}

template <class Group>
WEFT_DEVICE void NvshmemChannel::move(Way way, Group group, WindowOffset dst, WindowOffset src,
                                      uint64_t bytes) {
  if (group.rank() != 0 || bytes == 0 || !is_inside(dst, src, bytes)) return;
  begin();
  if (way == Way::kPut)
    shmem::put(mesh_->calls, mesh_->own + dst, mesh_->own + src, bytes, peer_);
  else
    shmem::get(mesh_->calls, mesh_->own + dst, mesh_->own + src, bytes, peer_);
  end();
}

// All threads of the warp.
WEFT_DEVICE void NvshmemChannel::move(Way way, Warp warp, WindowOffset dst, WindowOffset src,
                                      uint64_t bytes) {
  if (bytes == 0 || !is_inside(dst, src, bytes)) return;
  if (warp.rank() == 0) begin();
  if (way == Way::kPut)
    shmem::put_warp(mesh_->calls, mesh_->own + dst, mesh_->own + src, bytes, peer_);
  else
    shmem::get_warp(mesh_->calls, mesh_->own + dst, mesh_->own + src, bytes, peer_);
  if (warp.rank() == 0) end();
}

WEFT_DEVICE void NvshmemChannel::put_value(WindowOffset word, uint64_t value) {
  if (!is_word(word)) return;
  begin();
  shmem::set(mesh_->calls, reinterpret_cast<uint64_t*>(mesh_->own + word), value, peer_);
  end();
}

WEFT_DEVICE void NvshmemChannel::signal_add(WindowOffset word, uint64_t n) {
  if (!is_word(word)) return;
  begin();
  shmem::add(mesh_->calls, reinterpret_cast<uint64_t*>(mesh_->own + word), n, peer_);
  end();
}

WEFT_DEVICE void NvshmemChannel::flush() {
  begin();
  shmem::quiet(mesh_->calls);
  end();
}

template <class Group>
WEFT_DEVICE void NvshmemChannel::get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                     WindowOffset word, uint64_t value) {
  group.sync();  // no thread reads the old contents of the destination any more
  move(Way::kGet, group, dst, src, bytes);
  group.sync();
  if (group.rank() == 0 && is_word(word))
    store_release(reinterpret_cast<uint64_t*>(mesh_->own + word), value);
  group.sync();
}

static_assert(Channel<NvshmemChannel>, "NvshmemChannel must model Channel");
static_assert(Mesh<NvshmemMesh>, "NvshmemMesh must model Mesh");

}  // namespace weft
