// SPDX-License-Identifier: Apache-2.0
//
// The queues of one rank to all its peers: made, joined, handed to device code, watched, and left.
//   WEFT_TRY_ASSIGN(auto queues, Queues::create(nic, device, served, sizes));
//   all ranks exchange queues->addresses(); WEFT_TRY(queues->connect(theirs)); queues->start(on_broken);
//   queues->table() is what device code reads; queues->leave(until) at the end.
// Threads: one at a time, but for broken().
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "memory/host_visible.h"
#include "memory/local_memory.h"
#include "transports/ibgda/nic.h"
#include "transports/ibgda/wire.h"

namespace weft::ibgda {

struct QueueSizes {
  int rank = 0, ranks = 0;
  uint32_t per_peer = 1;  // queues
  uint32_t blocks = 1024;
};

class Queues {
 public:
  // `served`: the ranks that there are queues to, this one among them. Errors: kSystem.
  static Result<std::unique_ptr<Queues>> create(Nic& nic, Device device, const std::vector<int>& served,
                                                const QueueSizes& sizes);
  ~Queues();
  Queues(const Queues&) = delete;

  // For the peer of that rank, of all queues to it; empty where there are none.
  std::string addresses(int peer) const;
  // `theirs`: what the peer of each rank gave for this one. Errors: kPeerLost, kSystem.
  Status connect(const std::vector<std::string>& theirs);
  // Starts to watch: `on_broken` is called once for each queue that breaks, from a thread of this object.
  void start(std::function<void(const FaultBox&)> on_broken);
  void stop();

  const Queue* table() const { return table_->at<Queue>(0); }        // [ranks, per_peer]
  QueueState* states() const { return states_->at<QueueState>(0); }  // the same
  uint32_t per_peer() const { return sizes_.per_peer; }
  uint32_t batch() const;  // entries of one call at a time: half of the least queue
  // Until the NIC is done with all that was posted, or `until`. False: it is not.
  bool drain(Deadline until) const;
  // Sends every peer a farewell and waits for the farewells of all peers except those that forgo() names.
  void leave(Deadline until);
  void forgo(int peer);  // Threads: any

  // Begins anew after a queue broke: both ends do, with nothing posted in between. Then connect().
  Status reset(int peer);

 private:
  Queues(Nic& nic, Device device, const QueueSizes& sizes) : nic_(nic), device_(device), sizes_(sizes) {}
  Status open(const std::vector<int>& served);
  Status open_queue(int peer, uint32_t which);
  size_t place(int peer, uint32_t which) const { return static_cast<size_t>(peer) * sizes_.per_peer + which; }
  bool is_idle(size_t place) const;
  bool is_broken(size_t place) const;
  bool is_refused(size_t place) const;
  void post_farewell(size_t place);
  void look_for_errors(size_t place);
  bool notices_break(size_t place);
  bool pass_on_doorbells();
  Status describe(size_t place);
  void watch();

  struct Pair {
    int peer = 0;
    std::unique_ptr<QueuePair> pair;
    bool is_reported = false;
    uint64_t passed_on = 0;  // doorbell
    RemotePart farewell{};   // the peer's word for this queue
  };

  Nic& nic_;
  const Device device_;
  const QueueSizes sizes_;
  std::map<size_t, Pair> pairs_;  // by place
  std::unique_ptr<HostVisible> words_;
  FaultBox* faults_ = nullptr;                        // [places]
  uint64_t *sinks_ = nullptr, *farewells_ = nullptr;  // [places]
  Enrolled enrolled_;                                 // the two of them
  std::unique_ptr<LocalMemory> states_, table_;
  std::function<void(const FaultBox&)> on_broken_;
  std::thread watcher_;
  std::atomic<bool> stops_{false};
  mutable std::mutex mutex_;  // of faults, reported and forgone; held while a queue begins anew
  std::set<int> forgone_;
};

}  // namespace weft::ibgda
