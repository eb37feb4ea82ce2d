// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/proxy.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/config.h"

namespace weft::proxy {
namespace {

constexpr uint64_t kLine = 128;        // words of the two sides lie on lines of their own
constexpr uint32_t kTakenAtOnce = 64;  // commands, before queues have their turn
constexpr uint32_t kTurn = 16;         // commands of one FIFO, before another has its turn
constexpr size_t kQueuedMost = 4096;   // commands in queues; beyond it, FIFOs wait
// Rounds in vain before a proxy's own thread yields, and before it naps.
struct Patience {
  unsigned spins, yields;
};
// The second where cores are scarce (Network::sleep): rounds in vain take time from those who copy.
constexpr Patience kPatient{64, 512}, kCrowded{2, 8};
// Who helps there rests after so many rounds in vain, for so long at most.
constexpr uint32_t kRoundsInVain = 8;
constexpr uint64_t kRest_ns = 200'000;
constexpr int kQuietPerNap = 16;  // a nap is so small a part of the time for which nothing came
constexpr std::chrono::microseconds kNap(50), kCalmNap(400), kIdleNap(2000);
// Of a proxy that is helped, where cores are scarce: when it looks, it may lose its core in the middle of a turn, and who helps
// waits for it.
constexpr std::chrono::microseconds kCrowdedNap(1000);
// Kernels of a GPU cannot help: what they ask for is waited for awake so long after the last of it, longer than most
// programs compute between two calls.
constexpr std::chrono::milliseconds kAwakeForGpu(100);

}  // namespace

Result<std::unique_ptr<FifoReader>> FifoReader::create(Device device, uint64_t capacity) {
  if (!std::has_single_bit(capacity) || capacity < 2)
    return Status::invalid("WEFT_PROXY_FIFO: got {}, allowed: a power of two, 2 or more", capacity);
  const uint64_t each = kLine + (capacity * sizeof(Command) + kLine - 1) / kLine * kLine;
  WEFT_TRY_ASSIGN(std::unique_ptr<HostVisible> memory, HostVisible::create(device, kFifosPerProxy * each));
  WEFT_TRY_ASSIGN(std::unique_ptr<LocalMemory> words,
                  LocalMemory::create(device, kFifosPerProxy * 2 * kLine));
  std::unique_ptr<FifoReader> reader(new FifoReader(std::move(memory), std::move(words)));
  for (uint32_t i = 0; i < kFifosPerProxy; ++i) {
    const HostVisible& shared = *reader->memory_;
    const LocalMemory& local = *reader->words_;
    End& end = reader->ends_[i];
    end.tail = shared.at<uint64_t>(i * each);
    end.fifo = {shared.at<Command>(i * each + kLine), end.tail, local.at<uint64_t>(2 * i * kLine),
                local.at<uint64_t>((2 * i + 1) * kLine), capacity};
  }
  return reader;
}

bool FifoReader::pop(Command& command, uint64_t& position) {
  if (in_turn_ < kTurn && ends_[turn_].pop(command, position)) return ++in_turn_, true;
  for (uint32_t step = 1; step <= kFifosPerProxy; ++step) {
    const uint32_t next = (turn_ + step) % kFifosPerProxy;
    if (!ends_[next].pop(command, position)) continue;
    turn_ = next;
    in_turn_ = 1;
    return true;
  }
  return false;
}

bool FifoReader::End::pop(Command& command, uint64_t& position) {
  Command* slot = slot_of(fifo, next);
  const uint64_t b = load_acquire(&slot->b);
  if ((b & kCommit) != commit_of(fifo, next)) return publish(), false;
  command = {load_relaxed(&slot->a), b & ~kCommit};
  position = next++;
  // Not for each: the word's line travels to whoever reads it.
  if (next - published >= fifo.capacity / 4) publish();
  return true;
}

void FifoReader::publish() {
  for (End& end : ends_) end.publish();
}

void FifoReader::End::publish() {
  if (published == next) return;
  published = next;
  store_release(tail, next);
}

bool FifoReader::is_empty() const {
  return std::ranges::all_of(
      ends_, [](const End& end) { return load_relaxed(end.fifo.head) == load_relaxed(end.tail); });
}

Result<std::unique_ptr<Proxy>> Proxy::create(Device device, uint64_t capacity) {
  WEFT_TRY_ASSIGN(std::unique_ptr<FifoReader> fifos, FifoReader::create(device, capacity));
  return std::unique_ptr<Proxy>(new Proxy(std::move(fifos), device.is_host()));
}

void Proxy::start(Network network, std::function<void(const PeerQueue&)> on_lost) {
  network_ = std::move(network);
  on_lost_ = std::move(on_lost);
  reported_.assign(queues_.size(), false);
  for (const std::unique_ptr<PeerQueue>& queue : queues_) {
    const auto rank = static_cast<size_t>(queue->rank());
    if (by_rank_.size() <= rank) by_rank_.resize(rank + 1, nullptr);
    by_rank_[rank] = queue.get();
  }
  thread_ = std::thread([this] { run(); });
}

// The first of two turns may have begun before the call.
void Proxy::drain(Deadline until) const {
  const uint64_t before = quiet_turns_.load(std::memory_order_acquire);
  wait_until(until, [&] { return quiet_turns_.load(std::memory_order_acquire) >= before + 2; });
}

void Proxy::finish(Deadline until) {
  is_finishing_.store(true, std::memory_order_release);
  wait_until(until, [this] { return is_finished_.load(std::memory_order_acquire); });
}

void Proxy::stop() {
  stopping_.store(true, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
}

void Proxy::run() {
  const bool is_crowded = network_.sleep != nullptr;
  const Patience patience = is_crowded ? kCrowded : kPatient;
  unsigned idle = 0;
  uint64_t helped = 0;
  Deadline::Clock::time_point idle_since{};
  while (!stopping_.load(std::memory_order_acquire)) {
    if (const uint64_t now = helped_.load(std::memory_order_relaxed); now != helped) {
      helped = now;
      idle = is_crowded ? patience.yields : 0;
      std::this_thread::sleep_for(is_crowded ? kCrowdedNap : is_calm() ? kCalmNap : kNap);
      continue;
    }
    if (resting_.load(std::memory_order_relaxed) > 0) std::this_thread::sleep_for(kNap);
    bool any = false;
    if (try_turn(any) && any) {
      idle = 0;
      continue;
    }
    if (++idle <= patience.spins) continue;
    if (idle <= patience.yields) {
      sched_yield();
      continue;
    }
    const auto now = Deadline::Clock::now();
    if (idle == patience.yields + 1) idle_since = now;
    const Nap quiet = now - idle_since;
    if (!is_host_ && quiet < kAwakeForGpu)
      sched_yield();
    else
      std::this_thread::sleep_for(nap_after(quiet));
  }
}

// Kernels of the host help while they wait. So what comes while none does may be late.
Proxy::Nap Proxy::nap_after(Nap quiet) const {
  if (quiet.count() > config().proxy_idle_s) return kIdleNap;
  return is_host_ ? std::clamp<Nap>(quiet / kQuietPerNap, kNap, kIdleNap) : Nap(kNap);
}

// Whether who helps can do without this thread for a while: only signals and small puts went to and fro since the last
// time, and none waits. Who moves much copies much, and helps nobody meanwhile.
bool Proxy::is_calm() {
  const uint64_t now = data_writes_.load(std::memory_order_relaxed);
  return std::exchange(data_writes_seen_, now) == now && !has_queued_.load(std::memory_order_relaxed) &&
         fifos_->is_empty();
}

bool Proxy::help() {
  bool any = false;
  if (!try_turn(any)) return false;
  helped_.fetch_add(1, std::memory_order_relaxed);
  in_vain_.store(any ? 0 : in_vain_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return any;
}

bool Proxy::rest() {
  if (!network_.sleep || in_vain_.load(std::memory_order_relaxed) < kRoundsInVain) return false;
  resting_.fetch_add(1, std::memory_order_relaxed);
  const bool slept = network_.sleep(kRest_ns);
  resting_.fetch_sub(1, std::memory_order_relaxed);
  return slept;
}

// False: another thread is at it.
bool Proxy::try_turn(bool& any) {
  if (is_turning_.load(std::memory_order_relaxed) || is_turning_.exchange(true, std::memory_order_acquire))
    return false;
  any = turn();
  is_turning_.store(false, std::memory_order_release);
  return true;
}

bool Proxy::turn() {
  bool any = take_commands();
  // Before the network is looked at, which takes a system call or two on some.
  if (any)
    for (const std::unique_ptr<PeerQueue>& queue : queues_) queue->send_taken();
  network_.progress();
  bool is_quiet = !any;
  bool is_done = !any && is_finishing_.load(std::memory_order_acquire);
  uint64_t data_writes = 0;
  bool has_queued = false;
  const bool closes = is_done && !has_closed_;
  for (size_t i = 0; i < queues_.size(); ++i) {
    PeerQueue& queue = *queues_[i];
    if (closes) queue.close();
    any = queue.turn() || any;
    data_writes += queue.data_writes();
    has_queued = has_queued || queue.queued() > 0;
    is_quiet = is_quiet && queue.is_idle();
    is_done = is_done && queue.is_idle() && queue.is_closed();
    if (!queue.status().ok() && !reported_[i]) {
      reported_[i] = true;
      on_lost_(queue);
    }
  }
  has_closed_ = has_closed_ || closes;
  data_writes_.store(data_writes, std::memory_order_relaxed);
  has_queued_.store(has_queued, std::memory_order_relaxed);
  if (is_quiet) quiet_turns_.fetch_add(1, std::memory_order_release);
  if (is_done) is_finished_.store(true, std::memory_order_release);
  return any;
}

bool Proxy::take_commands() {
  size_t queued = 0;
  for (const std::unique_ptr<PeerQueue>& queue : queues_) queued += queue->queued();
  uint32_t taken = 0;
  for (; taken < kTakenAtOnce && queued + taken < kQueuedMost; ++taken) {
    Command command;
    uint64_t position = 0;
    if (!fifos_->pop(command, position)) break;
    if (PeerQueue* queue = queue_to(peer_of(command))) queue->take(command, position);
  }
  fifos_->publish();
  return taken > 0;
}

PeerQueue* Proxy::queue_to(uint32_t rank) {
  return rank < by_rank_.size() ? by_rank_[rank] : nullptr;
}

}  // namespace weft::proxy
