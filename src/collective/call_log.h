// SPDX-License-Identifier: Apache-2.0
//
// CallLog: each rank of a runner records its calls on a page that the others can read. At a deadline it says which rank
// called what.
//   WEFT_TRY_ASSIGN(auto log, CallLog::create(*comm));       // collective
//   log->post(record);                                       // before every call of all ranks
//   if (const std::string words = log->mismatch(); !words.empty()) ...
// Calls of all ranks are numbered alike; messages between two ranks are numbered for each direction. Posting
// costs a few stores to the own page. Records older than kLoggedCalls calls are overwritten. Ranks that are
// reached through ports have no pages here: nothing is known of their calls.
// Threads: one thread posts calls, one sends, one receives; all else may be called from any.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "comm/communicator.h"
#include "kernels/collective/program_args.h"
#include "memory/range.h"

namespace weft {

// Mixes numbers into 64 bits, alike on all ranks.
class CallDigest {
 public:
  CallDigest& add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15;
    state_ ^= state_ >> 32;
    return *this;
  }
  CallDigest& add(std::string_view text);
  uint64_t state() const { return state_; }
  uint32_t value() const { return static_cast<uint32_t>(state_); }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

// What was called. Trivially copyable: other processes read it.
struct CallRecord {
  uint64_t number = 0;  // set by the log: from 1; 0: none
  uint64_t count = 0;   // elements, or ~0 where ranks have sizes of their own
  uint32_t digest = 0;  // equal where calls belong together
  int32_t root = -1;    // -1: none
  Element element = Element::kFp32;
  int32_t reduction = -1;  // a Reduction, or -1
  int32_t tag = 0;         // of a message
  uint32_t reserved = 0;
  char call[16] = {};       // "all_reduce"
  char algorithm[48] = {};  // "allreduce_ring LL"
};
static_assert(sizeof(CallRecord) == 104);

void set_name(CallRecord& record, std::string_view call, std::string_view algorithm);
// "all_reduce of 4 float32 sum", and "by allreduce_ring LL".
std::string describe(const CallRecord& record, bool with_algorithm = false);

class CallLog {
 public:
  static constexpr uint32_t kLoggedCalls = 64, kLoggedMessages = 16;

  // Collective. Errors: kSystem, kPeerLost.
  static Result<std::unique_ptr<CallLog>> create(Communicator& comm);

  void post(const CallRecord& record) { post_to(calls_at(rank_), kLoggedCalls, ++calls_, record); }
  void post_send(int peer, const CallRecord& record);
  void post_receive(int peer, const CallRecord& record);
  // The first rank, in circular order from `first`, that has posted more sends to this rank than this rank has
  // posted receives from it; -1: none has. Called where receives are posted.
  int unreceived_sender(int first) const;
  // The record of the last call but `ago`; number 0: none.
  CallRecord own_call(uint64_t ago = 0) const;

  // Says what each rank called at the first difference: in the earliest recorded call, else in the earliest
  // message between this rank and another. Empty: no difference is known.
  std::string mismatch() const;
  // "rank 1 has made 3 calls, the last one all_gather of 4 float32"; of a rank without any: "no call".
  std::string progress(int rank) const;

  // Waits until all ranks have posted this rank's last call. Errors: kInvalid where a call differs, and then no rank makes
  // the call, so that it counts no more; past `until` kInvalid with mismatch(), or kPeerLost, naming who has not posted;
  // kClosed once is_stopped() says so.
  template <class IsStopped>
  Status compare(Deadline until, IsStopped is_stopped) {
    const Status status = wait_for(
        until, is_stopped, [&](int rank) { return latest(calls_at(rank), kLoggedCalls) >= calls_; },
        [this] { return differing_call(); });
    if (status.code() == Code::kInvalid) refused_ = calls_;
    return status;
  }
  // The same for a message of `peer`: this rank's last receive from it. Earlier messages were compared by their own
  // receives.
  template <class IsStopped>
  Status compare_receive(int peer, Deadline until, IsStopped is_stopped) const {
    return wait_for(
        until, is_stopped,
        [&](int rank) {
          return rank != peer || latest(sends_at(peer, rank_), kLoggedMessages) >= received_[peer];
        },
        [&] {
          return pages_[peer] ? differing_message(receives_at(rank_, peer), received_[peer],
                                                  sends_at(peer, rank_), peer, false, received_[peer])
                              : std::string();
        });
  }

 private:
  explicit CallLog(Communicator& comm) : rank_(comm.rank()), size_(comm.size()) {}
  Status open(Communicator& comm);

  // A page: the calls, then for every peer what is sent to it and what is received from it.
  CallRecord* calls_at(int rank) const { return pages_[rank]; }
  CallRecord* sends_at(int rank, int to) const {
    return pages_[rank] + kLoggedCalls + static_cast<size_t>(to) * kLoggedMessages;
  }
  CallRecord* receives_at(int rank, int from) const { return sends_at(rank, size_ + from); }
  uint64_t page_bytes() const {
    return (kLoggedCalls + uint64_t{2} * size_ * kLoggedMessages) * sizeof(CallRecord);
  }

  static void post_to(CallRecord* records, uint64_t size, uint64_t number, const CallRecord& record);
  static CallRecord read(const CallRecord* records, uint64_t size, uint64_t number);
  static uint64_t latest(const CallRecord* records, uint64_t size);
  std::string differing_call() const;
  std::string differing_message(const CallRecord* mine, uint64_t my_latest, const CallRecord* theirs,
                                int peer, bool is_sender, uint64_t first = 1) const;

  // difference() says what of this call differs.
  template <class IsStopped, class HasPosted, class Difference>
  Status wait_for(Deadline until, IsStopped is_stopped, HasPosted has_posted, Difference difference) const {
    for (int rank = 0; rank < size_; ++rank) {
      if (!pages_[rank]) continue;
      const bool is_posted = wait_until(until, [&] { return has_posted(rank) || is_stopped(); });
      if (is_stopped()) return Status::make(Code::kClosed, "stopped while calls were compared");
      const std::string words = is_posted ? difference() : mismatch();
      if (!words.empty()) return Status(Code::kInvalid, words);
      if (!is_posted)
        return Status::make(Code::kPeerLost, "rank {} called {}; {}", rank_, describe(own_call()),
                            progress(rank));
    }
    return {};
  }

  const int rank_, size_;
  std::vector<CallRecord*> pages_;  // by rank
  std::vector<std::shared_ptr<MappedRange>> ranges_;
  uint64_t calls_ = 0;
  uint64_t refused_ = 0;                   // up to this call all was compared before it moved anything
  std::vector<uint64_t> sent_, received_;  // by peer
};

}  // namespace weft
