// SPDX-License-Identifier: Apache-2.0
//
// The channel to a peer through NCCL's GIN (gin.cuh). Bytes are GIN's puts. A value or an add is a record in the peer's
// inbox, counted by a strong signal (wire.h): a rank that sees the count sees the record, and everything put before it.
// Steps of a signal: 1 take a number   2 wait for its turn, and until the peer has room   3 put the record, signal
// Receiving: no host thread can write words that kernels write too. So waiting threads apply the records that have
// arrived: pause() of kernels with this mesh calls help_while_waiting(). A word changes only while a thread of its rank
// waits for something.
// Waits: step 2, room in NCCL's queue, flush(), get(); bounded by the mesh. A wait in vain breaks the way to that peer:
// the fault box says why, later calls on it are dropped.
// All state is in memory, counted from when the communicator was made: captured graphs replay.
#pragma once

#include "kernels/core/wait.cuh"
#include "transports/nccl/gin.cuh"

namespace weft {

struct NcclMesh;

class NcclChannel {
 public:
  WEFT_DEVICE NcclChannel(const NcclMesh& mesh, uint32_t peer) : mesh_(&mesh), peer_(peer) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    group.sync();  // every thread's part of the source is written
    if (group.rank() == 0) put_range(dst, src, bytes);
    group.sync();
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    group.sync();
    if (group.rank() == 0) {
      put_range(dst, src, bytes);
      tell(0, word, value);
    }
    group.sync();
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) { tell(0, word, value); }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) { tell(nccl_gin::kAdd, word, n); }
  WEFT_DEVICE void flush();
  // Waits for the bytes: GIN has no action behind a get.
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    group.sync();  // no thread reads the old contents of the destination any more
    if (group.rank() == 0) get_range(dst, src, bytes, word, value);
    group.sync();
  }

 private:
  WEFT_DEVICE void put_range(WindowOffset dst, WindowOffset src, uint64_t bytes);
  WEFT_DEVICE void get_range(WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                             uint64_t value);
  WEFT_DEVICE void tell(uint64_t op, WindowOffset word, uint64_t value);
  WEFT_DEVICE bool is_inside(WindowOffset dst, WindowOffset src, uint64_t bytes) const;
  WEFT_DEVICE bool is_word(WindowOffset word) const;

  const NcclMesh* mesh_;
  uint32_t peer_;
};

// The channels to all peers, the own rank included. Passed to kernels by value.
struct NcclMesh {
  const nccl_gin::DevComm* comm;
  void* window;  // ncclWindow_t
  void* inbox_window;
  const nccl_gin::Record* inbox;         // [ranks, records], this rank's
  nccl_gin::Outgoing* outgoing;          // [ranks]
  nccl_gin::Incoming* incoming;          // [ranks]
  const uint64_t* places;                // [ranks]: window_bits() of this window there
  const nccl_gin::KnownWindow* windows;  // [kWindows], this rank's
  std::byte* own;                        // this rank's window
  uint64_t bytes;                        // of it
  uint64_t timeout_ns;
  FaultBox* fault;
  uint32_t self, count;
  uint32_t records;  // room of an inbox for those of one rank; a power of two
  uint32_t reserved;

  WEFT_DEVICE NcclChannel to(uint32_t peer) const { return NcclChannel(*this, peer); }
  WEFT_DEVICE uint32_t rank() const { return self; }
  WEFT_DEVICE uint32_t ranks() const { return count; }
  WEFT_DEVICE std::byte* local() const { return own; }
  WEFT_DEVICE std::byte* mapped_window(uint32_t) const { return nullptr; }
  // Every thread of a kernel, first of all: this mesh is helped while they wait.
  WEFT_DEVICE void attend() const;
};
static_assert(sizeof(NcclMesh) == 112);

namespace nccl_gin {

WEFT_DEVICE uint32_t context_to(const NcclMesh& mesh, uint32_t peer) {
  return context_of(*mesh.comm, mesh.self, peer);
}
WEFT_DEVICE uint32_t came_from(uint32_t rank) {
  return rank;
}
WEFT_DEVICE uint32_t taken_by(const NcclMesh& mesh, uint32_t rank) {
  return mesh.count + rank;
}

// No thread waits for a word of a window that is gone.
WEFT_DEVICE void write_word(const NcclMesh& mesh, uint64_t value, uint64_t head) {
  const KnownWindow& window = mesh.windows[slot_of(head)];
  const uint64_t bytes = load_relaxed(&window.bytes), word = word_of(head);
  if (bytes < 8 || word > bytes - 8 || load_relaxed(&window.use) != use_of(head)) return;
  std::byte* base =
      reinterpret_cast<std::byte*>(load_relaxed(reinterpret_cast<const uint64_t*>(&window.base)));
  auto* at = reinterpret_cast<uint64_t*>(base + word);
  if ((head & kAdd) == 0)
    store_release(at, value);
  else
    add_release(at, value);
}

// Whether NCCL's queue to a peer has room for descriptors up to number `end`, after a look at it if need be.
WEFT_APART bool has_room(const NcclMesh& mesh, uint32_t peer, uint64_t end) {
  Outgoing& out = mesh.outgoing[peer];
  if (end <= load_relaxed(&out.may_reach)) return true;
  const uint64_t seen = load_relaxed(&out.done);
  const Queue queue = queue_to(*mesh.comm, context_to(mesh, peer), peer);
  const uint32_t ahead = queue.done - static_cast<uint32_t>(seen);
  const uint64_t done = ahead < 1u << 31 ? seen + ahead : seen;
  const uint64_t reach = queue.room == 0 ? ~uint64_t{0} : done + usable(queue.room);
  max_local_release(&out.done, done);
  max_local_release(&out.may_reach, reach);
  return end <= reach;
}

// Tells the peer how many of its records have been taken. False: NCCL's queue is full; another look tries again.
WEFT_DEVICE bool tell_taken(const NcclMesh& mesh, uint32_t peer, uint64_t count) {
  Outgoing& out = mesh.outgoing[peer];
  if (load_relaxed(&out.is_broken) != 0) return false;
  const uint64_t end = add_local(&out.descriptors, uint64_t{1}) + 1;
  if (!has_room(mesh, peer, end)) {
    add_local(&out.descriptors, ~uint64_t{0});
    return false;
  }
  signal_add(*mesh.comm, context_to(mesh, peer), peer, taken_by(mesh, mesh.self), count);
  return true;
}

// Applies the records of one peer, if any came and no other thread does so. True: it applied some.
WEFT_DEVICE bool take_records(const NcclMesh& mesh, uint32_t peer) {
  Incoming& in = mesh.incoming[peer];
  const uint32_t context = context_to(mesh, peer);
  const uint64_t untold = load_relaxed(&in.taken) - load_relaxed(&in.told);
  if (read_signal(*mesh.comm, context, came_from(peer)) == load_relaxed(&in.taken) &&
      untold < mesh.records / 4)
    return false;
  if (exchange_local(&in.is_busy, uint32_t{1}) != 0) return false;
  load_acquire(&in.is_busy);  // what who was here before has written
  uint64_t taken = load_relaxed(&in.taken);
  const uint64_t came = read_signal(*mesh.comm, context, came_from(peer));
  const bool is_any = came != taken;
  const Record* from = mesh.inbox + static_cast<uint64_t>(peer) * mesh.records;
  for (; taken != came; ++taken) {
    const Record* record = from + (taken & (mesh.records - 1));
    write_word(mesh, load_relaxed(&record->value), load_relaxed(&record->head));
  }
  store_relaxed(&in.taken, taken);
  const uint64_t told = load_relaxed(&in.told);
  if (taken - told >= mesh.records / 4 && tell_taken(mesh, peer, taken - told))
    store_relaxed(&in.told, taken);
  store_release(&in.is_busy, uint32_t{0});
  return is_any;
}

inline constexpr uint32_t kPeersALook = 8;

// Looks at some peers, others each time.
WEFT_APART bool help(const NcclMesh& mesh) {
  const uint32_t looks = mesh.count < kPeersALook ? mesh.count : kPeersALook;
  uint32_t peer = mesh.count <= kPeersALook ? 0 : static_cast<uint32_t>(now_ns() >> 5) % mesh.count;
  bool is_any = false;
  WEFT_ROLLED
  for (uint32_t i = 0; i < looks; ++i) {
    is_any = take_records(mesh, peer) || is_any;
    peer = peer + 1 < mesh.count ? peer + 1 : 0;
  }
  return is_any;
}

WEFT_DEVICE void break_way(const NcclMesh& mesh, uint32_t peer, Site site, uint64_t expected, uint64_t seen,
                           uint64_t waited_ns) {
  raise(mesh.fault, site, mesh.self, peer, expected, seen, waited_ns);
  store_relaxed(&mesh.outgoing[peer].is_broken, uint32_t{1});
}

// Waits until come(seen) says so, at most for the mesh's time. False: the way to the peer is broken.
template <class Come>
WEFT_DEVICE bool await(const NcclMesh& mesh, uint32_t peer, Site site, uint64_t expected, Come come) {
  const WaitRule rule{mesh.timeout_ns, mesh.fault, mesh.self, 0};
  const Outgoing& out = mesh.outgoing[peer];
  uint64_t seen = 0, waited_ns = 0;
  const auto ends = [&] { return come(seen) || load_relaxed(&out.is_broken) != 0; };
  if (!poll(rule, waited_ns, ends)) break_way(mesh, peer, site, expected, seen, waited_ns);
  return load_relaxed(&out.is_broken) == 0;
}

// Until the bytes of the first `count` puts have been read here.
WEFT_APART bool await_puts(const NcclMesh& mesh, uint32_t peer, uint64_t count) {
  const uint32_t context = context_to(mesh, peer);
  return await(mesh, peer, Site::kPortFlush, count,
               [&](uint64_t& seen) { return (seen = read_counter(*mesh.comm, context, peer)) >= count; });
}

// Takes `count` descriptors of NCCL's queue, and waits until it has room for them. `end`: the number behind them.
WEFT_APART bool take_descriptors(const NcclMesh& mesh, uint32_t peer, uint32_t count, uint64_t& end) {
  Outgoing& out = mesh.outgoing[peer];
  end = add_local(&out.descriptors, uint64_t{count}) + count;
  if (has_room(mesh, peer, end)) return load_relaxed(&out.is_broken) == 0;
  return await(mesh, peer, Site::kQueueRoom, end, [&](uint64_t& seen) {
    const bool has = has_room(mesh, peer, end);
    seen = load_relaxed(&out.may_reach);
    return has;
  });
}

// Waits until NCCL is done with descriptors before number `end`.
WEFT_APART bool await_descriptors(const NcclMesh& mesh, uint32_t peer, uint64_t end) {
  Outgoing& out = mesh.outgoing[peer];
  return await(mesh, peer, Site::kPortFlush, end, [&](uint64_t& seen) {
    if (load_relaxed(&out.may_reach) == ~uint64_t{0}) return true;  // it keeps no queue
    has_room(mesh, peer, ~uint64_t{1});                             // a look
    return (seen = load_relaxed(&out.done)) >= end;
  });
}

// Until all records before `number` are on their way, and the peer has taken what stood in its place.
WEFT_APART bool await_turn(const NcclMesh& mesh, uint32_t peer, uint64_t number) {
  const Outgoing& out = mesh.outgoing[peer];
  const uint32_t context = context_to(mesh, peer);
  if (!await(mesh, peer, Site::kQueueOrder, number,
             [&](uint64_t& seen) { return (seen = load_acquire(&out.posted)) == number; }))
    return false;
  const uint64_t want = number < mesh.records ? 0 : number + 1 - mesh.records;
  return await(mesh, peer, Site::kPortFull, want, [&](uint64_t& seen) {
    return (seen = want == 0 ? 0 : read_signal(*mesh.comm, context, taken_by(mesh, peer))) >= want;
  });
}

// One record. Not inlined, as kernels with many registers would spill.
WEFT_APART void send_record(const NcclMesh& mesh, uint32_t peer, uint64_t value, uint64_t head) {
  Outgoing& out = mesh.outgoing[peer];
  if (load_relaxed(&out.is_broken) != 0) return;
  const uint64_t number = add_local(&out.reserved, uint64_t{1});
  uint64_t end = 0;
  if (!await_turn(mesh, peer, number) || !take_descriptors(mesh, peer, 2, end)) return;
  const uint32_t context = context_to(mesh, peer);
  const uint64_t at =
      (static_cast<uint64_t>(mesh.self) * mesh.records + (number & (mesh.records - 1))) * sizeof(Record);
  put_value(*mesh.comm, context, peer, mesh.inbox_window, at, value, -1);
  put_value(*mesh.comm, context, peer, mesh.inbox_window, at + 8, head, came_from(mesh.self));
  store_release(&out.posted, number + 1);
}

#if defined(WEFT_HELP_WHILE_WAITING)
// The mesh that the kernel's waiting threads help.
WEFT_DEVICE const NcclMesh*& helped_mesh() {
  __shared__ const NcclMesh* mesh;
  return mesh;
}
#endif

}  // namespace nccl_gin

#if defined(WEFT_HELP_WHILE_WAITING)
WEFT_APART void help_while_waiting() {
  nccl_gin::help(*nccl_gin::helped_mesh());
}
// A communicator that is not laid out as the headers say is found here.
WEFT_DEVICE void NcclMesh::attend() const {
  const Block block;
  if (block.rank() == 0) {
    nccl_gin::helped_mesh() = this;
    const uint32_t rank = nccl_gin::rank_of(*comm), ranks = nccl_gin::ranks_of(*comm);
    if (rank != self || ranks != count) nccl_gin::break_way(*this, self, Site::kPortLayout, self, rank, 0);
  }
  block.sync();
}
#else
WEFT_DEVICE void NcclMesh::attend() const {}
#endif

WEFT_DEVICE bool NcclChannel::is_inside(WindowOffset dst, WindowOffset src, uint64_t bytes) const {
  const uint64_t room = mesh_->bytes;
  if (bytes <= room && dst <= room - bytes && src <= room - bytes && (dst | src | bytes) % 16 == 0)
    return true;
  raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, room, dst, 0);
  return false;
}

WEFT_DEVICE bool NcclChannel::is_word(WindowOffset word) const {
  if (word % 8 == 0 && mesh_->bytes >= 8 && word <= mesh_->bytes - 8) return true;
  raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, mesh_->bytes, word, 0);
  return false;
}

WEFT_DEVICE void NcclChannel::put_range(WindowOffset dst, WindowOffset src, uint64_t bytes) {
  nccl_gin::Outgoing& out = mesh_->outgoing[peer_];
  if (!is_inside(dst, src, bytes) || load_relaxed(&out.is_broken) != 0) return;
  const uint32_t context = nccl_gin::context_to(*mesh_, peer_);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t left = bytes - done;
    const uint64_t part = left < nccl_gin::kPutBytes ? left : nccl_gin::kPutBytes;
    uint64_t end = 0;
    if (!nccl_gin::take_descriptors(*mesh_, peer_, 1, end)) return;
    add_local(&out.asked_puts, uint64_t{1});
    nccl_gin::put(*mesh_->comm, context, peer_, mesh_->window, dst + done, mesh_->window, src + done, part,
                  peer_);
    done += part;
  }
}

WEFT_DEVICE void NcclChannel::get_range(WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                                        uint64_t value) {
  if (!is_inside(dst, src, bytes) || !is_word(word)) return;
  if (load_relaxed(&mesh_->outgoing[peer_].is_broken) != 0) return;
  const uint32_t context = nccl_gin::context_to(*mesh_, peer_);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t left = bytes - done;
    const uint64_t part = left < nccl_gin::kPutBytes ? left : nccl_gin::kPutBytes;
    uint64_t end = 0;
    if (!nccl_gin::take_descriptors(*mesh_, peer_, 1, end)) return;
    nccl_gin::get(*mesh_->comm, context, peer_, mesh_->window, dst + done, src + done, part);
    done += part;
    if (done == bytes && !nccl_gin::await_descriptors(*mesh_, peer_, end)) return;
  }
  if (bytes > 0) nccl_gin::settle_gets(*mesh_->comm, context, peer_);
  store_release(reinterpret_cast<uint64_t*>(mesh_->own + word), value);
}

WEFT_DEVICE void NcclChannel::tell(uint64_t op, WindowOffset word, uint64_t value) {
  if (!is_word(word)) return;
  nccl_gin::send_record(*mesh_, peer_, value, op | mesh_->places[peer_] | word / 8);
}

WEFT_DEVICE void NcclChannel::flush() {
  nccl_gin::await_puts(*mesh_, peer_, load_relaxed(&mesh_->outgoing[peer_].asked_puts));
}

static_assert(Channel<NcclChannel>, "NcclChannel must model Channel");
static_assert(Mesh<NcclMesh>, "NcclMesh must model Mesh");

}  // namespace weft
