// SPDX-License-Identifier: Apache-2.0
//
// Keeps strangers from using up this process's descriptors through libfabric's listener, which takes every TCP connection
// and keeps it for as long as the caller likes. libfabric has no setting against that.
//   auto guard = ListenerGuard::of(address);   // of fi_getname()
//   guard->look();                             // again and again: nearly free
// Callers that say nothing never leave the kernel (TCP_DEFER_ACCEPT). Once the process has many files open, connections
// on which nothing has come for long are shut down, and libfabric closes them: peers send heartbeats, and one that is cut
// off so connects again. Callers that keep talking cannot be told from peers here. What libfabric leaves open of strangers'
// connections when its endpoint ends, this object closes at its own end.
// Threads: one at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <netinet/in.h>
#include <sys/types.h>

#include "base/paced_log.h"

namespace weft::provider {

class ListenerGuard {
 public:
  // Null where this process listens at no such socket.
  static std::unique_ptr<ListenerGuard> of(const std::string& address);
  ~ListenerGuard();
  ListenerGuard(const ListenerGuard&) = delete;
  ListenerGuard& operator=(const ListenerGuard&) = delete;

  void look() {
    if (++calls_ % kCallsPerLook == 0) look_now();
  }
  void look_now();
  // Right before libfabric's objects are closed; this one goes after them.
  void end_of_listener();

 private:
  static constexpr uint32_t kCallsPerLook = 256;

  ListenerGuard(int listener, const sockaddr_in& address) : listener_(listener), address_(address) {}
  void open_reserve();
  uint64_t shut_down_idle(bool is_urgent);

  int listener_;      // libfabric's own
  int reserve_ = -1;  // a descriptor to work with when there are no others
  sockaddr_in address_;
  std::vector<ino_t> last_;  // connections that libfabric has at its end
  uint32_t calls_ = 0;
  PacedLog refusals_;
  std::chrono::steady_clock::time_point next_{};
  std::chrono::steady_clock::duration pause_{};
};

}  // namespace weft::provider
