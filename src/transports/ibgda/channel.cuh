// SPDX-License-Identifier: Apache-2.0
//
// The channel to a peer through queues of an mlx5 NIC that device code writes itself. Not run on hardware.
// Steps of a call: 1 reserve blocks of the queue   2 wait until the NIC is done with what stood there
// 3 write the entries   4 wait until those before are published   5 doorbell record, doorbell, once for all entries.
// Order: entries of one queue are carried out in order, so a signal behind its put is seen after it. With several queues
// to a peer, blocks of a kernel put through different ones; a signal then waits until the others are done.
// Waits: steps 2 and 4, flush(), and signals of several queues; bounded by the mesh. An entry that cannot be posted, or
// that the NIC refuses, breaks the queue: its fault box says why, later calls on it are dropped. Queues to other peers
// go on. All state is in memory, counted from when the queue was made: captured graphs replay.
#pragma once

#include "kernels/core/channel.cuh"
#include "kernels/core/wait.cuh"
#include "transports/ibgda/wire.h"

namespace weft {

struct IbgdaMesh;
namespace ibgda {
struct Ends;
}

class IbgdaChannel {
 public:
  WEFT_DEVICE IbgdaChannel(const IbgdaMesh& mesh, uint32_t peer) : mesh_(&mesh), peer_(peer) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    group.sync();  // every thread's part of the source is written
    if (group.rank() == 0) move_range(Way::kPut, dst, src, bytes, {});
    group.sync();
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    group.sync();
    if (group.rank() == 0) move_range(Way::kPut, dst, src, bytes, {Signal::kValue, word, value});
    group.sync();
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) {
    move_range(Way::kPut, 0, 0, 0, {Signal::kValue, word, value});
  }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) {
    move_range(Way::kPut, 0, 0, 0, {Signal::kAdd, word, n});
  }
  WEFT_DEVICE void flush();
  // Waits for the bytes: the own NIC has no entry that writes a word of its own window behind a read.
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    group.sync();  // no thread reads the old contents of the destination any more
    if (group.rank() == 0) get_range(dst, src, bytes, word, value);
    group.sync();
  }

 private:
  struct Signal {
    enum Kind { kNone, kValue, kAdd } kind = kNone;
    WindowOffset word = 0;
    uint64_t value = 0;
  };
  enum class Way { kPut, kGet };
  WEFT_DEVICE void move_range(Way way, WindowOffset dst, WindowOffset src, uint64_t bytes, Signal signal);
  WEFT_DEVICE void get_range(WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                             uint64_t value);
  WEFT_DEVICE ibgda::Entry range_entry(Way way, ibgda::Heading at, const ibgda::RemotePart& part,
                                       WindowOffset dst, WindowOffset src, uint32_t bytes);
  WEFT_DEVICE bool is_inside(const ibgda::Queue& queue, WindowOffset dst, WindowOffset src, uint64_t bytes,
                             const Signal& signal);
  WEFT_DEVICE ibgda::Entry signal_entry(const ibgda::Queue& queue, ibgda::Heading at,
                                        const ibgda::RemotePart& part, const Signal& signal);
  WEFT_DEVICE uint32_t own_place() const;
  WEFT_DEVICE ibgda::Ends ends() const;
  WEFT_DEVICE void settle_others(const ibgda::Queue& own);

  const IbgdaMesh* mesh_;
  uint32_t peer_;
};

// The channels to all peers, the own rank included. Passed to kernels by value.
struct IbgdaMesh {
  const ibgda::Queue* queues;      // [ranks, queues_per_peer]
  ibgda::QueueState* states;       // the same; each is its queue's, found without a look at that
  const ibgda::RemotePart* parts;  // [ranks]: this window's
  std::byte* own;                  // this rank's window
  uint64_t bytes;                  // of it
  uint64_t base;                   // its address, as this rank's NIC knows it
  uint64_t timeout_ns;
  uint32_t self, count, queues_per_peer;
  uint32_t key;        // big_endian(), of the own window
  uint32_t put_shift;  // one entry moves 2^this bytes at most
  uint32_t batch;      // entries that a call takes at a time, at most: half of a queue
  uint32_t is_near;    // queues and window lie in the GPU's own memory: fences need not reach beyond it
  uint32_t reserved;

  WEFT_DEVICE IbgdaChannel to(uint32_t peer) const { return IbgdaChannel(*this, peer); }
  WEFT_DEVICE uint32_t rank() const { return self; }
  WEFT_DEVICE uint32_t ranks() const { return count; }
  WEFT_DEVICE std::byte* local() const { return own; }
  WEFT_DEVICE std::byte* mapped_window(uint32_t) const { return nullptr; }
};
static_assert(sizeof(IbgdaMesh) == 88);

namespace ibgda {

// The posting rank, its peer, and the bound of its waits.
struct Ends {
  uint64_t timeout_ns;
  uint32_t self, peer;
  bool is_near;  // IbgdaMesh::is_near
};

WEFT_DEVICE void break_queue(const Queue& queue, Ends ends, Site site, uint64_t expected, uint64_t seen,
                             uint64_t waited_ns, uint32_t detail = 0) {
  raise(queue.fault, site, ends.self, ends.peer, expected, seen, waited_ns, detail);
  store_relaxed(&queue.state->is_broken, uint32_t{1});
}

WEFT_DEVICE const Completion* completion_of(const Queue& queue, uint64_t index) {
  return reinterpret_cast<const Completion*>(queue.entries) +
         (static_cast<uint32_t>(index) & queue.entry_mask);
}

// Entry end - 1 was refused; it may be one of many that were flushed after the first.
WEFT_DEVICE void refuse(const Queue& queue, Ends ends, uint64_t done, uint64_t end) {
  for (uint64_t index = queue.entry_mask ? done : end - 1; index < end; ++index) {
    const Completion* entry = completion_of(queue, index);
    const uint32_t last = load_acquire(&entry->last);
    if (opcode_of(last) != kRefused || index_of(last) != (index & 0xffffu)) continue;
    return break_queue(queue, ends, Site::kQueueRefused, index, done, 0,
                       static_cast<uint32_t>(entry->vendor) << 8 | entry->syndrome);
  }
}

// How many entries are done, after a look whether `want` are: at the completion of entry want - 1, or at the one that
// all share. `completed` is read before and after it: while that stays, no more than the queue's blocks can have been
// posted beyond, so 16 bits say which entry is meant.
WEFT_DEVICE uint64_t look(const Queue& queue, Ends ends, uint64_t want) {
  const uint64_t done = load_acquire(&queue.state->completed);
  if (done >= want) return done;
  const uint32_t last = load_acquire(&completion_of(queue, want - 1)->last);
  if (opcode_of(last) == kNotYet) return done;
  const auto ahead = static_cast<int16_t>(index_of(last) - static_cast<uint32_t>(done & 0xffffu));
  if (ahead < 0) return done;
  const uint64_t now = load_acquire(&queue.state->completed);
  if (now != done) return now;
  const uint64_t end = done + static_cast<uint64_t>(ahead) + 1;
  if (opcode_of(last) == kRefused) {
    refuse(queue, ends, done, end);
    return done;
  }
  max_local_release(&queue.state->completed, end);
  return end;
}

// Waits until `want` entries are done. False: they will not be. A thread that needs room first polls a quarter of the
// queue further: completions may lie across PCIe, and one successful poll is then enough for many calls.
WEFT_APART bool await_completed(const Queue& queue, Ends ends, uint64_t want, Site site) {
  if (site == Site::kQueueRoom && look(queue, ends, want + (queue.block_mask + 1) / 4) >= want)
    return load_relaxed(&queue.state->is_broken) == 0;
  uint64_t seen = 0, waited_ns = 0;
  bool is_broken = false;
  const WaitRule rule{ends.timeout_ns, queue.fault, ends.self, 0};
  const auto comes = [&] {
    seen = look(queue, ends, want);
    is_broken = load_relaxed(&queue.state->is_broken) != 0;
    return seen >= want || is_broken;
  };
  if (!poll(rule, waited_ns, comes)) {
    break_queue(queue, ends, site, want, seen, waited_ns);
    return false;
  }
  return !is_broken;
}

// Waits until the entries before `first` are published. False: they will not be.
WEFT_APART bool await_turn(const Queue& queue, Ends ends, uint64_t first) {
  uint64_t seen = 0, waited_ns = 0;
  bool is_broken = false;
  const WaitRule rule{ends.timeout_ns, queue.fault, ends.self, 0};
  const auto comes = [&] {
    seen = load_acquire(&queue.state->published);
    is_broken = load_relaxed(&queue.state->is_broken) != 0;
    return seen == first || is_broken;
  };
  if (!poll(rule, waited_ns, comes)) break_queue(queue, ends, Site::kQueueOrder, first, seen, waited_ns);
  return seen == first;
}

// Blocks that are taken, and whether all before them were published by then.
struct Turn {
  uint64_t first;
  bool is_next;
};

// Takes the next `count` blocks, which are at most all, and waits until the NIC no longer needs what stands there. The
// words of the state are asked for at once: one after the other they would take most of a call's time. Blocks of a queue that
// is broken are never published.
WEFT_DEVICE bool reserve(const Queue& queue, QueueState& state, Ends ends, uint32_t count, Turn& turn) {
  turn.first = add_local(&state.reserved, static_cast<uint64_t>(count));
  const uint32_t is_broken = load_relaxed(&state.is_broken);
  const uint64_t completed = load_signal(&state.completed);
  turn.is_next = load_signal(&state.published) == turn.first;
  if (is_broken != 0) return false;
  const uint64_t end = turn.first + count, blocks = uint64_t{queue.block_mask} + 1;
  return end <= blocks + completed || await_completed(queue, ends, end - blocks, Site::kQueueRoom);
}

WEFT_DEVICE void write_entry_to(const Queue& queue, uint64_t index, const Entry& entry) {
  auto* block =
      reinterpret_cast<Vec16*>(queue.ring + (static_cast<uint32_t>(index) & queue.block_mask) * kBlockBytes);
  WEFT_UNROLL
  for (uint32_t unit = 0; unit < kBlockBytes / kUnitBytes; ++unit) store_vec(block + unit, entry.units[unit]);
}

// Tells the NIC of entries that are written, in their order: the record never goes back. A doorbell may come after the next
// one's, which NICs tolerate, as they read the record too. Not inlined, as kernels with many registers would spill.
WEFT_APART bool publish(const Queue& queue, Ends ends, const Turn& turn, uint32_t count) {
  QueueState& state = *queue.state;
  if (!turn.is_next && !await_turn(queue, ends, turn.first)) return false;
  const uint64_t next = turn.first + count;
  const uint32_t number = queue.number;  // read before the fence, behind which memory is asked again
  uint64_t* const doorbell = queue.doorbell;
  if (ends.is_near) {
    store_release_local(queue.record + kRecordOfSends, record_word(next));
    store_register_local(doorbell, doorbell_word(next, number));
  } else {
    store_release(queue.record + kRecordOfSends, record_word(next));
    store_register(doorbell, doorbell_word(next, number));
  }
  store_after_register(&state.published, next);
  add_local(&state.rung, uint64_t{1});
  return true;
}

// Waits until everything published so far is done.
WEFT_DEVICE void settle(const Queue& queue, Ends ends) {
  const uint64_t want = load_acquire(&queue.state->published);
  if (load_acquire(&queue.state->completed) < want) await_completed(queue, ends, want, Site::kQueueFlush);
}

}  // namespace ibgda

WEFT_DEVICE uint32_t IbgdaChannel::own_place() const {
  const uint32_t which = mesh_->queues_per_peer == 1 ? 0 : Block().index() % mesh_->queues_per_peer;
  return peer_ * mesh_->queues_per_peer + which;
}

WEFT_DEVICE ibgda::Ends IbgdaChannel::ends() const {
  return {mesh_->timeout_ns, mesh_->self, peer_, mesh_->is_near != 0};
}

WEFT_DEVICE bool IbgdaChannel::is_inside(const ibgda::Queue& queue, WindowOffset dst, WindowOffset src,
                                         uint64_t bytes, const Signal& signal) {
  const uint64_t room = mesh_->bytes;
  const bool is_range = bytes <= room && dst <= room - bytes && src <= room - bytes;
  const bool is_word = signal.kind == Signal::kNone || (room >= 8 && signal.word <= room - 8);
  if (is_range && is_word && (dst | src | bytes) % ibgda::kUnitBytes == 0 && signal.word % 8 == 0)
    return true;
  ibgda::break_queue(queue, ends(), Site::kPortRange, room,
                     is_word && signal.word % 8 == 0 ? dst : signal.word, 0);
  return false;
}

WEFT_DEVICE ibgda::Entry IbgdaChannel::signal_entry(const ibgda::Queue& queue, ibgda::Heading at,
                                                    const ibgda::RemotePart& part, const Signal& signal) {
  const ibgda::Place word{part.base + signal.word, part.key};
  return signal.kind == Signal::kValue
             ? ibgda::value_entry(at, word, signal.value)
             : ibgda::add_entry(at, word, signal.value, {queue.sink, queue.sink_key});
}

// A put or a get; dst and src in the peer's window and the own, or the other way round.
WEFT_DEVICE ibgda::Entry IbgdaChannel::range_entry(Way way, ibgda::Heading at, const ibgda::RemotePart& part,
                                                   WindowOffset dst, WindowOffset src, uint32_t bytes) {
  return way == Way::kPut
             ? ibgda::write_entry(at, {part.base + dst, part.key}, {mesh_->base + src, mesh_->key}, bytes)
             : ibgda::read_entry(at, {mesh_->base + dst, mesh_->key}, {part.base + src, part.key}, bytes);
}

// Any number of bytes, then a signal or none: as few batches as the queue's size allows, one doorbell each. Fields of
// the queue and of the peer are loaded before blocks are reserved, so that all come in one trip to memory.
WEFT_DEVICE void IbgdaChannel::move_range(Way way, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                          Signal signal) {
  const uint32_t place = own_place();
  const ibgda::Queue& queue = mesh_->queues[place];
  const uint32_t number = queue.number;
  const ibgda::RemotePart part = mesh_->parts[peer_];
  if (!is_inside(queue, dst, src, bytes, signal)) return;
  if (signal.kind != Signal::kNone && mesh_->queues_per_peer > 1) settle_others(queue);
  const uint64_t put_bytes = uint64_t{1} << mesh_->put_shift;
  const uint64_t pieces = (bytes + put_bytes - 1) >> mesh_->put_shift;
  uint64_t left = pieces + (signal.kind != Signal::kNone);
  for (uint64_t done = 0; left > 0;) {
    const uint32_t count = left < mesh_->batch ? static_cast<uint32_t>(left) : mesh_->batch;
    ibgda::Turn turn{};
    if (!ibgda::reserve(queue, mesh_->states[place], ends(), count, turn)) return;
    for (uint32_t i = 0; i < count; ++i, --left) {
      // Completions that each entry has for itself are all written; of one that all share, a batch's last is enough.
      const bool is_signalled = queue.entry_mask != 0 || i + 1 == count;
      const ibgda::Heading at{static_cast<uint32_t>(turn.first + i), number,
                              is_signalled ? ibgda::kSignalled : 0};
      if (done == bytes) {
        ibgda::write_entry_to(queue, turn.first + i, signal_entry(queue, at, part, signal));
        continue;
      }
      const uint64_t rest = bytes - done;
      const auto length = static_cast<uint32_t>(rest < put_bytes ? rest : put_bytes);
      ibgda::write_entry_to(queue, turn.first + i,
                            range_entry(way, at, part, dst + done, src + done, length));
      done += length;
    }
    if (!ibgda::publish(queue, ends(), turn, count)) return;
  }
}

WEFT_DEVICE void IbgdaChannel::get_range(WindowOffset dst, WindowOffset src, uint64_t bytes,
                                         WindowOffset word, uint64_t value) {
  const ibgda::Queue& queue = mesh_->queues[own_place()];
  if (!is_inside(queue, dst, src, bytes, {Signal::kValue, word, value})) return;
  move_range(Way::kGet, dst, src, bytes, {});
  ibgda::settle(queue, ends());
  if (load_relaxed(&queue.state->is_broken) == 0)
    store_release(reinterpret_cast<uint64_t*>(mesh_->own + word), value);
}

// Waits until the peer has what was put through other queues.
WEFT_DEVICE void IbgdaChannel::settle_others(const ibgda::Queue& own) {
  for (uint32_t which = 0; which < mesh_->queues_per_peer; ++which) {
    const ibgda::Queue& queue = mesh_->queues[peer_ * mesh_->queues_per_peer + which];
    if (&queue != &own) ibgda::settle(queue, ends());
  }
}

WEFT_DEVICE void IbgdaChannel::flush() {
  for (uint32_t which = 0; which < mesh_->queues_per_peer; ++which) {
    const ibgda::Queue& queue = mesh_->queues[peer_ * mesh_->queues_per_peer + which];
    ibgda::settle(queue, ends());
  }
}

static_assert(Channel<IbgdaChannel>, "IbgdaChannel must model Channel");
static_assert(Mesh<IbgdaMesh>, "IbgdaMesh must model Mesh");

}  // namespace weft
