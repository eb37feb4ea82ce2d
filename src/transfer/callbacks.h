// SPDX-License-Identifier: Apache-2.0
//
// Runs users' callbacks on one thread of their own, so that a slow one never holds up the network.
//   callbacks.post([cb, status] { cb(status); });
// The thread starts with the first callback. Order: as posted. Threads: every method from any, also from
// inside callbacks.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace weft::transfer {

class Callbacks {
 public:
  Callbacks();
  ~Callbacks() { stop(); }
  void post(std::function<void()> call);
  // Runs what was posted, then ends the thread. From inside a callback it returns at once, and the rest
  // follows when that one has returned.
  void stop();

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);
  std::shared_ptr<Queue> queue_;  // the thread's, too: it may outlive this object
  std::thread thread_;            // under the queue's mutex until stop()
};

}  // namespace weft::transfer
