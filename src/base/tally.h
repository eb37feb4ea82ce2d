// SPDX-License-Identifier: Apache-2.0
//
// The Tally of a process counts what it does, in memory that `weft top` of the same user can read meanwhile.
//   CallTally tally("collectives", {key, rank, size, "cuda:0", names_of_transports});
//   TallyOperation& all_reduce = tally.operation("all_reduce");
//   return tally.count(all_reduce, {bytes, elements, element}, [&] { return launch(); });   // a Status or Result
// Counting a call costs two clock readings and some twenty additions; it calls no other process and allocates
// nothing. Its time is the host's: on the CPU the whole call, on a GPU what it takes to enqueue it. The memory has no
// name in the file system: a process of the same user finds it among this one's descriptors, as `memfd:weft-tally`,
// and it is gone with the process. A reader takes it with one pread().
// Threads: operations and peers may be counted from any thread; a CallTally by the caller of its calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <ctime>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace weft {

inline constexpr char kTallyName[] = "weft-tally";
inline constexpr uint32_t kTallyVersion = 2;
// Times by powers of two: bucket b has what took less than 2^b * 1.024 us, the last one all that took longer.
inline constexpr uint32_t kTallyBuckets = 24;

using Count = std::atomic<uint64_t>;

inline void count_up(Count& to, uint64_t value) {
  to.fetch_add(value, std::memory_order_relaxed);
}

struct TallyOperation {
  char name[32];       // "all_reduce"
  char transport[32];  // "mapped", "mapped+proxy", "fabric:tcp"
  Count calls, bytes, errors, busy_ns;
  Count waits, waited_ns;  // of the host, for peers: calls with a wait in them, and how long
  Count took[kTallyBuckets];
};

struct TallyPeer {
  char name[40];       // a rank of its communicator, or the name of a transfer engine
  char transport[24];  // that reaches it
  Count messages, bytes, retries, faults;
};

// An object that makes calls of all ranks: a communicator's collectives, a buffer. Ranks count its calls alike.
struct TallyGroup {
  uint64_t key;  // the same on all ranks
  char what[16];
  char device[16];
  int32_t rank, size;  // of size 0: none
  Count is_open;
  Count calls;               // begun
  Count began_ns, ended_ns;  // of the last one, by the monotonic clock
  Count operation;           // its place among the operations
};

// One call. `number` is written last, and 0 while the rest changes.
struct TallyCall {
  Count number;  // in the process, from 1
  uint64_t group_key;
  uint64_t group_call;       // in the group, from 1; 0: a call that not all ranks make
  uint64_t elements, bytes;  // ~0 elements: of sizes that differ by rank
  uint64_t began_ns;
  Count ended_ns;      // 0: under way
  int32_t element;     // an Element of kernels/collective, or -1
  uint32_t operation;  // its place
  uint32_t is_failed, reserved;
};

struct TallyPage {
  static constexpr uint32_t kOperations = 192, kPeers = 1024, kGroups = 64, kCalls = 1024;
  uint64_t key;  // of SharedMemory
  uint32_t version, bytes;
  uint64_t made_ns;  // a fork makes its own, beside the descriptor of its parent's: the later one counts
  int64_t wall_minus_monotonic_ns;
  Count has_secret;  // 1: the process has a job secret, when the page was made
  Count num_operations, num_peers, num_groups, num_calls;
  TallyOperation operations[kOperations];  // the last of each stands for all that did not fit
  TallyPeer peers[kPeers];
  TallyGroup groups[kGroups];
  TallyCall calls[kCalls];  // the last ones, by number
};

inline uint64_t tally_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// How long this thread has waited for peers so far, in kernels on the CPU: what a call adds to it is its waiting.
inline thread_local uint64_t waited_for_peers_ns = 0;

// Notes a call of so many bytes.
inline void count_one(TallyOperation& to, uint64_t bytes) {
  count_up(to.calls, 1);
  count_up(to.bytes, bytes);
}

// Notes how long something took: of a call, or of a transfer from submission to its end.
inline void add_time(TallyOperation& to, uint64_t ns) {
  count_up(to.busy_ns, ns);
  count_up(to.took[std::min<uint32_t>(static_cast<uint32_t>(std::bit_width(ns >> 10)), kTallyBuckets - 1)],
           1);
}

// The contents of a page, read while its process went on: a call that changes meanwhile is left out.
struct TallySnapshot {
  struct Operation {
    std::string name, transport;
    uint64_t calls, bytes, errors, busy_ns, waits, waited_ns;
    std::vector<uint64_t> took;
  };
  struct Peer {
    std::string name, transport;
    uint64_t messages, bytes, retries, faults;
  };
  struct Group {
    uint64_t place, key;
    std::string what, device, operation;
    int32_t rank, size;
    uint64_t calls, began_ns, ended_ns;
    bool is_open;
  };
  struct Call {
    uint64_t number, group_key, group_call;
    std::string operation, transport;
    uint64_t elements, bytes, began_ns, ended_ns;
    int32_t element;
    bool is_failed;
  };
  uint64_t made_ns = 0;
  int64_t wall_minus_monotonic_ns = 0;
  bool has_secret = false;
  std::vector<Operation> operations;
  std::vector<Peer> peers;
  std::vector<Group> groups;  // those that are closed, too, until another one takes their place
  std::vector<Call> calls;    // ascending
};
// From the bytes of a page; nothing in them is trusted. Errors: kInvalid for a page of another version of Weft.
Result<TallySnapshot> read_tally(std::string_view page);

// The process's own: made at first use, by a fork again, and never gone.
TallyPage& tally_page();
bool has_tally();
// By name, made where there is none yet. Threads: any.
TallyOperation& tally_operation(std::string_view name, std::string_view transport);
TallyPeer& tally_peer(std::string_view name, std::string_view transport);

struct TallyCaller {
  uint64_t key;
  int rank, size;
  std::string device;
  std::vector<std::string> transports;  // by rank; empty: the own one
};

struct CallFacts {
  uint64_t bytes = 0;
  uint64_t elements = 0;
  int32_t element = -1;
  bool is_of_all_ranks = true;
};

// Counts the calls of one object.
class CallTally {
 public:
  CallTally(std::string_view what, const TallyCaller& caller);
  ~CallTally();
  CallTally(const CallTally&) = delete;
  CallTally& operator=(const CallTally&) = delete;

  // For good: keep what it returns.
  TallyOperation& operation(std::string_view name) { return tally_operation(name, transports_); }
  TallyPeer* peer(size_t rank) { return rank < peers_.size() ? peers_[rank] : nullptr; }
  void sent_to(size_t rank, uint64_t bytes) {
    count_up(peers_[rank]->messages, 1);
    count_up(peers_[rank]->bytes, bytes);
  }
  // Of a rank that was given up: counted once.
  void lost(size_t rank) {
    if (rank >= peers_.size() || is_lost_[rank]) return;
    is_lost_[rank] = true;
    count_up(peers_[rank]->faults, 1);
  }

  template <class Call>
  auto count(TallyOperation& operation, const CallFacts& facts, Call call) {
    const UnderWay under_way = begin(operation, facts);
    auto result = call();
    end(operation, under_way, is_ok(result));
    return result;
  }

 private:
  static bool is_ok(const Status& status) { return status.ok(); }
  template <class T>
  static bool is_ok(const Result<T>& result) {
    return result.status().ok();
  }
  struct UnderWay {
    uint64_t number, began_ns, bytes;
    bool is_of_all_ranks;
    uint64_t waited_before_ns;  // of this thread
  };
  UnderWay begin(TallyOperation& operation, const CallFacts& facts);
  void end(TallyOperation& operation, const UnderWay& call, bool is_ok);

  TallyPage& page_;
  TallyGroup* group_;
  std::string transports_;
  std::vector<TallyPeer*> peers_;
  std::vector<bool> is_lost_;
};

}  // namespace weft
