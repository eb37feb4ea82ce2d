// SPDX-License-Identifier: Apache-2.0
//
// Runs users' callbacks on one thread of their own, so that a slow one never holds up the network.
//   callbacks.post([cb, status] { cb(status); });
// The thread starts with the first callback. Order: as posted. Threads: post() from any.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace weft::transfer {

class Callbacks {
 public:
  Callbacks() = default;
  ~Callbacks() { stop(); }

  void post(std::function<void()> call);
  // Runs what was posted, then ends the thread. Not from inside a callback.
  void stop();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> calls_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace weft::transfer
