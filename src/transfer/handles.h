// SPDX-License-Identifier: Apache-2.0
//
// The handles of the transfer engine's users: registered memory, attached remote memory, peers, transfers, counters.
// All are shared pointers to the classes below. Threads: every public method may be called from any thread. Lifetime: a
// handle may outlive its engine; it then answers as after close(). check_owner() is kInvalid in a forked child, because
// its parent's threads do not run there.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/tally.h"
#include "providers/provider.h"
#include "transfer/plan.h"
#include "transfer/wire.h"

namespace weft::transfer {

class Core;

// Memory of this process that the engine may read and write; with remote access, also what a descriptor
// names.
class Memory {
 public:
  Status check_owner() const { return owner_.check("memory"); }
  void* data() const { return range_.data; }
  uint64_t bytes() const { return range_.bytes; }
  uint64_t id() const { return id_; }  // of this registration, unique in its engine
  bool is_registered() const { return alive_.load(std::memory_order_acquire); }
  bool is_device_memory() const { return range_.kind != provider::MemoryKind::kHost; }
  // How transfers reach it, and why that way.
  const MemoryChoice& path() const { return path_; }
  bool is_staged() const { return path_.path == MemoryPath::kStaged; }
  uint32_t access() const { return access_; }
  bool is_read_only() const { return is_read_only_; }  // the source of writes and sends, and of peers' reads

 private:
  friend class Core;
  friend class Engine;
  friend class Builder;
  friend class Staging;
  const OwnerProcess owner_;
  uint64_t id_ = 0;
  uint64_t maker_ = 0;  // Core::serial, as in all handles
  provider::Range range_;
  uint32_t access_ = 0;  // of peers
  bool is_read_only_ = false;
  MemoryChoice path_;
  Secret secret_{};
  std::atomic<bool> alive_{true};
  std::vector<provider::Registration> rails_;  // empty when staged
  std::atomic<uint32_t> users_{0};             // transfers under way that touch it
};

class Peer;

// Memory of a peer that we may read or write, as its owner granted it.
class Remote {
 public:
  Status check_owner() const { return owner_.check("remote memory"); }
  uint64_t bytes() const { return bytes_; }
  uint32_t access() const { return access_; }
  const std::shared_ptr<Peer>& peer() const { return peer_; }
  bool is_revoked() const { return revoked_.load(std::memory_order_acquire); }
  bool is_staged() const { return must_stage_; }

 private:
  friend class Core;
  friend class Engine;
  friend class Staging;
  const OwnerProcess owner_;
  std::shared_ptr<Peer> peer_;
  uint64_t region_ = 0;
  Secret secret_{};
  uint64_t bytes_ = 0;
  uint32_t access_ = 0;
  bool must_stage_ = false;
  std::vector<RailKey> rails_;
  std::atomic<bool> revoked_{false};
  bool owner_waits_ = false;  // the owner asked for it back; answer once users_ is 0
  uint32_t users_ = 0;        // operations under way that touch it
};

// Counts a peer's immediates with one id. The value only grows; early arrivals are kept.
class ImmCounter {
 public:
  Status check_owner() const { return owner_.check("counter of immediates"); }
  uint64_t value() const { return value_.load(std::memory_order_acquire); }
  uint32_t id() const { return imm_id(key_); }

 private:
  friend class Core;
  friend class Engine;
  friend class Builder;
  const OwnerProcess owner_;
  struct Reach {
    uint64_t at_least;
    std::function<void(const Status&)> callback;
  };
  uint32_t key_ = 0;
  uint64_t maker_ = 0;
  std::weak_ptr<Peer> peer_;
  std::atomic<uint64_t> value_{0};
  std::atomic<bool> lost_{false};
  Status why_;                  // written before lost_
  std::vector<Reach> reaches_;  // under the token
};

enum class PeerState : uint8_t { kConnecting, kConnected, kLost, kClosed };
const char* to_string(PeerState state);

// Shared from this: Python hands peers back, and who keeps a weak pointer must share its owner with them.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Status check_owner() const { return owner_.check("peer"); }
  const std::string& name() const { return name_; }
  std::string id() const { return to_text(engine_); }
  PeerState state() const { return state_.load(std::memory_order_acquire); }
  bool is_alive() const { return state() == PeerState::kConnected; }
  uint32_t rails() const { return static_cast<uint32_t>(address_.rails.size()); }
  // Why it is lost; ok while it is not.
  Status why() const {
    std::lock_guard lock(why_mutex_);
    return why_;
  }

 private:
  friend class Core;
  friend class Engine;
  friend class Builder;
  friend class Staging;
  const OwnerProcess owner_;
  struct StageOut;
  struct StageIn;
  using Clock = Deadline::Clock;

  // The way from one local rail to one of the peer's.
  struct Path {
    provider::Route route = 0;
    uint32_t rail_there = 0;
    bool is_down = false;       // broken: what would have gone this way takes another one
    uint32_t in_flight = 0;     // writes, reads and messages with the network,
    uint32_t messages_out = 0;  // and of these the messages
    Clock::time_point moved{};  // when it last had nothing under way, or something ended
    uint32_t at_once = 0;       // writes that ended as they were posted,
    uint32_t at_once_turn = 0;  // in this turn of the engine
  };

  EngineId engine_;
  uint64_t maker_ = 0;
  std::string name_;
  Address address_;
  std::atomic<PeerState> state_{PeerState::kConnecting};
  mutable std::mutex why_mutex_;
  Status why_;

  uint32_t life_ = 0;         // how often this connection was made
  std::deque<Nonce> nonces_;  // of our hellos in this life,
  Nonce nonce_there_{};       // and of their last
  Nonce salt_here_{};         // of the keys of what comes, in this life
  SenderKeys keys_in_;        // what it must show us,
  SenderKeys keys_out_;       // and we show it, once it is connected
  uint32_t slot_here_ = 0;    // number of this peer in immediates that come to us
  uint32_t slot_there_ = 0;   // our number there
  std::vector<Path> paths_;   // per local rail; empty once the peer is lost
  std::vector<std::pair<uint32_t, provider::Route>>
      more_routes_;                                  // remote rails beyond ours, which only talk to us
  std::vector<RailKey> inbox_;                       // per remote rail
  uint32_t next_out_ = 1, next_in_ = 1;              // sequence of ordered messages
  uint32_t last_sign_out_ = 0, last_sign_in_ = 0;    // sequence of heartbeats and byes
  std::unordered_map<uint32_t, std::string> early_;  // messages that overtook others, by sequence
  Clock::time_point gap_since_{};
  Clock::time_point heard_{}, sent_to_{};
  NamedProcess process_;                                            // known where it is one of this host
  Clock::time_point ended_{};                                       // when that was first seen to have ended
  std::unordered_map<uint32_t, std::shared_ptr<ImmCounter>> imms_;  // by counter_key()
  std::unordered_map<uint64_t, std::weak_ptr<Remote>> remotes_;     // by region, of this life
  std::shared_ptr<StageOut> stage_out_;
  std::shared_ptr<StageIn> stage_in_;
  TallyPeer* tally_ = nullptr;
};

// Adds up finished transfers; any number of transfers may share one. Failed ones count in both.
class Counter {
 public:
  Status check_owner() const { return owner_.check("counter"); }
  uint64_t finished() const { return finished_.load(std::memory_order_acquire); }
  uint64_t failed() const { return failed_.load(std::memory_order_acquire); }
  Status first_failure() const {
    std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  friend class Core;
  const OwnerProcess owner_;
  std::atomic<uint64_t> finished_{0}, failed_{0};
  mutable std::mutex mutex_;
  Status first_;
};

enum class Phase : uint8_t {
  kQueued,    // not posted yet
  kPosted,    // with the network
  kDraining,  // failed or cancelled, but the network still holds pieces of it
  kDone,
  kFailed,
  kCancelled,
};
const char* to_string(Phase phase);

enum class OpKind : uint8_t { kWrite, kRead, kNotify, kSend, kRecv };
inline constexpr size_t kOpKinds = 5;
const char* to_string(OpKind kind);

// One submitted transfer. Terminal (done, failed, cancelled) means: the engine and the NIC are through with
// the local memory. kDone of a write does not say that the peer has seen it; an immediate does.
class Transfer {
 public:
  Status check_owner() const { return owner_.check("transfer"); }
  Phase phase() const { return phase_.load(std::memory_order_acquire); }
  bool is_finished() const { return phase() >= Phase::kDone; }
  OpKind kind() const { return kind_; }
  // The outcome; ok unless finished with a failure.
  Status status() const { return is_finished() ? status_ : Status(); }
  uint64_t bytes() const {
    return bytes_.load(std::memory_order_relaxed);
  }  // of a receive: what arrives, once known
  // How far it is, of bytes() and of the pieces that it travels in: what the network or the peer is through with. All of it
  // once it is done.
  uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  uint32_t pieces_in_all() const { return pieces_in_all_.load(std::memory_order_relaxed); }
  uint32_t pieces_done() const { return pieces_done_.load(std::memory_order_relaxed); }
  // Of a finished receive: who sent it.
  std::shared_ptr<Peer> peer() const { return is_finished() ? peer_ : nullptr; }

 private:
  friend class Core;
  friend class Engine;
  friend class Builder;
  friend class Staging;
  const OwnerProcess owner_;
  struct Piece {
    uint64_t local = 0;   // offset in memory_
    uint64_t remote = 0;  // offset in the remote
    uint64_t bytes = 0;
    uint32_t target = 0;  // index into remotes
    uint16_t rail = 0;
    bool has_imm = false;
  };
  const std::shared_ptr<Remote>& remote(uint32_t target) const {
    return target == 0 ? remote_ : more_[target - 1];
  }
  const Piece& piece(size_t i) const { return i == 0 ? first_ : rest_[i - 1]; }
  size_t pieces() const { return 1 + rest_.size(); }

  OpKind kind_ = OpKind::kWrite;
  std::atomic<Phase> phase_{Phase::kQueued};
  bool delivered_ = false;  // pieces complete only when visible at the target
  bool has_imm_ = false;
  bool staged_ = false;
  bool listed_ = false;   // in the core's list of active transfers
  bool waiting_ = false;  // in the core's list of transfers with unposted pieces
  bool cancelled_ = false;
  bool notices_open_ = false;  // everything else is delivered
  bool is_offered_ = false;    // a receive that reads what request_id_ offers
  uint32_t imm_key_ = 0;       // counter_key()
  uint64_t maker_ = 0;
  Notify notify_ = Notify::kOnce;
  std::atomic<uint64_t> bytes_{0}, bytes_done_{0};
  std::atomic<uint32_t> pieces_in_all_{0}, pieces_done_{0};
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Peer> peer_;  // the only peer, or null for a scatter to several and a receive from anyone
  std::shared_ptr<Remote> remote_;  // first target
  std::vector<std::shared_ptr<Remote>> more_;
  Piece first_;
  std::vector<Piece> rest_;
  std::vector<uint32_t> notices_;  // targets that get their immediate once everything else is delivered
  size_t next_piece_ = 0, next_notice_ = 0;
  uint32_t in_flight_ = 0;
  uint64_t request_id_ = 0;
  uint32_t packs_left_ = 0;  // answers of the peer still to come: packed writes, a long send
  std::string payload_;      // a short send
  std::vector<provider::Registration> offered_;  // a long send
  uint64_t recv_offset_ = 0;
  Deadline::Clock::time_point submitted_, deadline_;
  uint64_t began_ns_ = 0;  // tally_now_ns() then
  Status status_;
  std::shared_ptr<Counter> counter_;
  std::function<void(const Status&)> callback_;
  std::shared_ptr<Transfer> self_;      // while queued or active
  Transfer* next_submitted_ = nullptr;  // in the submission list
  Transfer* active_next_ = nullptr;
  Transfer* active_prev_ = nullptr;
  Transfer* next_gathered_ = nullptr;  // in the flight that carries several
};

}  // namespace weft::transfer
