// SPDX-License-Identifier: Apache-2.0
//
// The peers that a link knows to be lost, each once, and the listener that is told of them: Link::on_lost().
//   if (lost.add(peer, "is lost: ...")) ...      // true: the first word about this peer
//   lost.listen(tell);                           // at once for those that are lost already
// Threads: any. `tell` runs under a lock of this object.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace weft {

class LostPeers {
 public:
  using Tell = std::function<void(int peer, const std::string& how)>;

  // The listener is not told of `self`.
  explicit LostPeers(int self) : self_(self) {}

  bool add(int peer, const std::string& how) {
    std::lock_guard lock(mutex_);
    if (!how_.try_emplace(peer, how).second) return false;
    if (tell_ && peer != self_) tell_(peer, how);
    return true;
  }
  // Null: the listener is removed.
  void listen(Tell tell) {
    std::lock_guard lock(mutex_);
    tell_ = std::move(tell);
    for (const auto& [peer, how] : how_)
      if (tell_ && peer != self_) tell_(peer, how);
  }
  bool any() const {
    std::lock_guard lock(mutex_);
    return !how_.empty();
  }

 private:
  const int self_;
  mutable std::mutex mutex_;
  std::map<int, std::string> how_;
  Tell tell_;
};

}  // namespace weft
