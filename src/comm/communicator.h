// SPDX-License-Identifier: Apache-2.0
//
// A Communicator is a group of ranks, each with its device, and the transport from each to each.
//   WEFT_TRY_ASSIGN(auto comm, Communicator::create(bootstrap, Device{Device::Kind::kCuda, 0}, 30.0));
//   WEFT_TRY_ASSIGN(auto window, Window::create(comm, 64 << 20));
// Threads: const methods may run concurrently; collective calls are one at a time per communicator, in the
// same order on all ranks. Lifetime: windows keep their communicator alive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/owner_process.h"
#include "base/status.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/fd_exchange.h"
#include "bootstrap/peer_watch.h"
#include "bootstrap/tcp_bootstrap.h"
#include "comm/choice.h"
#include "memory/range.h"
#include "transports/transport.h"

namespace weft {

struct TallyCaller;

class Communicator {
 public:
  // Collective over the bootstrap. `timeout_s` bounds every wait of this communicator, this call included; 0
  // takes WEFT_TIMEOUT_S. `transport` is a name or "auto"; empty takes WEFT_TRANSPORT. Errors: kInvalid for
  // an unknown transport or when ranks disagree about settings; kUnsupported when a rank cannot reach
  // another, with each transport's reason; kPeerLost naming the ranks that stayed away.
  static Result<std::shared_ptr<Communicator>> create(std::shared_ptr<Bootstrap> bootstrap, Device device,
                                                      double timeout_s = 0, std::string_view transport = "");

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(facts_.size()); }
  Device device() const { return facts_[rank_].device; }
  // A random number of this communicator, the same on all its ranks.
  uint64_t key() const { return key_; }
  double timeout_s() const { return timeout_s_; }
  Deadline deadline() const { return Deadline::after_s(timeout_s_); }
  // Over the rendezvous of the nodes, where there is one: a rank that is lost ends the exchange at once.
  Bootstrap& bootstrap() { return rendezvous_ ? *rendezvous_ : *bootstrap_; }
  ~Communicator();
  // kInvalid in a forked child, for this communicator and what is made of it.
  Status check_owner(const char* what = "communicator") const { return owner_.check(what); }
  // The group in whose name an object of this communicator counts its calls: see CallTally.
  TallyCaller tally_caller() const;

  // The facts of every rank, in rank order: host, node, device.
  const std::vector<RankFacts>& facts() const { return facts_; }
  // The transport to a peer; null for the own rank.
  const Transport* transport_to(int peer) const { return transports_[peer]; }
  // This rank's half of the ways to mapped peers and to port peers; the latter null where no rank of the
  // communicator has a port peer.
  Link& mapped_link() const { return *mapped_link_; }
  // The link that brings the memory of windows (Caps::brings_memory); null where Weft makes it itself.
  Link* memory_link() const { return memory_link_.get(); }
  Link* port_link() const { return port_link_.get(); }
  // The status of the port link, with the lost rank and how it was lost, if known.
  Status port_status();
  // "rank 0 reaches rank 2 through ports": why something that needs mapped peers only is refused; empty where
  // every rank maps every other.
  std::string why_not_all_mapped() const;
  // Ranks whose windows this rank can load from and store to, itself included, ascending.
  const std::vector<int>& mapped_ranks() const { return mapped_ranks_; }
  Sharing sharing() const { return sharing_; }
  // Where windows with port peers lie. Those with a host part share the rest by near_sharing(); others lie whole as
  // sharing() says.
  const PortWindows& port_windows() const { return port_windows_; }
  Sharing near_sharing() const { return near_sharing_; }
  // The same for people; empty where there is nothing to choose.
  std::string port_placement() const;
  // Bytes and descriptors among mapped_ranks().
  FdExchange& fd_exchange() { return *fd_exchange_; }
  // Reports which of mapped_ranks() have died.
  PeerWatch& peers() { return *peers_; }

  // The window that holds [address, address + 1) of this rank, by its number among the windows of this
  // communicator, the same on all ranks; -1 where none does. Threads: any.
  struct WindowPlace {
    int number = -1;
    uint64_t offset = 0;
  };
  WindowPlace find_window(const std::byte* address) const;
  // The number that the next window gets; every rank counts alike.
  int take_window_number() { return next_window_++; }
  // Base addresses by rank of every window, by number; null where it is gone. Windows come and go through
  // these.
  std::vector<std::byte* const*> window_tables() const;
  // Another number, never 0, whenever these have changed.
  uint64_t windows_version() const { return windows_version_; }
  void add_window(int number, const std::byte* base, uint64_t bytes, std::byte* const* table);
  void resize_window(int number, uint64_t bytes);
  void remove_window(int number);

  // Waits until every rank has called it. Writes of a rank to mapped host memory before it are visible to all
  // ranks after it. Says nothing about work queued on a GPU. Errors: kPeerLost, naming the rank that is gone
  // or stayed away.
  Status barrier();

  // A barrier at which every rank shows the same numbers, or words of up to 24 bytes. Errors: those of barrier();
  // kInvalid, on all ranks, naming the first that differs and two ranks. Peers that are not mapped agree, too.
  struct Agreed {
    const char* name;
    uint64_t value;
    std::string word = {};
  };
  Status agree(std::string_view operation, const std::vector<Agreed>& mine);
  // A barrier at which every rank shows as many numbers: returns them by rank. Errors: those of barrier();
  // kInvalid where a rank showed something else.
  Result<std::vector<std::vector<uint64_t>>> show(std::string_view operation,
                                                  const std::vector<uint64_t>& mine);

 private:
  Communicator() = default;
  Status meet(std::string_view transport);
  bool is_mapped_enough(std::string_view wanted) const;
  Status exchange_descriptors(std::string_view wanted);
  Status connect(std::string_view transport);
  Status watch_peers();
  Status meet_other_nodes();
  Status lost_in(std::string_view operation, Status status);
  Status open_links(const std::vector<std::vector<const Transport*>>& chosen,
                    const std::vector<Candidate>& candidates);
  Status open_memory(const std::vector<std::vector<const Transport*>>& chosen,
                     const std::vector<Candidate>& candidates, const Group& group);
  Status agree_on_links(const Status& mine);
  Status choose_windows();
  Result<PortWindows> agree_on_port_windows();
  Status try_host_part();
  Status try_device_memory();
  Result<std::vector<std::string>> show_all(std::string_view operation, const std::string& mine);

  const OwnerProcess owner_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<FdExchange> fd_exchange_;
  std::unique_ptr<PeerWatch> peers_;
  std::shared_ptr<RendezvousBootstrap> rendezvous_;  // ends before peers_
  std::vector<RankFacts> facts_;
  std::vector<FdAddress> addresses_;
  std::vector<const Transport*> transports_;
  std::vector<int> mapped_ranks_;
  Sharing sharing_ = Sharing::kHostMemory, near_sharing_ = Sharing::kHostMemory;
  PortWindows port_windows_;
  std::string port_pair_;  // why_not_all_mapped()
  std::unique_ptr<Link> mapped_link_;
  std::shared_ptr<Link> memory_link_, port_link_;  // one where what brings memory reaches ports, too
  double timeout_s_ = 0;
  uint64_t key_ = 0;
  std::string secret_;  // Group::secret
  int rank_ = 0;
  bool port_reaches_gpus_ = false, port_stores_words_ = false;  // Caps of port_link_'s transport

  struct KnownWindow {
    const std::byte* base = nullptr;  // null: gone, or never came to be
    uint64_t bytes = 0;
    std::byte* const* table = nullptr;
  };
  mutable std::mutex windows_mutex_;
  std::vector<KnownWindow> windows_;  // by number
  std::atomic<uint64_t> windows_version_ = 1;
  int next_window_ = 0;
};

}  // namespace weft
