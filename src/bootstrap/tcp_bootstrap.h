// SPDX-License-Identifier: Apache-2.0
//
// Ranks that meet over TCP, at an address that all of them were given, or by a ticket. By a ticket: whoever opens a meeting gets one, small enough for NCCL's unique id, and hands
// it to the others; a thread of its process then passes on what the ranks give each other.
//   WEFT_TRY_ASSIGN(MeetingTicket ticket, open_meeting(""));                    // on one process
//   WEFT_TRY_ASSIGN(auto bootstrap, join_meeting(ticket, rank, size, until));   // on every rank, there too
//   auto bootstrap = bootstrap_at({"10.0.0.1", 29600, rank, size, secret});     // or: rank 0's process is the one
// Who comes proves to know the ticket's key and WEFT_JOB_SECRET (bootstrap/door.h), and so does the meeting;
// neither is sent. What is said afterwards is encrypted with WEFT_TLS=1. The thread ends when the last rank has left,
// or when nobody came for an hour. Wire format, in the host's byte order: frames, which tcp_bootstrap.cc lists.
// Threads: a bootstrap takes one all_gather at a time, and report() from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "bootstrap/bootstrap.h"

namespace weft {

// Plain bytes, to be copied as they are.
struct MeetingTicket {
  char magic[8];
  uint16_t is_ipv6;
  uint16_t port;  // host byte order
  uint32_t reserved;
  unsigned char address[16];  // IPv4: the first four
  uint64_t key[2];

  bool is_valid() const;
};
static_assert(sizeof(MeetingTicket) == 48);

// Listens on the address that choose_interface() takes, and logs why. Errors: kSystem; kInvalid when `interface`
// has no address.
Result<MeetingTicket> open_meeting(const std::string& interface);

// Where ranks meet: rank 0 listens there.
struct MeetingPlace {
  std::string host;  // a name or an address
  uint16_t port = 0;
  int rank = 0, size = 1;
  std::string secret;  // empty: whoever reaches the place is taken for a rank
};
// Connects at the first all_gather. Ranks may start in any order: who finds nobody listening tries again until the
// deadline. After an error it is closed. Errors of all_gather: kInvalid for a host without an address, another secret, and
// ranks that do not fit; kSystem where rank 0 cannot listen; kPeerLost names the ranks that stay away.
class AddressBootstrap : public Bootstrap {
 public:
  // Lets go of connections; all_gather fails from then on. May be called again.
  virtual void close() = 0;
};
std::shared_ptr<AddressBootstrap> bootstrap_at(MeetingPlace place);

// A meeting also knows who is lost, and tells everybody at once: a rank whose connection ends before it has
// left, whose host acknowledges nothing for WEFT_PEER_DEAD_S, or of whom another rank says so. A rank leaves
// with its bootstrap, or when its process exits. One that is stopped is not lost.
class MeetingBootstrap : public Bootstrap {
 public:
  // `tell` is called for each rank that is lost, with words as "was killed by signal 9", also for those that
  // are already, from a thread of this object. It may be called for one that `tell` knows, and for this rank
  // itself, where the others have given it up.
  virtual void on_lost(std::function<void(int peer, const std::string& how)> tell) = 0;
  // This rank has found that a peer is lost; not sure: whoever can say how it died goes before. Never waits.
  virtual void report(int peer, const std::string& how, bool is_sure) = 0;
};

// Connects to the meeting. Errors: kInvalid for a ticket of something else, another job's secret, and ranks
// that do not fit; kPeerLost when nobody answers at its address by `until`.
Result<std::shared_ptr<MeetingBootstrap>> join_meeting(const MeetingTicket& ticket, int rank, int size,
                                                       Deadline until);

}  // namespace weft
