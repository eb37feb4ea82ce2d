// SPDX-License-Identifier: Apache-2.0
//
// A rendezvous of ranks over TCP. Its server is a thread of one process, which passes on what the ranks give each
// other. Ranks find it by a unique id, or at an address that all of them were given.
//   WEFT_TRY_ASSIGN(UniqueId unique_id, open_rendezvous(""));                         // in one process, which sends it
//   WEFT_TRY_ASSIGN(auto bootstrap, join_rendezvous(unique_id, rank, size, until));   // on every rank, there too
//   auto bootstrap = bootstrap_at({"10.0.0.1", 29600, rank, size, secret});           // or: rank 0's process serves
// Ranks and server prove to each other that they know the id's key and WEFT_JOB_SECRET (bootstrap/listener.h). Neither
// is sent. With WEFT_TLS=1 all that follows is encrypted. The thread ends when the last rank has left, or when nobody
// came for an hour. Wire format, in the host's byte order: the frames of bootstrap/frame.h.
// Threads: a bootstrap takes one all_gather at a time. report() may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "bootstrap/bootstrap.h"

namespace weft {

// Names a rendezvous and holds its key. Plain bytes, to be copied as they are; they fit NCCL's unique id.
struct UniqueId {
  char magic[8];
  uint16_t is_ipv6;
  uint16_t port;  // host byte order
  uint32_t reserved;
  unsigned char address[16];  // IPv4: the first four
  uint64_t key[2];

  bool is_valid() const;
};
static_assert(sizeof(UniqueId) == 48);

// Listens on the address that choose_interface() takes, and logs why. Errors: kSystem; kInvalid when `interface`
// has no address.
Result<UniqueId> open_rendezvous(const std::string& interface);

// The address of a rendezvous: rank 0 listens there.
struct RendezvousAddress {
  std::string host;  // a name or an address
  uint16_t port = 0;
  int rank = 0, size = 1;
  std::string secret;  // empty: whoever reaches the address is taken for a rank
};
// Connects at the first all_gather. Ranks may start in any order: a rank that finds nobody listening tries again until
// the deadline. After an error it is closed. Errors of all_gather: kInvalid for a host without an address, another
// secret, and ranks that do not fit; kSystem where rank 0 cannot listen; kPeerLost names the ranks that stay away.
class AddressBootstrap : public Bootstrap {
 public:
  // Lets go of connections; all_gather fails from then on. May be called again.
  virtual void close() = 0;
};
std::shared_ptr<AddressBootstrap> bootstrap_at(RendezvousAddress place);

// A rendezvous also knows which ranks are lost, and tells all others at once. A rank is lost when its connection ends
// before it has left, when its host acknowledges nothing for WEFT_PEER_DEAD_S, or when another rank reports it. A rank
// leaves with its bootstrap, or when its process exits. A stopped process is not lost.
class RendezvousBootstrap : public Bootstrap {
 public:
  // `tell` is called for each rank that is lost, with words as "was killed by signal 9", also for those that
  // are already, from a thread of this object. It may be called for one that `tell` knows, and for this rank
  // itself, where the others have given it up.
  virtual void on_lost(std::function<void(int peer, const std::string& how)> tell) = 0;
  // This rank has found that a peer is lost. is_sure: it knows how the peer died; else the report of a rank that knows
  // is preferred. Never waits.
  virtual void report(int peer, const std::string& how, bool is_sure) = 0;
};

// Connects to the rendezvous. Errors: kInvalid for a unique id of something else, another job's secret, and ranks
// that do not fit; kPeerLost when nobody answers at its address by `until`.
Result<std::shared_ptr<RendezvousBootstrap>> join_rendezvous(const UniqueId& unique_id, int rank, int size,
                                                             Deadline until);

}  // namespace weft
