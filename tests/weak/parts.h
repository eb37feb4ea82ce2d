// SPDX-License-Identifier: Apache-2.0
//
// What a Machine is made of. Its own files alone include this.
#pragma once

#include <ucontext.h>

#include <functional>

#include "weak/memory.h"

namespace weft::weak {

struct Launch {
  const char* name = "";
  uint32_t rank = 0;
  uint32_t first_block = 0;
  uint32_t blocks = 1, warps = 1, lanes = 1;
  uint64_t shared_bytes = 0;
  std::function<void()> body;
};

struct Fiber;

// Lanes that meet: all of them come, or have left for good.
struct Rendezvous {
  uint32_t size = 0, arrived = 0, generation = 0;
  View joining;
  View joined;  // of the last rendezvous
  Clock joining_seen, joined_seen;
  std::vector<Fiber*> waiting;
  std::vector<Fiber*> lanes;        // of a warp
  std::vector<uint64_t> values[2];  // of exchanges, by turns: nobody is two ahead
};

struct BlockState {
  std::vector<std::byte> bytes;
  std::byte* shared = nullptr;
  Rendezvous all;
  std::vector<Rendezvous> warps;
  uint32_t alive = 0;
};

struct Barrier {
  uint32_t agent = 0, time = 0;  // of who initialised it
  uint32_t arrivals = 1;         // that the phase still waits for
  uint64_t bytes = 0;
  uint32_t phases = 0;  // completed
  View joining;
  View completed;
  std::vector<Fiber*> waiting;
};

// A bulk copy: an agent of its own. Its reads are at its time 1, its writes at 2.
struct Copy {
  uint32_t agent;
  View view;  // what the issuer knew
  Fiber* issuer;
  const std::byte* from;
  std::byte* to;
  Proxy reads_by, writes_by;
  uint64_t* barrier;  // null: of a group
  uint32_t unread, unwritten;
  uint32_t bytes;
  Origin origin;
  uint64_t priority;
};

struct Fiber {
  uint32_t agent;
  Place place;
  uint32_t stream;
  const Launch* launch;
  BlockState* block;
  uint64_t priority;
  View view;
  Clock seen;  // what strong loads showed, acquires or not: see Profile::branches_order
  std::array<std::shared_ptr<const View>, 3> fenced;  // what the last fence publishes by later strong stores
  std::array<View, 3> pending;  // what strong loads would learn by a fence of that scope
  // A plain store whose instruction runs when the hook returns.
  std::byte* plain = nullptr;
  uint64_t plain_bytes = 0;
  const void* plain_code = nullptr;
  std::vector<const std::byte*> polled;  // words loaded since the last pause()
  std::vector<const std::byte*> fresh;   // words whose newest write it must see now
  const void* again = nullptr;           // the last load's word, loaded so often without another between
  uint32_t agains = 0;
  std::vector<std::vector<Copy*>> groups{1};  // of bulk stores; the last is open
  std::vector<Copy*> loads;
  bool is_blocked = false;
  bool is_polling = false;      // ... in pause()
  bool looks_together = false;  // its warp has just loaded a line
  bool is_done = false;
  const char* waits_for = "";
  Origin waits_at;
  ucontext_t context;
  void* stack = nullptr;
};

}  // namespace weft::weak
