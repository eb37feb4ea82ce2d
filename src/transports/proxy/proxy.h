// SPDX-License-Identifier: Apache-2.0
//
// A Proxy is one host thread that takes commands from its FIFOs and carries them out through its queues.
//   WEFT_TRY_ASSIGN(auto proxy, Proxy::create(device, 2048));
//   proxy->add(std::move(queue)); proxy->start(...);   proxy->fifo(0)       // what device code is given
// It looks often while there is work. Then it naps: the longer there was none, the longer, 2 ms at most; of GPUs only after
// WEFT_PROXY_IDLE_S. Host
// threads whose kernels wait do its work meanwhile (help()): nobody has to be woken for what they asked for,
// nor for what they wait for. The proxy's own thread then only looks whether they still do.
// Threads: add() and start() by the maker, then only what is said to be for any.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/device.h"
#include "memory/host_visible.h"
#include "memory/local_memory.h"
#include "transports/proxy/peer_queue.h"

namespace weft::proxy {

// The reading end of a proxy's FIFOs.
class FifoReader {
 public:
  // `capacity` commands each, a power of two. Errors: kInvalid, kSystem.
  static Result<std::unique_ptr<FifoReader>> create(Device device, uint64_t capacity);

  // Number i of kFifosPerProxy.
  const Fifo& fifo(uint32_t i) const { return ends_[i].fifo; }
  // The next command, if there is one, and its position in its FIFO. FIFOs take turns. Threads: one at a time, as for
  // publish().
  bool pop(Command& command, uint64_t& position);
  // Lets device code have the slots of what was popped. pop() does so once in a while, too.
  void publish();
  // Whether everything was taken, of FIFOs that threads of the host fill. Threads: any.
  bool is_empty() const;

 private:
  struct End {
    Fifo fifo{};
    uint64_t* tail = nullptr;
    uint64_t next = 0, published = 0;

    bool pop(Command& command, uint64_t& position);
    void publish();
  };
  FifoReader(std::unique_ptr<HostVisible> memory, std::unique_ptr<LocalMemory> words)
      : memory_(std::move(memory)), words_(std::move(words)) {}
  std::unique_ptr<HostVisible> memory_;
  std::unique_ptr<LocalMemory> words_;  // what device code alone reads and writes
  std::array<End, kFifosPerProxy> ends_;
  uint32_t turn_ = 0, in_turn_ = 0;  // whose turn it is, and how many it has had
};

class Proxy {
 public:
  static Result<std::unique_ptr<Proxy>> create(Device device, uint64_t capacity);
  ~Proxy() { stop(); }

  const Fifo& fifo(uint32_t i) const { return fifos_->fifo(i); }
  void add(std::unique_ptr<PeerQueue> queue) { queues_.push_back(std::move(queue)); }
  // What moves the network, and what sleeps until that is worth while, so many ns at most. Null, where there are cores enough:
  // whoever waits stays awake.
  struct Network {
    std::function<void()> progress;
    std::function<bool(uint64_t most_ns)> sleep;
  };
  // `on_lost` is called once for each peer that is lost.
  void start(Network network, std::function<void(const PeerQueue&)> on_lost);
  // One round of its work, unless another thread is at it; whether anything came of it. Threads: any.
  bool help();
  // Sleeps until the network has more, after several rounds of help() in vain; whether it did. Threads: any.
  bool rest();
  // Until nothing is queued or under way, or `until`: what was asked for before has read its sources. Threads: any.
  void drain(Deadline until) const;
  // Until everything taken so far is with the peers, or `until`; then the thread ends. Threads: any.
  void finish(Deadline until);
  void stop();

 private:
  Proxy(std::unique_ptr<FifoReader> fifos, bool is_host) : fifos_(std::move(fifos)), is_host_(is_host) {}
  void run();
  bool turn();
  bool try_turn(bool& any);
  bool is_calm();
  using Nap = std::chrono::duration<double>;
  Nap nap_after(Nap quiet) const;
  bool take_commands();
  PeerQueue* queue_to(uint32_t rank);

  std::unique_ptr<FifoReader> fifos_;
  const bool is_host_;  // whose kernels fill them
  std::vector<std::unique_ptr<PeerQueue>> queues_;
  std::vector<bool> reported_;  // of a queue that lost its peer
  std::vector<PeerQueue*> by_rank_;
  Network network_;
  std::function<void(const PeerQueue&)> on_lost_;
  std::thread thread_;
  std::atomic<bool> is_turning_{false};  // somebody does the work
  std::atomic<uint64_t> helped_{0};      // rounds by others
  std::atomic<uint32_t> in_vain_{0};     // of them, since something came
  std::atomic<uint32_t> resting_{0};     // threads in rest()
  std::atomic<bool> is_finishing_{false}, is_finished_{false}, stopping_{false};
  std::atomic<uint64_t> quiet_turns_{0};  // that found nothing queued and nothing under way
  std::atomic<uint64_t> data_writes_{0};  // of all queues
  std::atomic<bool> has_queued_{false};   // a queue has
  uint64_t data_writes_seen_ = 0;         // by run()
  bool has_closed_ = false;
};

}  // namespace weft::proxy
