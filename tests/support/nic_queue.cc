// SPDX-License-Identifier: Apache-2.0
#include "support/nic_queue.h"

#include <algorithm>
#include <cstring>

namespace weft::testing {
namespace {

using ibgda::kBlockBytes;
using ibgda::Opcode;
using ibgda::Syndrome;

constexpr std::byte kConsumed{0xDB};
constexpr size_t kFlightsMax = 64, kAnswersMax = 16;
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 30;

uint32_t load32(const std::byte* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return big_endian(value);
}
uint64_t load64(const std::byte* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return big_endian(value);
}
template <class T>
T atomic_load(const T* at) {
  return std::atomic_ref<T>(*const_cast<T*>(at)).load(std::memory_order_acquire);
}
template <class T>
void atomic_store(T* at, T value) {
  std::atomic_ref<T>(*at).store(value, std::memory_order_release);
}
// How far `to` lies beyond `from`, of indices that wrap; negative: it is behind.
int16_t distance(uint64_t from, uint64_t to) {
  return static_cast<int16_t>(static_cast<uint16_t>(to) - static_cast<uint16_t>(from));
}

// Units that an operation may have.
bool is_legal(Opcode opcode, uint32_t units) {
  switch (opcode) {
    case Opcode::kNop:
      return units == 1;
    case Opcode::kWrite:
    case Opcode::kWriteImmediate:
      return units == 3 || units == 4;  // data or up to 12 bytes inline; up to 28
    case Opcode::kRead:
      return units == 3;
    case Opcode::kCompareSwap:
    case Opcode::kFetchAdd:
      return units == 4;
    case Opcode::kDump:
      return units == 2;
  }
  return false;
}

std::string decode_inline(const std::byte* at, uint32_t units_left, Decoded& out) {
  const uint32_t bytes = load32(at) & ~ibgda::kInline;
  if (bytes > 1023) return text("inline of {} bytes", bytes);
  if ((4 + bytes + 15) / 16 != units_left) return text("inline of {} bytes in {} units", bytes, units_left);
  for (uint32_t i = 4 + bytes; i < units_left * 16; ++i)
    if (at[i] != std::byte{0}) return text("inline padding is not zero");
  out.inline_bytes.assign(at + 4, at + 4 + bytes);
  out.bytes = bytes;
  return "";
}

std::string decode_data(const std::byte* at, Decoded& out) {
  const uint32_t bytes = load32(at);
  if (bytes & ibgda::kInline) return "data segment of more than 31 bits";
  out.bytes = bytes == 0 ? uint64_t{1} << 31 : bytes;
  out.local_key = load32(at + 4);
  out.local = load64(at + 8);
  out.has_data = true;
  return "";
}

}  // namespace

std::string decode(const std::vector<std::byte>& entry, uint64_t index, uint32_t queue, Decoded& out) {
  const std::byte* at = entry.data();
  const uint32_t head = load32(at), second = load32(at + 4), units = second & 255;
  out.opcode = head & 255;
  out.blocks = std::max(1u, (units + 3) / 4);
  if (head >> 24 != 0) return text("opmod {}", head >> 24);
  if ((head >> 8 & 0xffff) != (index & 0xffff))
    return text("index {}, expected {}", head >> 8 & 0xffff, index & 0xffff);
  if (second >> 8 != queue) return text("queue {}, expected {}", second >> 8, queue);
  const auto opcode = static_cast<Opcode>(out.opcode);
  if (!is_legal(opcode, units)) return text("opcode {} with {} units", out.opcode, units);
  if (at[8] != std::byte{0} || at[9] != std::byte{0} || at[10] != std::byte{0})
    return "signature or stream channel is not zero";
  out.flags = static_cast<uint32_t>(at[11]);
  if ((out.flags & 0x13) != 0) return text("flags {}", out.flags);
  if (out.flags >> 5 > 4) return text("fence {}", out.flags >> 5);
  if (load32(at + 12) != 0 && opcode != Opcode::kWriteImmediate) return "an immediate that none takes";
  if (opcode == Opcode::kNop) return "";
  if (opcode == Opcode::kDump) return decode_data(at + 16, out);
  out.has_remote = true;
  out.remote = load64(at + 16);
  out.remote_key = load32(at + 24);
  if (load32(at + 28) != 0) return "remote address segment: reserved is not zero";
  if (opcode == Opcode::kFetchAdd || opcode == Opcode::kCompareSwap) {
    out.add = load64(at + 32);
    out.compare = load64(at + 40);
    if (opcode == Opcode::kFetchAdd && out.compare != 0) return "fetch-add: compare is not zero";
    const std::string why = decode_data(at + 48, out);
    return why.empty() && out.bytes != 8 ? text("atomic of {} bytes", out.bytes) : why;
  }
  if (load32(at + 32) & ibgda::kInline) return decode_inline(at + 32, units - 2, out);
  if (units != 3) return text("opcode {} with {} units and no inline", out.opcode, units);
  return decode_data(at + 32, out);
}

ModelQueue::ModelQueue(std::shared_ptr<NicShared> shared, std::shared_ptr<ModelNic::Core> nic,
                       std::shared_ptr<const void> held, const ibgda::QueueMemory& at, bool fills,
                       uint64_t seed, FarQueue far)
    : shared_(std::move(shared)),
      nic_(std::move(nic)),
      held_(std::move(held)),
      fills_(fills),
      at_(at),
      far_(std::move(far)),
      random_(seed),
      hashes_(at.blocks) {
  reset();
}

void ModelQueue::fail(const std::string& what) {
  shared_->fail(text("queue {}: {}", at_.number, what));
}

// ---- its life

namespace {
struct QueueAddress {
  char tag[4] = {'n', 'i', 'c', 'm'};
  uint32_t number = 0, psn = 0, generation = 0;
};
}  // namespace

std::string ModelQueue::address() {
  std::lock_guard lock(mutex_);
  const QueueAddress own{.number = at_.number, .psn = psn_, .generation = generation_};
  return {reinterpret_cast<const char*>(&own), sizeof own};
}

Status ModelQueue::connect(std::string_view address) {
  QueueAddress peer;
  if (address.size() != sizeof peer || address.substr(0, 4) != "nicm")
    return Status::invalid("address: got {} bytes that no model made", address.size());
  std::memcpy(&peer, address.data(), sizeof peer);
  std::lock_guard lock(mutex_);
  if (state_ != State::kReset) return Status::make(Code::kSystem, "the queue is connected already");
  peer_ = peer.number;
  accepts_.store(uint64_t{peer.number} << 32 | peer.psn);
  state_ = State::kReady;
  return {};
}

void ModelQueue::reset() {
  std::lock_guard lock(mutex_);
  accepts_.store(0);
  state_ = State::kReset;
  flights_.clear();
  bound_ = fetched_ = retired_ = completions_ = taken_ = 0;
  doorbell_seen_ = rung_ = 0;
  refuses_.reset();
  psn_ = static_cast<uint32_t>(random_() & 0xffffff);
  ++generation_;
  if (fills_) fill();
}

void ModelQueue::fill() {
  std::memset(at_.ring, static_cast<int>(kConsumed), uint64_t{at_.blocks} * kBlockBytes);
  std::memset(at_.completions, 0, uint64_t{at_.entries} * kBlockBytes);
  for (uint64_t i = 0; i < at_.entries; ++i)
    at_.completions[i * kBlockBytes + kBlockBytes - 1] = std::byte{ibgda::kNotYetByte};
  atomic_store(at_.record, 0u);
  atomic_store(at_.record + 1, 0u);
  atomic_store(at_.doorbell, uint64_t{0});
  copy_to_device(at_.ring, (uint64_t{at_.blocks} + at_.entries + 1) * kBlockBytes);
}

// ---- memory of a device: what lies at the same place as in the host's

void ModelQueue::copy_from_device(void* to, uint64_t bytes) {
  if (!far_.room) return;
  const Status copied = far_.room->read(to, far_.at.ring + (static_cast<std::byte*>(to) - at_.ring), bytes);
  if (!copied.ok()) fail(copied.message());
}

void ModelQueue::copy_to_device(const void* from, uint64_t bytes) {
  if (!far_.room) return;
  const Status copied =
      far_.room->write(far_.at.ring + (static_cast<const std::byte*>(from) - at_.ring), from, bytes);
  if (!copied.ok()) fail(copied.message());
}

uint32_t ModelQueue::posted() {
  std::lock_guard lock(mutex_);
  copy_from_device(at_.record, kBlockBytes);
  return big_endian(at_.record[ibgda::kRecordOfSends]);
}

ibgda::Completion ModelQueue::completion(uint32_t index) {
  std::lock_guard lock(mutex_);
  ibgda::Completion found;
  std::memcpy(&found, at_.completions + (index & (at_.entries - 1)) * kBlockBytes, sizeof found);
  return found;
}

Status ModelQueue::put_entry(uint32_t index, const ibgda::Entry& entry) {
  WEFT_TRY(far_.room->write(far_.at.ring + (index & (at_.blocks - 1)) * kBlockBytes, &entry, sizeof entry));
  const uint32_t word = ibgda::record_word(index + 1);
  return far_.room->write(far_.at.record + ibgda::kRecordOfSends, &word, sizeof word);
}

void ModelQueue::refuse_next(Syndrome why) {
  std::lock_guard lock(mutex_);
  refuses_ = why;
}

void ModelQueue::set_taken(uint64_t completions) {
  std::lock_guard lock(mutex_);
  taken_ = completions;
}

void ModelQueue::ring(uint64_t doorbell) {
  std::lock_guard lock(mutex_);
  rung_ = doorbell;
}

// ---- a turn

bool ModelQueue::step() {
  constexpr int kActs = 16;
  std::lock_guard lock(mutex_);
  if (state_ == State::kReset || !nic_->is_alive.load()) return false;
  const NicPlan& plan = shared_->plan;
  if (plan.stalls > 0) {
    if (Clock::now() < stands_until_) return false;
    if (chance(plan.stalls)) {
      stands_until_ = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(plan.stall_s * 1e6));
      return false;
    }
  }
  bool any = look_at_doorbell();
  if (shared_->holds.load()) return any;
  for (int act = 0; act < kActs; ++act) {
    if (chance(plan.passes)) continue;
    bool did = false;
    switch (random_() % 4) {
      case 0:
        did = fetch();
        break;
      case 1:
        did = carry_out();
        break;
      case 2:
        did = answer();
        break;
      default:
        did = retire();
    }
    any = any || did;
  }
  if (state_ == State::kError) flush();
  return any || !flights_.empty() || fetched_ != bound_;
}

// Wakes up on the doorbell alone. What there is to do: the later of doorbell and record; in recovery the record alone.
bool ModelQueue::look_at_doorbell() {
  const uint64_t doorbell = shared_->plan.is_rung_by_host ? rung_ : atomic_load(at_.doorbell);
  if (doorbell == doorbell_seen_ || chance(shared_->plan.passes)) return false;
  doorbell_seen_ = doorbell;
  const uint32_t first = big_endian(static_cast<uint32_t>(doorbell));
  const uint32_t second = big_endian(static_cast<uint32_t>(doorbell >> 32));
  if (first >> 24 != 0 || (first & 255) != 0 || second != at_.number << 8)
    fail(text("doorbell {}, {}", first, second));
  copy_from_device(at_.record, kBlockBytes);
  const uint32_t record = big_endian(atomic_load(at_.record + ibgda::kRecordOfSends));
  if (record >> 16 != 0) fail(text("doorbell record {}", record));
  const uint64_t rung = first >> 8 & 0xffff;
  if (distance(rung, record) < 0) fail(text("doorbell {} before its record {}", rung, record));
  if (atomic_load(at_.record) != 0) fail("the record of receives was written");
  const bool recovers = chance(shared_->plan.recovers);
  const int16_t by_record = distance(bound_, record), by_doorbell = distance(bound_, rung);
  const int16_t ahead = recovers ? by_record : std::max(by_record, by_doorbell);
  if (ahead > 0) accept(bound_ + static_cast<uint64_t>(ahead));
  ++shared_->doorbells;  // a test that waits for it may change what was accepted
  return true;
}

void ModelQueue::accept(uint64_t bound) {
  if (bound - retired_ > at_.blocks) {
    fail(text("told of {} blocks, the ring has {}", bound - retired_, at_.blocks));
    bound = retired_ + at_.blocks;
  }
  for (uint64_t at = bound_; at < bound;) {  // up to the ring's end, and from its begin
    const uint64_t place = at % at_.blocks, blocks = std::min(bound - at, at_.blocks - place);
    copy_from_device(at_.ring + place * kBlockBytes, blocks * kBlockBytes);
    at += blocks;
  }
  for (; bound_ < bound; ++bound_) hashes_[bound_ % at_.blocks] = hash_of(bound_);
}

uint64_t ModelQueue::hash_of(uint64_t block) const {
  const std::byte* at = at_.ring + block % at_.blocks * kBlockBytes;
  uint64_t hash = 14695981039346656037u;
  for (uint32_t i = 0; i < kBlockBytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, at + i, sizeof word);
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool ModelQueue::fetch() {
  if (fetched_ == bound_ || flights_.size() >= kFlightsMax || state_ != State::kReady) return false;
  if (hash_of(fetched_) != hashes_[fetched_ % at_.blocks])
    fail(text("entry {} changed after its doorbell", fetched_));
  std::vector<std::byte> bytes(kBlockBytes);
  std::memcpy(bytes.data(), at_.ring + fetched_ % at_.blocks * kBlockBytes, kBlockBytes);
  Flight flight;
  flight.index = fetched_;
  const std::string why = decode(bytes, fetched_, at_.number, flight.entry);
  if (!why.empty()) {
    fail(text("entry {}: {}", fetched_, why));
    flight.error = Syndrome::kLocalQueue;
  } else if (flight.entry.blocks > bound_ - fetched_) {
    fail(text("entry {} of {} blocks beyond the doorbell", fetched_, flight.entry.blocks));
    flight.error = Syndrome::kLocalQueue;
  }
  fetched_ += flight.entry.blocks;
  flights_.push_back(std::move(flight));
  ++shared_->entries;
  return true;
}

// ---- carrying out

std::optional<ModelQueue::Found> ModelQueue::find(const std::map<uint32_t, ModelNic::Memory>& keys,
                                                  uint32_t key, uint64_t address, uint64_t bytes,
                                                  uint32_t access) {
  const auto found = keys.find(key);
  if (found == keys.end() || (found->second.access & access) != access || found->second.domain != 0)
    return {};
  const ModelNic::Memory& memory = found->second;
  if (address < memory.base || bytes > memory.bytes || address - memory.base > memory.bytes - bytes)
    return {};
  return Found{memory.data + (address - memory.base), memory.far.get()};
}

std::vector<std::byte> ModelQueue::read(const Found& from, uint64_t bytes) {
  if (!from.far) return {from.at, from.at + bytes};
  std::vector<std::byte> copy(bytes);
  const Status done = from.far->read(copy.data(), reinterpret_cast<uint64_t>(from.at), bytes);
  if (!done.ok()) fail(done.message());
  return copy;
}

// Eight bytes at a place for eight go at once.
void ModelQueue::write(const Found& to, uint64_t offset, const std::byte* from, uint64_t bytes) {
  std::byte* at = to.at + offset;
  if (to.far) {
    const Status done = to.far->write(reinterpret_cast<uint64_t>(at), from, bytes);
    if (!done.ok()) fail(done.message());
  } else if (bytes == 8 && reinterpret_cast<uintptr_t>(at) % 8 == 0) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    atomic_store(reinterpret_cast<uint64_t*>(at), word);
  } else {
    std::memcpy(at, from, bytes);
  }
}

// The first that is not carried out yet; behind a fence, only once all before it are done.
bool ModelQueue::carry_out() {
  if (state_ != State::kReady) return false;
  size_t answers = 0;
  bool all_done = true;
  for (Flight& flight : flights_) {
    if (flight.error != Syndrome{}) return false;  // nothing is delivered after it
    if (flight.is_executed) {
      answers += !flight.is_done;
      all_done = all_done && flight.is_done;
      continue;
    }
    const bool waits =
        (flight.entry.flags >> 5 != 0 && !all_done) || (flight.entry.answers() && answers >= kAnswersMax);
    return !waits && carry_out(flight);
  }
  return false;
}

bool ModelQueue::carry_out(Flight& flight) {
  Decoded& entry = flight.entry;
  if (refuses_) {
    flight.error = *std::exchange(refuses_, std::nullopt);
    return true;
  }
  if (!entry.has_remote) {
    flight.is_executed = flight.is_done = true;
    return true;
  }
  std::shared_ptr<ModelQueue> peer;
  if (!reach_peer(flight, peer)) return flight.error != Syndrome{};
  if (static_cast<Opcode>(entry.opcode) == Opcode::kWriteImmediate) {
    flight.error = Syndrome::kReceiverNotReady;  // nobody posts receives here
  } else if (entry.bytes > kMessageBytesMax) {
    flight.error = Syndrome::kLocalLength;
  } else if (entry.answers() && static_cast<Opcode>(entry.opcode) != Opcode::kRead) {
    execute_atomic(flight, *peer);
  } else if (static_cast<Opcode>(entry.opcode) == Opcode::kRead) {
    flight.is_executed = true;  // its bytes are read when it is answered: later writes may have come before
  } else {
    send_piece(flight, *peer);
  }
  return true;
}

bool ModelQueue::reach_peer(Flight& flight, std::shared_ptr<ModelQueue>& peer) {
  peer = shared_->find(peer_);
  const uint64_t own = uint64_t{at_.number} << 32 | psn_;
  if (peer && peer->nic().is_alive.load() && peer->accepts_.load() == own) {
    flight.gives_up.reset();
    return true;
  }
  const auto now = Clock::now();
  if (!flight.gives_up)
    flight.gives_up = now + std::chrono::microseconds(static_cast<int64_t>(shared_->plan.retry_s * 1e6));
  if (now >= *flight.gives_up) flight.error = Syndrome::kRetryExceeded;
  return false;
}

// One piece of a write. The bytes are read with the first, and must be the same after the last.
void ModelQueue::send_piece(Flight& flight, ModelQueue& peer) {
  const Decoded& entry = flight.entry;
  std::shared_lock own(nic_->keys, std::defer_lock);
  std::shared_lock theirs(peer.nic_->keys, std::defer_lock);
  if (nic_ == peer.nic_)
    own.lock();
  else
    std::lock(own, theirs);
  const auto src =
      entry.has_data ? find(nic_->local, entry.local_key, entry.local, entry.bytes, 0) : std::nullopt;
  const auto dst = find(peer.nic_->remote, entry.remote_key, entry.remote, entry.bytes, kAccessWrite);
  if (entry.has_data && !src) {
    flight.error = Syndrome::kLocalProtection;
    return;
  }
  if (!dst) {
    flight.error = Syndrome::kRemoteAccess;
    return;
  }
  if (!flight.is_sent) {
    flight.is_sent = true;
    flight.payload = src ? read(*src, entry.bytes) : entry.inline_bytes;
    // A word goes at once; others in up to 8 pieces, in any order. Each copy to a device takes its time.
    const bool is_word = entry.bytes == 8 && reinterpret_cast<uintptr_t>(dst->at) % 8 == 0;
    const uint64_t pieces = dst->far ? 2 : 8;
    const uint64_t step = is_word ? 8 : std::max<uint64_t>(16, entry.bytes / pieces / 16 * 16);
    for (uint64_t at = 0; at < entry.bytes; at += step)
      flight.pieces.emplace_back(at, std::min(step, entry.bytes - at));
    std::shuffle(flight.pieces.begin(), flight.pieces.end(), random_);
  }
  if (!flight.pieces.empty()) {
    const auto [at, bytes] = flight.pieces.back();
    flight.pieces.pop_back();
    write(*dst, at, flight.payload.data() + at, bytes);
  }
  if (!flight.pieces.empty()) return;
  flight.is_executed = flight.is_done = true;
  if (src && read(*src, entry.bytes) != flight.payload)
    fail(text("entry {}: its source changed before it was sent", flight.index));
}

// Whole among the queues of the NIC that has the memory; what others do there at the same time is lost.
void ModelQueue::execute_atomic(Flight& flight, ModelQueue& peer) {
  const Decoded& entry = flight.entry;
  std::lock_guard whole(peer.nic_->atomics);
  std::shared_lock theirs(peer.nic_->keys);
  const auto dst = find(peer.nic_->remote, entry.remote_key, entry.remote, 8, kAccessAtomic);
  if (!dst) {
    flight.error = Syndrome::kRemoteAccess;
    return;
  }
  if (entry.remote % 8 != 0) {
    flight.error = Syndrome::kRemoteInvalid;
    return;
  }
  uint64_t old = 0;
  flight.payload.resize(8);
  if (dst->far)
    flight.payload = read(*dst, 8);
  else
    old = atomic_load(reinterpret_cast<uint64_t*>(dst->at));
  dst->far ? std::memcpy(&old, flight.payload.data(), 8) : std::memcpy(flight.payload.data(), &old, 8);
  const bool is_add = static_cast<Opcode>(entry.opcode) == Opcode::kFetchAdd;
  const uint64_t value = is_add ? old + entry.add : entry.add;
  if (is_add || old == entry.compare) write(*dst, 0, reinterpret_cast<const std::byte*>(&value), 8);
  flight.is_executed = true;
}

// One of those that something comes back for, in any order.
bool ModelQueue::answer() {
  std::vector<Flight*> open;
  for (Flight& flight : flights_)
    if (flight.is_executed && !flight.is_done) open.push_back(&flight);
  if (open.empty()) return false;
  answer(*open[random_() % open.size()]);
  return true;
}

void ModelQueue::answer(Flight& flight) {
  const Decoded& entry = flight.entry;
  if (static_cast<Opcode>(entry.opcode) == Opcode::kRead) {
    const auto peer = shared_->find(peer_);
    if (!peer) return;
    std::shared_lock theirs(peer->nic_->keys);
    const auto src = find(peer->nic_->remote, entry.remote_key, entry.remote, entry.bytes, kAccessRead);
    if (!src) {
      flight.error = Syndrome::kRemoteAccess;
      flight.is_executed = false;
      return;
    }
    flight.payload = read(*src, entry.bytes);
  }
  std::shared_lock own(nic_->keys);
  const auto sink = find(nic_->local, entry.local_key, entry.local, entry.bytes, 0);
  if (!sink) {
    flight.error = Syndrome::kLocalProtection;
    return;
  }
  write(*sink, 0, flight.payload.data(), entry.bytes);
  flight.is_done = true;
}

// ---- completing

// The first, if it is done; those that share a completion may be skipped for one after them.
bool ModelQueue::retire() {
  if (flights_.empty()) return false;
  Flight& flight = flights_.front();
  const bool is_refused = flight.error != Syndrome{};
  if (!is_refused && !flight.is_done) return false;
  const Flight done = std::move(flight);
  flights_.pop_front();
  if (shared_->plan.keeps_sources && done.entry.has_data && !done.entry.answers() && !is_refused) {
    std::shared_lock own(nic_->keys);
    const auto src = find(nic_->local, done.entry.local_key, done.entry.local, done.entry.bytes, 0);
    if (src && read(*src, done.entry.bytes) != done.payload)
      fail(text("entry {}: its source changed before its completion", done.index));
  }
  retire_blocks(done);
  if (is_refused) {
    complete(done.index, done.entry, ibgda::kRefused, done.error);
    accepts_.store(0);
    state_ = State::kError;
    return true;
  }
  const bool is_skipped = at_.entries == 1 && !flights_.empty() && flights_.front().is_done &&
                          flights_.front().entry.is_signalled() && chance(0.5);
  if (done.entry.is_signalled() && !is_skipped) complete(done.index, done.entry, ibgda::kCompleted, {});
  return true;
}

void ModelQueue::retire_blocks(const Flight& flight) {
  for (uint32_t i = 0; i < flight.entry.blocks; ++i, ++retired_) {
    if (hash_of(retired_) != hashes_[retired_ % at_.blocks])
      fail(text("entry {} changed before its completion", retired_));
    std::memset(at_.ring + retired_ % at_.blocks * kBlockBytes, static_cast<int>(kConsumed), kBlockBytes);
  }
}

// The last word last, after a release.
void ModelQueue::complete(uint64_t index, const Decoded& entry, uint32_t opcode, Syndrome error) {
  const uint64_t number = completions_++;
  if (!shared_->plan.ignores_overrun) {
    if (number - taken_ >= at_.entries) fail(text("completion {}: overrun, {} taken", number, taken_));
  }
  std::byte* slot = at_.completions + number % at_.entries * kBlockBytes;
  std::byte made[kBlockBytes];
  for (std::byte& byte : made) byte = static_cast<std::byte>(random_());
  made[54] = static_cast<std::byte>(opcode == ibgda::kRefused ? 0x80 | static_cast<uint32_t>(error) : 0);
  made[55] = static_cast<std::byte>(error);
  const uint32_t which = big_endian(entry.opcode << 24 | at_.number);
  std::memcpy(made + 56, &which, sizeof which);
  std::memcpy(slot, made, kBlockBytes - 4);
  copy_to_device(slot, kBlockBytes - 4);
  const uint32_t owner = static_cast<uint32_t>(number / at_.entries & 1);
  const auto last = static_cast<uint32_t>((index & 0xffff) << 16 | opcode << 4 | owner);
  atomic_store(reinterpret_cast<uint32_t*>(slot + kBlockBytes - 4), big_endian(last));
  copy_to_device(slot + kBlockBytes - 4, 4);
}

// After a refusal everything that was or is posted comes back at once, whether it asked for a completion or not.
void ModelQueue::flush() {
  flights_.clear();
  fetched_ = retired_;
  while (fetched_ < bound_) {
    std::vector<std::byte> bytes(kBlockBytes);
    std::memcpy(bytes.data(), at_.ring + fetched_ % at_.blocks * kBlockBytes, kBlockBytes);
    Flight flight;
    flight.index = fetched_;
    (void)decode(bytes, fetched_, at_.number, flight.entry);
    flight.entry.blocks = static_cast<uint32_t>(std::min<uint64_t>(flight.entry.blocks, bound_ - fetched_));
    fetched_ += flight.entry.blocks;
    retire_blocks(flight);
    complete(flight.index, flight.entry, ibgda::kRefused, Syndrome::kFlushed);
  }
}

}  // namespace weft::testing
