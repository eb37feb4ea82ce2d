// SPDX-License-Identifier: Apache-2.0
//
// Ranks that meet by a ticket: whoever opens a meeting gets one, small enough for NCCL's unique id, and hands
// it to the others; a thread of its process then passes on what the ranks give each other.
//   WEFT_TRY_ASSIGN(MeetingTicket ticket, open_meeting(""));                    // on one process
//   WEFT_TRY_ASSIGN(auto bootstrap, join_meeting(ticket, rank, size, until));   // on every rank, there too
// The ticket's key proves that a connection belongs to the meeting; what is said is not encrypted. The thread
// ends when the last rank has left, or when nobody came for an hour. On the wire, in the host's byte order: a
// rank says Hello, then sends frames (Frame, bytes); to each it gets a verdict with everybody's bytes.
// Threads: a bootstrap takes one call at a time.
#pragma once

#include <cstdint>
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

// Listens on an address that other machines reach, preferably: that of `interface` or, if empty, of the first
// one that is up, else of this machine alone. Errors: kSystem; kInvalid when `interface` has no address.
Result<MeetingTicket> open_meeting(const std::string& interface);

// Connects to the meeting. Errors: kInvalid for a ticket of something else; kPeerLost when nobody answers at
// its address by `until`.
Result<std::shared_ptr<Bootstrap>> join_meeting(const MeetingTicket& ticket, int rank, int size,
                                                Deadline until);

}  // namespace weft
