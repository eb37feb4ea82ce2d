// SPDX-License-Identifier: Apache-2.0
//
// The state behind the tables' functions: the network that this process has chosen, NCCL's logger, and the objects
// that NCCL holds handles of. A handle is a number, never an address, so a wrong one is refused and not followed.
// Threads: any.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "base/owner_process.h"
#include "bootstrap/tcp_bootstrap.h"
#include "compat/nccl_rma/rma.h"
#include "compat/nccl_rma/team.h"

namespace weft::nccl_rma {

// Objects by handle. `kKind` keeps handles of one sort from being taken for another's.
template <class T, uint64_t kKind>
class Handles {
 public:
  void* add(T object) {
    std::lock_guard lock(mutex_);
    const uint64_t id = kKind << 40 | ++made_;
    all_.emplace(id, Held{std::move(object), {}});
    return reinterpret_cast<void*>(id);
  }
  Result<T> find(const char* argument, const void* handle) const {
    std::lock_guard lock(mutex_);
    const auto found = all_.find(reinterpret_cast<uint64_t>(handle));
    WEFT_TRY(check(argument, found));
    return found->second.object;
  }
  Result<T> take(const char* argument, const void* handle) {
    std::lock_guard lock(mutex_);
    const auto found = all_.find(reinterpret_cast<uint64_t>(handle));
    WEFT_TRY(check(argument, found));
    T object = std::move(found->second.object);
    all_.erase(found);
    return object;
  }

 private:
  struct Held {
    T object;
    OwnerProcess owner;  // a forked child has the table, and leaves what is in it alone
  };
  using All = std::unordered_map<uint64_t, Held>;

  Status check(const char* argument, typename All::const_iterator found) const {
    if (found == all_.end())
      return Status::invalid("{}: got a handle that was never made, or was given back", argument);
    return found->second.owner.check(argument);
  }

  mutable std::mutex mutex_;
  uint64_t made_ = 0;
  All all_;
};

struct Listener {
  int device;
  UniqueId unique_id;
  bool is_rank_0 = false;  // whose rendezvous the ranks join
};
struct TeamEntry {
  std::shared_ptr<Team> team;
  uint64_t serial;  // marks its memory handles
};
struct ContextEntry {
  std::shared_ptr<Team> team;
  uint64_t serial;
  uint32_t context;
};

class Plugin {
 public:
  static Plugin& instance();

  // Chooses the network, once per process. Errors: kUnsupported and kInvalid with the reasons, again on every call.
  Status init(NcclLogger logger);
  Result<int> devices();
  Status properties(int device, PropertiesV12& properties);
  // The NIC of a device number, over which a team is made; null for an unknown number.
  Result<const provider::Nic*> nic(int device) const;
  const proxy::Network& network() const { return *network_; }

  void say(NcclLogLevel level, const std::string& words) const;

  Handles<uint64_t, 1> instances;
  Handles<std::shared_ptr<Listener>, 2> listeners;
  Handles<TeamEntry, 3> teams;
  Handles<ContextEntry, 4> contexts;

 private:
  bool is_first(const std::string& line);
  struct Device {
    std::string name, pci_path;
  };
  mutable std::mutex mutex_;
  std::atomic<NcclLogger> logger_{nullptr};
  std::unique_ptr<proxy::Network> network_;
  std::deque<Device> devices_;  // strings that NCCL points to
  std::mutex said_mutex_;
  std::set<std::string> said_;
};

}  // namespace weft::nccl_rma
