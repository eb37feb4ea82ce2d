// SPDX-License-Identifier: Apache-2.0
#include "base/tally.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "base/config.h"
#include "base/log.h"
#include "base/shared_memory.h"

namespace weft {
namespace {

// Of the process: its descriptor is how others find the page. What came from the parent of a fork stays mapped.
std::atomic<TallyPage*> current = nullptr;
std::atomic<pid_t> owner = 0;

std::mutex& naming() {
  static std::mutex once;
  return once;
}

template <size_t N>
bool is_named(const char (&name)[N], std::string_view wanted) {
  return std::string_view(name, strnlen(name, N)) == wanted.substr(0, N - 1);
}

template <size_t N>
void set_name(char (&name)[N], std::string_view to) {
  const size_t length = std::min(to.size(), N - 1);
  std::memcpy(name, to.data(), length);
  std::memset(name + length, 0, N - length);
}

// Finds a named entry, or takes the next free one; the last one stands for all that come too late.
template <class Entry>
Entry& named(Entry* entries, uint32_t room, Count& used, std::string_view name, std::string_view transport) {
  std::lock_guard lock(naming());
  const auto known = static_cast<uint32_t>(used.load(std::memory_order_relaxed));
  for (uint32_t i = 0; i < known; ++i)
    if (is_named(entries[i].name, name) && is_named(entries[i].transport, transport)) return entries[i];
  const bool is_last = known + 1 >= room;
  Entry& entry = entries[std::min(known, room - 1)];
  if (known >= room) return entry;
  set_name(entry.name, is_last ? "others" : name);
  set_name(entry.transport, is_last ? "" : transport);
  used.store(known + 1, std::memory_order_release);
  return entry;
}

// Of this process and those that it was forked from. Never destroyed: threads count until the end.
std::vector<SharedMemory>& pages_made() {
  static auto* made = new std::vector<SharedMemory>;
  return *made;
}

TallyPage* make_page() {
  Result<SharedMemory> made = SharedMemory::create(sizeof(TallyPage), kTallyName);
  char* place = nullptr;
  if (made.ok()) {
    place = pages_made().emplace_back(std::move(*made)).data();
  } else {
    log_info("weft top cannot see this process: {}", made.status().message());
    place = new char[sizeof(TallyPage)]();
  }
  auto* page = reinterpret_cast<TallyPage*>(place);  // zeroes are a page without anything
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  page->wall_minus_monotonic_ns =
      static_cast<int64_t>(wall.tv_sec) * 1'000'000'000 + wall.tv_nsec - static_cast<int64_t>(tally_now_ns());
  page->made_ns = tally_now_ns();
  page->has_secret = config().job_secret.empty() ? 0 : 1;
  page->bytes = sizeof(TallyPage);
  page->version = kTallyVersion;
  return page;
}

std::string kinds_of(const std::vector<std::string>& transports) {
  std::vector<std::string> kinds;
  for (const std::string& name : transports)
    if (!name.empty() && std::ranges::count(kinds, name) == 0) kinds.push_back(name);
  std::ranges::sort(kinds);
  std::string all;
  for (const std::string& kind : kinds) all += (all.empty() ? "" : "+") + kind;
  return all.empty() ? "self" : all;
}

template <size_t N>
std::string name_of(const char (&name)[N]) {
  return std::string(name, strnlen(name, N));
}

size_t used_of(const Count& used, uint32_t room) {
  return static_cast<size_t>(std::min<uint64_t>(used.load(), room));
}

constexpr int32_t kMostRanks = 1 << 20;  // a page that has more is not one of ours

TallySnapshot::Operation read(const TallyOperation& from) {
  TallySnapshot::Operation to{
      name_of(from.name), name_of(from.transport), from.calls, from.bytes, from.errors, from.busy_ns,
      from.waits,         from.waited_ns,          {}};
  for (const Count& count : from.took) to.took.push_back(count);
  return to;
}

// The calls that lie whole in the ring, oldest first.
void read_calls(const TallyPage& page, TallySnapshot& to) {
  for (const TallyCall& call : page.calls) {
    if (call.number == 0 || call.operation >= TallyPage::kOperations) continue;
    const TallyOperation& operation = page.operations[call.operation];
    to.calls.push_back({call.number, call.group_key, call.group_call, name_of(operation.name),
                        name_of(operation.transport), call.elements, call.bytes, call.began_ns, call.ended_ns,
                        call.element, call.is_failed != 0});
  }
  std::ranges::sort(to.calls, {}, &TallySnapshot::Call::number);
}

}  // namespace

Result<TallySnapshot> read_tally(std::string_view bytes) {
  const auto copy = std::make_unique<TallyPage>();
  if (bytes.size() == sizeof(TallyPage))
    std::memcpy(static_cast<void*>(copy.get()), bytes.data(), bytes.size());
  const TallyPage& page = *copy;
  if (page.version != kTallyVersion || page.bytes != sizeof(TallyPage))
    return Status::invalid("counters: got those of another version of Weft, allowed: version {}",
                           kTallyVersion);
  TallySnapshot to;
  to.made_ns = page.made_ns;
  to.has_secret = page.has_secret != 0;
  to.wall_minus_monotonic_ns = page.wall_minus_monotonic_ns;
  for (size_t i = 0; i < used_of(page.num_operations, TallyPage::kOperations); ++i)
    to.operations.push_back(read(page.operations[i]));
  for (size_t i = 0; i < used_of(page.num_peers, TallyPage::kPeers); ++i) {
    const TallyPeer& peer = page.peers[i];
    to.peers.push_back(
        {name_of(peer.name), name_of(peer.transport), peer.messages, peer.bytes, peer.retries, peer.faults});
  }
  for (size_t i = 0; i < used_of(page.num_groups, TallyPage::kGroups); ++i) {
    const TallyGroup& group = page.groups[i];
    if (group.size < 1 || group.size > kMostRanks || group.rank < 0 || group.rank >= group.size) continue;
    const size_t last = std::min<uint64_t>(group.operation, TallyPage::kOperations - 1);
    to.groups.push_back({i, group.key, name_of(group.what), name_of(group.device),
                         name_of(page.operations[last].name), group.rank, group.size, group.calls,
                         group.began_ns, group.ended_ns, group.is_open != 0});
  }
  read_calls(page, to);
  return to;
}

TallyPage& tally_page() {
  static std::mutex making;
  std::lock_guard lock(making);
  if (owner != getpid()) {
    current = make_page();
    owner = getpid();
  }
  return *current;
}

bool has_tally() {
  return owner == getpid();
}

TallyOperation& tally_operation(std::string_view name, std::string_view transport) {
  TallyPage& page = tally_page();
  return named(page.operations, TallyPage::kOperations, page.num_operations, name, transport);
}

TallyPeer& tally_peer(std::string_view name, std::string_view transport) {
  TallyPage& page = tally_page();
  return named(page.peers, TallyPage::kPeers, page.num_peers, name, transport);
}

CallTally::CallTally(std::string_view what, const TallyCaller& caller)
    : page_(tally_page()), transports_(kinds_of(caller.transports)) {
  for (size_t rank = 0; rank < caller.transports.size(); ++rank) {
    const std::string& transport = caller.transports[rank];
    peers_.push_back(&tally_peer(std::to_string(rank), transport.empty() ? "self" : transport));
  }
  is_lost_.assign(peers_.size(), false);
  std::lock_guard lock(naming());
  const auto known = static_cast<uint32_t>(page_.num_groups.load());
  uint32_t place = 0;
  while (place < known && page_.groups[place].is_open.load() != 0) ++place;
  place = std::min(place, TallyPage::kGroups - 1);
  group_ = &page_.groups[place];
  group_->size = 0;
  group_->key = caller.key;
  set_name(group_->what, what);
  set_name(group_->device, caller.device);
  group_->rank = caller.rank;
  for (Count* count : {&group_->calls, &group_->began_ns, &group_->ended_ns, &group_->operation}) *count = 0;
  group_->size = caller.size;
  group_->is_open = 1;
  if (place >= known) page_.num_groups.store(place + 1, std::memory_order_release);
}

CallTally::~CallTally() {
  group_->is_open = 0;
}

CallTally::UnderWay CallTally::begin(TallyOperation& operation, const CallFacts& facts) {
  const uint64_t number = page_.num_calls.fetch_add(1, std::memory_order_relaxed) + 1;
  const auto place = static_cast<uint64_t>(&operation - page_.operations);
  TallyCall& record = page_.calls[number % TallyPage::kCalls];
  record.number.store(0, std::memory_order_release);
  record.group_call = 0;
  record.group_key = group_->key;
  record.operation = static_cast<uint32_t>(place);
  record.elements = facts.elements;
  record.bytes = facts.bytes;
  record.element = facts.element;
  record.is_failed = 0;
  record.ended_ns.store(0, std::memory_order_relaxed);
  record.began_ns = tally_now_ns();
  if (facts.is_of_all_ranks) {
    record.group_call = group_->calls.load(std::memory_order_relaxed) + 1;
    group_->operation.store(place, std::memory_order_relaxed);
    group_->began_ns.store(record.began_ns, std::memory_order_relaxed);
    group_->calls.store(record.group_call, std::memory_order_release);
  }
  record.number.store(number, std::memory_order_release);
  return {number, record.began_ns, facts.bytes, facts.is_of_all_ranks, waited_for_peers_ns};
}

void CallTally::end(TallyOperation& operation, const UnderWay& call, bool is_ok) {
  const uint64_t now = tally_now_ns();
  count_one(operation, call.bytes);
  add_time(operation, now - call.began_ns);
  if (const uint64_t waited_ns = waited_for_peers_ns - call.waited_before_ns; waited_ns > 0) {
    count_up(operation.waits, 1);
    count_up(operation.waited_ns, waited_ns);
  }
  if (!is_ok) count_up(operation.errors, 1);
  if (call.is_of_all_ranks) group_->ended_ns.store(now, std::memory_order_release);
  TallyCall& record = page_.calls[call.number % TallyPage::kCalls];
  if (record.number.load(std::memory_order_relaxed) != call.number) return;  // it has made way for others
  record.is_failed = is_ok ? 0 : 1;
  record.ended_ns.store(now, std::memory_order_release);
}

}  // namespace weft
