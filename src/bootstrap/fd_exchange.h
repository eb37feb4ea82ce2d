// SPDX-License-Identifier: Apache-2.0
//
// FdExchange: ranks of one host exchange messages of bytes and an open file descriptor, which is the handle of a memory
// segment. Each rank has one datagram socket with an abstract name, so no file is left behind.
//   WEFT_TRY_ASSIGN(std::unique_ptr<FdExchange> mine, FdExchange::open(rank));
//   mine->connect(addresses);                        // everyone's address(), brought by a Bootstrap
//   mine->begin_call();
//   WEFT_TRY_ASSIGN(std::vector<FdMessage> all, mine->all_gather({"hello", {}}, "window.create", until));
// Who may send: processes of this rank's user that know its key. Where it can, the kernel drops datagrams without the
// key before they reach the queue (a socket filter). It names each sender's user. A refused message changes nothing.
// Its descriptors are closed in another thread, since a stranger's may take long to close.
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

struct FdMessage {
  std::string bytes;  // at most FdExchange::kMaxBytes
  FileDescriptor fd;  // may be none
};

// Where a rank receives messages. The key proves that the sender is a rank of the Bootstrap.
struct FdAddress {
  char socket_name[32] = {};  // abstract: no leading zero byte here
  uint64_t key = 0;
};

class FdExchange {
 public:
  static constexpr size_t kMaxBytes = 1024;

  static Result<std::unique_ptr<FdExchange>> open(int rank);

  const FdAddress& address() const { return address_; }
  // Names the peers, in rank order; ranks with key 0 are not part of the exchange. A connection is to a socket, not to
  // its name: a process that takes the name of a dead peer gets nothing. Errors: kSystem when no descriptors are left.
  Status connect(const std::vector<FdAddress>& peers);

  // Starts a collective call of one or more all_gather()s. After a failure in the middle of a call, all ranks agree on
  // the sequence number again at the next call.
  void begin_call() { sequence_ = (sequence_ / kGathersPerCall + 1) * kGathersPerCall; }

  // The watch that knows which peers are dead. It must outlive the exchange's calls.
  void ask(PeerWatch* watch) { watch_ = watch; }

  // Sends `mine` to every peer and returns all messages in rank order: this rank's without fd, and empty ones of ranks
  // that take no part. Errors: kPeerLost as soon as a peer that has not given its bytes is
  // gone, or when `until` passes; both name the rank and `operation`.
  Result<std::vector<FdMessage>> all_gather(const FdMessage& mine, std::string_view operation,
                                            Deadline until);

 private:
  static constexpr uint64_t kGathersPerCall = 256;

  FdExchange(int rank, FileDescriptor socket) : rank_(rank), socket_(std::move(socket)) {}

  struct Peer {
    uint64_t key = 0;
    FileDescriptor socket;  // connected to the peer's; none where it had gone before
  };
  struct Datagram;

  enum class Sent { kDone, kLater, kPeerGone };
  Result<Sent> try_send(int peer, const FdMessage& mine);
  Status receive_waiting();
  void take(Datagram& datagram);
  void refuse(Datagram& datagram, std::string_view why);
  Result<bool> all_sent(const FdMessage& mine, std::vector<bool>& sent, std::string_view operation);
  bool all_received() const;
  Status check_alive(std::string_view operation);
  bool has_received(int peer) const { return received_.count({sequence_, peer}) != 0; }
  bool is_gone(int peer) const;
  std::string missing() const;
  bool takes_part(int peer) const { return peer != rank_ && peers_[peer].key != 0; }

  const int rank_;
  FileDescriptor socket_;
  FdAddress address_;
  std::vector<Peer> peers_;
  PeerWatch* watch_ = nullptr;
  uint64_t sequence_ = 0;                                   // kGathersPerCall * call + all_gather of it
  std::map<std::pair<uint64_t, int>, FdMessage> received_;  // by (sequence, rank)
  LogLimiter refused_;
};

}  // namespace weft
