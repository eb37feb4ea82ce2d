// SPDX-License-Identifier: Apache-2.0
#include "collective/call_log.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/log.h"
#include "base/random.h"
#include "base/text.h"

namespace weft {
namespace {

constexpr const char* kElementNames[kElements] = {
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "int8",
    "uint8",   "int32",   "uint32",   "int64",         "uint64",      "int16",   "uint16"};
constexpr const char* kReductionNames[kReductions] = {"sum",     "product", "min", "max",
                                                      "average", "band",    "bor", "bxor"};
constexpr size_t kWords = sizeof(CallRecord) / sizeof(uint64_t);

using Words = std::array<uint64_t, kWords>;
static_assert(sizeof(Words) == sizeof(CallRecord) && offsetof(CallRecord, number) == 0);

std::atomic_ref<uint64_t> word(const CallRecord* record, size_t at) {
  return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(const_cast<CallRecord*>(record))[at]);
}

template <size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  std::memset(to, 0, N);
  std::memcpy(to, from.data(), std::min(from.size(), N - 1));
}

// "rank 0 called X; ranks 1, 2 called Y", ranks with the same words together.
std::string who_called_what(const std::vector<std::pair<int, CallRecord>>& calls) {
  const std::string first = describe(calls[0].second);
  const bool all_read_alike = std::all_of(calls.begin(), calls.end(),
                                          [&](const auto& call) { return describe(call.second) == first; });
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (const auto& [rank, record] : calls) {
    const std::string words = describe(record, all_read_alike);
    auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& known) { return known.first == words; });
    if (group == groups.end()) group = groups.insert(group, {words, {}});
    group->second.push_back(rank);
  }
  std::string out;
  for (const auto& [words, ranks] : groups) {
    out += out.empty() ? "" : "; ";
    out += ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
    out += " called " + words;
  }
  return out;
}

}  // namespace

CallDigest& CallDigest::add(std::string_view text) {
  add(text.size());
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t value = 0;
    std::memcpy(&value, text.data() + at, std::min(text.size() - at, sizeof(value)));
    add(value);
  }
  return *this;
}

void set_name(CallRecord& record, std::string_view call, std::string_view algorithm) {
  copy_text(record.call, call);
  copy_text(record.algorithm, algorithm);
}

std::string describe(const CallRecord& record, bool with_algorithm) {
  const auto element = static_cast<uint32_t>(record.element);
  const char* type = element < kElements ? kElementNames[element] : "unknown type";
  const bool has_sizes = record.count != ~uint64_t{0};
  std::string out = has_sizes ? text("{} of {} {}", record.call, record.count, type)
                              : text("{} with splits of {}", record.call, type);
  if (record.reduction >= 0 && record.reduction < static_cast<int32_t>(kReductions))
    out += text(" {}", kReductionNames[record.reduction]);
  if (record.root >= 0) out += text(" with root {}", record.root);
  if (record.tag != 0) out += text(" with tag {}", record.tag);
  if (with_algorithm) out += text(" by {}", record.algorithm);
  return out;
}

Result<std::unique_ptr<CallLog>> CallLog::create(Communicator& comm) {
  std::unique_ptr<CallLog> log(new CallLog(comm));
  WEFT_TRY(logged(log->open(comm)));
  return log;
}

// Every rank offers its page, and maps those of the others.
Status CallLog::open(Communicator& comm) {
  sent_.assign(size_, 0);
  received_.assign(size_, 0);
  pages_.assign(size_, nullptr);
  ranges_.assign(size_, nullptr);
  WEFT_TRY_ASSIGN(ranges_[rank_], make_host_range({{}, Sharing::kHostMemory, 0, page_bytes() + 65536}));
  const uint64_t granularity = ranges_[rank_]->granularity();
  const uint64_t bytes = (page_bytes() + granularity - 1) / granularity * granularity;
  WEFT_TRY_ASSIGN(FdMessage offer, ranges_[rank_]->extend(bytes));
  struct Place {
    uint64_t process, local_name;
  };
  const Place mine{process_key(), ranges_[rank_]->local_name()};
  offer.bytes.assign(reinterpret_cast<const char*>(&mine), sizeof mine);
  comm.fd_exchange().begin_call();
  WEFT_TRY_ASSIGN(const std::vector<FdMessage> all,
                  comm.fd_exchange().all_gather(offer, "collectives.create", comm.deadline()));
  for (int rank = 0; rank < size_; ++rank) {
    if (std::ranges::count(comm.mapped_ranks(), rank) == 0) continue;  // its page cannot be read here
    if (rank != rank_) {
      Place place{};
      if (all[rank].bytes.size() != sizeof place)
        return Status::invalid("rank {} makes another call on this communicator", rank);
      std::memcpy(&place, all[rank].bytes.data(), sizeof place);
      if (place.process == mine.process) ranges_[rank] = find_range(place.local_name);
      if (!ranges_[rank]) {
        WEFT_TRY_ASSIGN(ranges_[rank], make_host_range({{}, Sharing::kHostMemory, 0, bytes}));
        WEFT_TRY(ranges_[rank]->import(all[rank], bytes));
      }
    }
    pages_[rank] = reinterpret_cast<CallRecord*>(ranges_[rank]->base());
  }
  // A thread of this process may go before the others have found its page.
  return comm.barrier();
}

// Readers see a record whole: its number is zero while it changes.
void CallLog::post_to(CallRecord* records, uint64_t size, uint64_t number, const CallRecord& record) {
  CallRecord* to = records + number % size;
  Words words;
  std::memcpy(words.data(), &record, sizeof words);
  word(to, 0).store(0, std::memory_order_relaxed);
  for (size_t i = 1; i < kWords; ++i) word(to, i).store(words[i], std::memory_order_release);
  word(to, 0).store(number, std::memory_order_release);
}

CallRecord CallLog::read(const CallRecord* records, uint64_t size, uint64_t number) {
  const CallRecord* from = records + number % size;
  CallRecord record;
  if (number == 0 || word(from, 0).load(std::memory_order_acquire) != number) return record;
  Words words;
  for (size_t i = 1; i < kWords; ++i) words[i] = word(from, i).load(std::memory_order_acquire);
  words[0] = word(from, 0).load(std::memory_order_acquire);
  if (words[0] == number) std::memcpy(static_cast<void*>(&record), words.data(), sizeof record);
  return record;
}

uint64_t CallLog::latest(const CallRecord* records, uint64_t size) {
  uint64_t most = 0;
  for (uint64_t i = 0; i < size; ++i)
    most = std::max(most, word(records + i, 0).load(std::memory_order_acquire));
  return most;
}

void CallLog::post_send(int peer, const CallRecord& record) {
  post_to(sends_at(rank_, peer), kLoggedMessages, ++sent_[peer], record);
}

void CallLog::post_receive(int peer, const CallRecord& record) {
  post_to(receives_at(rank_, peer), kLoggedMessages, ++received_[peer], record);
}

int CallLog::unreceived_sender(int first) const {
  for (int i = 0; i < size_; ++i) {
    const int peer = (first + i) % size_;
    if (peer != rank_ && latest(sends_at(peer, rank_), kLoggedMessages) > received_[peer]) return peer;
  }
  return -1;
}

CallRecord CallLog::own_call(uint64_t ago) const {
  return calls_ > ago ? read(calls_at(rank_), kLoggedCalls, calls_ - ago) : CallRecord();
}

std::string CallLog::mismatch() const {
  if (std::string words = differing_call(); !words.empty()) return words;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !pages_[peer]) continue;
    std::string words =
        differing_message(sends_at(rank_, peer), sent_[peer], receives_at(peer, rank_), peer, true);
    if (words.empty())
      words =
          differing_message(receives_at(rank_, peer), received_[peer], sends_at(peer, rank_), peer, false);
    if (!words.empty()) return words;
  }
  return {};
}

std::string CallLog::differing_call() const {
  const uint64_t first = calls_ > kLoggedCalls ? calls_ - kLoggedCalls + 1 : 1;
  for (uint64_t number = std::max(first, refused_ + 1); number <= calls_; ++number) {
    std::vector<std::pair<int, CallRecord>> calls;
    for (int rank = 0; rank < size_; ++rank)
      if (const CallRecord record = pages_[rank] ? read(calls_at(rank), kLoggedCalls, number) : CallRecord();
          record.number)
        calls.push_back({rank, record});
    const bool differ = std::any_of(calls.begin(), calls.end(), [&](const auto& call) {
      return call.second.digest != calls[0].second.digest;
    });
    if (differ)
      return text("collective {}: {}, allowed: the same call on all ranks", number, who_called_what(calls));
  }
  return {};
}

std::string CallLog::differing_message(const CallRecord* mine, uint64_t my_latest, const CallRecord* theirs,
                                       int peer, bool is_sender, uint64_t first) const {
  if (my_latest > kLoggedMessages) first = std::max(first, my_latest - kLoggedMessages + 1);
  for (uint64_t number = first; number <= my_latest; ++number) {
    const CallRecord own = read(mine, kLoggedMessages, number), other = read(theirs, kLoggedMessages, number);
    if (own.number == 0 || other.number == 0 || own.digest == other.digest) continue;
    const CallRecord &sent = is_sender ? own : other, &received = is_sender ? other : own;
    const int sender = is_sender ? rank_ : peer, receiver = is_sender ? peer : rank_;
    return text(
        "message {} from rank {} to rank {}: rank {} called {}; rank {} called {}, allowed: the same "
        "type, count and tag at both ends",
        number, sender, receiver, sender, describe(sent), receiver, describe(received));
  }
  return {};
}

std::string CallLog::progress(int rank) const {
  if (!pages_[rank]) return text("rank {} is reached through a port, so its calls are not known", rank);
  const uint64_t number = latest(calls_at(rank), kLoggedCalls);
  if (number == 0) return text("rank {} has made no call of all ranks", rank);
  const CallRecord last = read(calls_at(rank), kLoggedCalls, number);
  return text("rank {} has made {} calls of all ranks, the last one {}", rank, number, describe(last));
}

}  // namespace weft
