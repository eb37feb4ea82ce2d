// SPDX-License-Identifier: Apache-2.0
//
// A Listener accepts connections whose other side proves to know its key. connect_to() is that other side.
//   Listener listener(std::move(socket), key);
//   listener.add_to(entries); ::poll(entries...); for (Client& client : listener.serve()) listener.welcome(client);
//   WEFT_TRY_ASSIGN(Stream stream, connect_to({{address}, key, rank, size, "rank 0"}, until));      // elsewhere
// The key is never sent. Wire format, in the host's byte order, on a Stream (base/stream.h):
//   1. The listener sends Challenge.
//   2. The client answers Claim. Its proof is over the nonces of both, rank and size.
//   3. The listener answers with its own proof, or with a refusal in words.
// A claim answers one challenge, so it cannot be used again. A connection that is silent for kSilence_s is dropped. So
// is the oldest of more than kPending connections that have proven nothing: strangers delay clients, but do not keep
// them out. Threads: one at a time.
#pragma once

#include <netinet/in.h>
#include <poll.h>

#include <list>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/file_descriptor.h"
#include "base/proof.h"
#include "base/status.h"
#include "base/strangers.h"
#include "base/stream.h"

namespace weft {

enum class Moved { kAll, kTimeout, kGone };
// All bytes.
Moved send_all(Stream& stream, const void* data, size_t bytes, Deadline until);
Moved receive_all(Stream& stream, void* data, size_t bytes, Deadline until);

struct Challenge {
  char magic[8];
  Nonce nonce;
};
struct Claim {
  char magic[8];
  int32_t rank;
  int32_t size;
  Nonce nonce;
  Proof proof;
};
static_assert(sizeof(Challenge) == 24 && sizeof(Claim) == 64);

struct Client {
  Stream stream;
  int rank = 0;
  int size = 0;
  Proof welcome{};
};

class Listener {
 public:
  static constexpr size_t kPending = 256;
  static constexpr double kSilence_s = 5;

  Listener(FileDescriptor socket, std::string key) : socket_(std::move(socket)), key_(std::move(key)) {}

  bool is_open() const { return socket_.is_open(); }
  void close();  // also drops who has not proven anything yet

  void add_to(std::vector<pollfd>& entries) const;
  // Reads what has come, without waiting. Returns clients that have proven to know the key. Each of them gets one of
  // the two answers below.
  std::vector<Client> serve();
  static bool welcome(Client& client);  // false: it is gone
  static void refuse(Client& client, const std::string& why);
  // "; refused 3 without the secret, from 10.0.0.7, 10.0.0.9", for the message that says who is missing; or nothing.
  std::string account() const;

 private:
  struct Pending {
    Stream stream;
    Deadline until;
    bool is_challenged = false;
    Nonce nonce{};
    Claim claim{};
    size_t bytes = 0;  // of the claim, so far
  };
  static constexpr size_t kAddressesTold = 64;

  bool has_room() const;
  void accept_some();
  bool hear(Pending& pending, std::vector<Client>& clients);
  bool challenge(Pending& pending);
  void turn_away(Pending& pending, const std::string& why);

  FileDescriptor socket_;
  const std::string key_;
  std::list<Pending> pending_;  // oldest first
  LogLimiter turned_away_;
  uint64_t refused_ = 0;
  std::set<std::string> from_;  // of them, the first kAddressesTold
};

union SocketAddress {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

// A client before it is connected, and the addresses of the listener.
struct Caller {
  std::vector<SocketAddress> addresses;  // of one listener; each is tried
  std::string key;
  int rank = 0, size = 0;
  std::string listener;   // for messages: "rank 0 at 10.0.0.1:29600"
  bool is_early = false;  // nobody may listen yet: it tries again
  std::string hint = "";  // for people, where nobody answers
};
// Connects, and proves to know the key; connects again when it is dropped before it could. Errors: kInvalid
// with the listener's words when it refuses, also for another key; kPeerLost when nobody listens or answers.
Result<Stream> connect_to(const Caller& caller, Deadline until);

}  // namespace weft
