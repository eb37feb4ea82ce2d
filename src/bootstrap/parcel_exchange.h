// SPDX-License-Identifier: Apache-2.0
//
// ParcelExchange lets ranks of one host give each other bytes together with an open file descriptor: the
// handle of a memory segment. Each rank has one datagram socket with an abstract name, so nothing is left
// behind in a file system.
//   WEFT_TRY_ASSIGN(std::unique_ptr<ParcelExchange> mine, ParcelExchange::open(rank));
//   mine->connect(addresses);                        // everyone's address(), brought by a Bootstrap
//   mine->begin_call();
//   WEFT_TRY_ASSIGN(std::vector<Parcel> all, mine->all_gather({"hello", {}}, "window.create", until));
// Who may send: processes of this rank's user that know its key. The kernel drops what does not carry the key before it
// reaches the queue, where it can (a socket filter), and names each sender's user. What is refused changes nothing: its
// descriptors are closed beside this thread, since a stranger's may take long to close.
// Order: every rank makes the same calls in the same order; a fast rank may be one call ahead. What a rank
// wrote before a call is seen by its peers after it.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/strangers.h"
#include "bootstrap/peer_watch.h"

namespace weft {

struct Parcel {
  std::string bytes;  // at most ParcelExchange::kMaxBytes
  FileDescriptor fd;  // may be none
};

// Where a rank receives parcels. The key proves that a parcel comes from a rank that the Bootstrap
// introduced.
struct ParcelAddress {
  char socket_name[32] = {};  // abstract: no leading zero byte here
  uint64_t key = 0;
};

class ParcelExchange {
 public:
  static constexpr size_t kMaxBytes = 1024;

  static Result<std::unique_ptr<ParcelExchange>> open(int rank);

  const ParcelAddress& address() const { return address_; }
  // Names the peers, in rank order; ranks with key 0 are not part of the exchange. A peer keeps its socket: who takes the
  // name of one that has died gets nothing. Errors: kSystem when no descriptors are left.
  Status connect(const std::vector<ParcelAddress>& peers);

  // Starts a collective call that may need several all_gather()s. After a failure in the middle of one, ranks
  // that got different far are in step again at the next.
  void begin_call() { sequence_ = (sequence_ / kGathersPerCall + 1) * kGathersPerCall; }

  // Who is asked about peers that stay away; must outlive the exchange's calls.
  void ask(PeerWatch* watch) { watch_ = watch; }

  // Gives `mine` to every peer and returns everyone's in rank order (own bytes at the own place, without fd;
  // nothing at ranks that take no part). Errors: kPeerLost as soon as a peer that has not given its bytes is
  // gone, or when `until` passes; both name the rank and `operation`.
  Result<std::vector<Parcel>> all_gather(const Parcel& mine, std::string_view operation, Deadline until);

 private:
  static constexpr uint64_t kGathersPerCall = 256;

  ParcelExchange(int rank, FileDescriptor socket) : rank_(rank), socket_(std::move(socket)) {}

  struct Peer {
    uint64_t key = 0;
    FileDescriptor socket;  // connected to the peer's; none where it had gone before
  };
  struct Datagram;

  enum class Sent { kDone, kLater, kPeerGone };
  Result<Sent> try_send(int peer, const Parcel& parcel);
  Status receive_waiting();
  void take(Datagram& datagram);
  void refuse(Datagram& datagram, std::string_view why);
  Result<bool> all_sent(const Parcel& mine, std::vector<bool>& sent, std::string_view operation);
  bool all_received() const;
  Status check_alive(std::string_view operation);
  bool has_received(int peer) const { return received_.count({sequence_, peer}) != 0; }
  bool is_gone(int peer) const;
  std::string missing() const;
  bool takes_part(int peer) const { return peer != rank_ && peers_[peer].key != 0; }

  const int rank_;
  FileDescriptor socket_;
  ParcelAddress address_;
  std::vector<Peer> peers_;
  PeerWatch* watch_ = nullptr;
  uint64_t sequence_ = 0;                                // kGathersPerCall * call + all_gather of it
  std::map<std::pair<uint64_t, int>, Parcel> received_;  // by (sequence, rank)
  LogLimiter refused_;
};

}  // namespace weft
