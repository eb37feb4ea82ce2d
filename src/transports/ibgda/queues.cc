// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/queues.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace weft::ibgda {
namespace {

// What the ends of a queue tell each other; the NIC's own address follows.
struct PairDescriptor {
  uint64_t farewell_base;
  uint32_t farewell_key;
  uint32_t address_bytes;
};
constexpr uint64_t kGone = 1;  // what a farewell word says

}  // namespace

Result<std::unique_ptr<Queues>> Queues::create(Nic& nic, Device device, const std::vector<int>& served,
                                               const QueueSizes& sizes) {
  auto queues = std::unique_ptr<Queues>(new Queues(nic, device, sizes));
  WEFT_TRY(queues->open(served));
  return queues;
}

void Queues::stop() {
  stops_.store(true, std::memory_order_release);
  if (watcher_.joinable()) watcher_.join();
}

Queues::~Queues() {
  stop();
  pairs_.clear();
  if (enrolled_.handle) nic_.release(enrolled_);
}

Status Queues::open(const std::vector<int>& served) {
  const uint64_t places = static_cast<uint64_t>(sizes_.ranks) * sizes_.per_peer;
  const uint64_t words = 2 * places * sizeof(uint64_t);
  WEFT_TRY_ASSIGN(words_, HostVisible::create(device_, words + places * sizeof(FaultBox)));
  sinks_ = words_->at<uint64_t>(0);
  farewells_ = sinks_ + places;
  faults_ = words_->at<FaultBox>(words);
  WEFT_TRY_ASSIGN(enrolled_, nic_.enroll(words_->data(), words, Device{}));
  WEFT_TRY_ASSIGN(states_, LocalMemory::create(device_, places * sizeof(QueueState)));
  WEFT_TRY_ASSIGN(table_, LocalMemory::create(device_, places * sizeof(Queue)));
  for (int peer : served)
    for (uint32_t which = 0; which < sizes_.per_peer; ++which) WEFT_TRY(open_queue(peer, which));
  return {};
}

Status Queues::open_queue(int peer, uint32_t which) {
  WEFT_TRY_ASSIGN(auto pair, nic_.create_queue(sizes_.blocks));
  pairs_[place(peer, which)] = {peer, std::move(pair), false, 0, {}};
  return describe(place(peer, which));
}

// Writes down for device code where a queue is.
Status Queues::describe(size_t place) {
  const QueueMemory& memory = pairs_.at(place).pair->memory();
  const Queue queue{memory.ring,
                    memory.completions,
                    memory.record,
                    memory.doorbell,
                    states_->at<QueueState>(place * sizeof(QueueState)),
                    faults_ + place,
                    enrolled_.base + place * sizeof(uint64_t),
                    big_endian(enrolled_.local_key),
                    memory.number,
                    memory.blocks - 1,
                    memory.entries - 1};
  return table_->write(place * sizeof(Queue), &queue, sizeof queue);
}

uint32_t Queues::batch() const {
  uint32_t blocks = sizes_.blocks;
  for (const auto& [at, pair] : pairs_) blocks = std::min(blocks, pair.pair->memory().blocks);
  return blocks / 2;
}

std::string Queues::addresses(int peer) const {
  std::string all;
  for (uint32_t which = 0; which < sizes_.per_peer; ++which) {
    const auto found = pairs_.find(place(peer, which));
    if (found == pairs_.end()) return "";
    const std::string address = found->second.pair->address();
    const uint64_t farewell_at =
        static_cast<uint64_t>(reinterpret_cast<std::byte*>(farewells_ + found->first) - words_->data());
    const PairDescriptor descriptor{enrolled_.base + farewell_at, enrolled_.remote_key,
                                    static_cast<uint32_t>(address.size())};
    all.append(reinterpret_cast<const char*>(&descriptor), sizeof descriptor);
    all += address;
  }
  return all;
}

Status Queues::connect(const std::vector<std::string>& theirs) {
  for (auto& [at, pair] : pairs_) {
    std::string_view rest = theirs[static_cast<size_t>(pair.peer)];
    PairDescriptor descriptor{};
    for (uint32_t which = 0; which <= at % sizes_.per_peer; ++which) {
      if (which > 0) rest.remove_prefix(descriptor.address_bytes);
      if (rest.size() < sizeof descriptor)
        return Status::make(Code::kPeerLost, "ibgda: rank {} could not make its queues", pair.peer);
      std::memcpy(&descriptor, rest.data(), sizeof descriptor);
      rest.remove_prefix(sizeof descriptor);
      if (rest.size() < descriptor.address_bytes)
        return Status::make(Code::kSystem, "ibgda: rank {} sent an address that is cut", pair.peer);
    }
    pair.farewell = {descriptor.farewell_base, big_endian(descriptor.farewell_key), 0};
    const Status joined = pair.pair->connect(rest.substr(0, descriptor.address_bytes));
    if (!joined.ok())
      return Status::make(joined.code(), "ibgda: queue to rank {}: {}", pair.peer, joined.message());
  }
  return {};
}

Status Queues::reset(int peer) {
  std::lock_guard lock(mutex_);
  for (uint32_t which = 0; which < sizes_.per_peer; ++which) {
    const size_t at = place(peer, which);
    Pair& pair = pairs_.at(at);
    WEFT_TRY(pair.pair->reset());
    WEFT_TRY(describe(at));
    const QueueState fresh{};
    WEFT_TRY(states_->write(at * sizeof fresh, &fresh, sizeof fresh));
    faults_[at] = {};
    pair.is_reported = false;
    pair.passed_on = 0;
  }
  return {};
}

// ---- watching, from the host

bool Queues::is_broken(size_t place) const {
  return load_acquire(&faults_[place].raised) != 0;
}

// Not so where a kernel gave up or asked for a wrong place: the NIC knows nothing of that.
bool Queues::is_refused(size_t place) const {
  return is_broken(place) && faults_[place].site == Site::kQueueRefused;
}

namespace {

// What the record says was posted, and the completion of the last of it. 16 bits of a count.
struct Newest {
  uint32_t next, last;
  bool is_of_it;  // that completion is there
};
Newest newest_of(const QueuePair& pair) {
  const uint32_t next = pair.posted();
  const uint32_t last = pair.completion(next - 1).last;
  return {next, last, opcode_of(last) != kNotYet && index_of(last) == ((next - 1) & 0xffffu)};
}

}  // namespace

bool Queues::is_idle(size_t place) const {
  if (is_refused(place)) return true;
  const Newest newest = newest_of(*pairs_.at(place).pair);
  const bool is_fresh = newest.next == 0 && opcode_of(newest.last) == kNotYet;
  return is_fresh || newest.is_of_it;
}

bool Queues::drain(Deadline until) const {
  return wait_until(until, [&] {
    for (const auto& [at, pair] : pairs_)
      if (!is_idle(at)) return false;
    return true;
  });
}

// Kernels look at completions only where they wait. What comes back refused meanwhile is found here: everything behind
// it is refused too, the newest included.
void Queues::look_for_errors(size_t place) {
  const QueuePair& pair = *pairs_.at(place).pair;
  const Newest newest = newest_of(pair);
  if (!newest.is_of_it || opcode_of(newest.last) != kRefused) return;
  Completion first = pair.completion(newest.next - 1);
  uint32_t index = (newest.next - 1) & 0xffffu;
  for (uint32_t back = 2; back <= pair.memory().entries; ++back) {
    const Completion before = pair.completion(newest.next - back);
    if (opcode_of(before.last) != kRefused || index_of(before.last) != ((newest.next - back) & 0xffffu))
      break;
    first = before;
    index = index_of(before.last);
  }
  raise(&faults_[place], Site::kQueueRefused, static_cast<uint32_t>(sizes_.rank),
        static_cast<uint32_t>(pairs_.at(place).peer), index, index, 0,
        static_cast<uint32_t>(first.vendor) << 8 | first.syndrome);
}

// Whether it broke, the first time that this is asked.
bool Queues::notices_break(size_t place) {
  std::lock_guard lock(mutex_);
  if (!is_broken(place)) look_for_errors(place);
  return is_broken(place) && !std::exchange(pairs_.at(place).is_reported, true);
}

bool Queues::pass_on_doorbells() {
  std::lock_guard lock(mutex_);
  bool any = false;
  for (auto& [at, pair] : pairs_) {
    const uint64_t doorbell = load_acquire(pair.pair->memory().doorbell);
    if (!pair.pair->is_rung_by_host() || doorbell == pair.passed_on) continue;
    pair.passed_on = doorbell;
    pair.pair->ring(doorbell);
    any = true;
  }
  return any;
}

void Queues::start(std::function<void(const FaultBox&)> on_broken) {
  on_broken_ = std::move(on_broken);
  watcher_ = std::thread([this] { watch(); });
}

// Passes on doorbells where device code cannot ring, at once; looks for queues that broke once in a while, seldom where a
// look takes long.
void Queues::watch() {
  bool rings = false, is_far = false;
  for (const auto& [at, pair] : pairs_) {
    rings = rings || pair.pair->is_rung_by_host();
    is_far = is_far || pair.pair->is_far();
  }
  const auto look_every = std::chrono::milliseconds(is_far ? 100 : 2);
  auto next_look = std::chrono::steady_clock::now();
  for (unsigned idle = 0; !stops_.load(std::memory_order_acquire);) {
    ++idle;
    if (rings && pass_on_doorbells()) idle = 0;
    if (std::chrono::steady_clock::now() >= next_look) {
      next_look = std::chrono::steady_clock::now() + look_every;
      for (auto& [at, pair] : pairs_)
        if (notices_break(at)) on_broken_(faults_[at]);
    }
    rings ? back_off(idle) : std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// ---- leaving

void Queues::forgo(int peer) {
  std::lock_guard lock(mutex_);
  forgone_.insert(peer);
}

// No kernel posts any more, and everything posted is done: the host goes on where they stopped.
void Queues::post_farewell(size_t place) {
  const Pair& pair = pairs_.at(place);
  const QueueMemory& memory = pair.pair->memory();
  const uint32_t index = pair.pair->posted();
  const Entry entry =
      value_entry({index, memory.number, kSignalled}, {pair.farewell.base, pair.farewell.key}, kGone);
  if (!logged(pair.pair->put_entry(index, entry)).ok()) return;
  store_register(memory.doorbell, doorbell_word(index + 1, memory.number));
}

void Queues::leave(Deadline until) {
  if (!drain(until)) return;
  const auto is_forgone = [&](size_t at) {
    std::lock_guard lock(mutex_);
    return is_refused(at) || forgone_.contains(pairs_.at(at).peer);
  };
  for (const auto& [at, pair] : pairs_)
    if (!is_forgone(at)) post_farewell(at);
  (void)wait_until(until, [&] {
    for (const auto& [at, pair] : pairs_)
      if (load_acquire(farewells_ + at) != kGone && !is_forgone(at)) return false;
    return true;
  });
  (void)drain(until);
}

}  // namespace weft::ibgda
