// SPDX-License-Identifier: Apache-2.0
//
// Packed writes: many small pages, or device memory that no NIC reaches, travel as large writes into slots
// of the receiver, which puts them in place.
//
//   sender: gather pages into a slot's twin -> one write with an immediate (class stage, id = slot)
//   receiver: check every piece against what this peer attached -> copy -> count the user's immediate ->
//   "slot done"
//
// On one host the slots are shared memory: the sender gathers straight into them and writes only
// the immediate. Several slots are in flight, so that gathering, sending and placing overlap. A staged transfer is done
// when its pages are in place over there. A pack is written as a whole or, if one piece is refused, not at
// all. Threads: the holder of the token.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transfer/copier.h"
#include "transfer/core.h"

namespace weft::transfer {

struct Pack {
  std::shared_ptr<Transfer> transfer;
  PackHead head;
  std::vector<uint64_t> sources;  // offset in the transfer's memory, per piece
  uint64_t payload_bytes = 0;
};

struct Peer::StageOut {
  enum class State { kAsked, kReady } state = State::kAsked;
  struct Slot {
    enum class Use { kFree, kGathering, kReady, kPosted } use = Use::kFree;
    Pack pack;
    std::unique_ptr<CopyQueue> copies;
    uint64_t bytes = 0;
  };
  StageGrant grant;
  SharedMemory shared;  // the peer's slots themselves, or
  PinnedBuffer buffer;  // a twin of them
  char* base = nullptr;
  std::vector<provider::Registration> rails;
  std::vector<Slot> slots;
  std::deque<std::shared_ptr<Transfer>> unpacked;  // until the slots' size is known
  std::deque<Pack> waiting;
  uint32_t next_rail = 0;
  uint64_t turn = 0;
};

struct Peer::StageIn {
  SharedMemory shared;  // where the peer may open it, or
  PinnedBuffer buffer;
  char* base = nullptr;
  uint32_t slots = 0, slot_bytes = 0;
  std::vector<provider::Registration> rails;
  std::vector<uint64_t> last_turn;          // per slot: an immediate that arrives twice is told by it
  std::map<uint64_t, uint32_t> packs_seen;  // by request id
  struct Placing {
    uint32_t slot;
    PackHead head;
    std::unique_ptr<CopyQueue> copies;
  };
  std::deque<Placing> placing;  // device copies under way
};

class Staging {
 public:
  explicit Staging(Core& core) : core_(core) {}

  // Whether a write of `pieces` pieces with `bytes` in all goes this way.
  bool wants(const Memory& memory, const Remote& remote, size_t pieces, uint64_t bytes) const;
  void start(Transfer& transfer);
  void give_up(Transfer& transfer);  // it has failed; its packs are not sent any more
  void drop(Peer& peer);             // the connection is gone
  void drop_all();
  void pump(Peer& peer);
  void pump_all();
  bool is_busy() const { return !busy_.empty(); }

  void on_ask(Peer& peer);
  void on_grant(Peer& peer, const StageGrant& grant);
  void on_filled(Peer& peer, uint32_t slot);
  void on_done(Peer& peer, const Outcome& outcome);
  void on_posted(Peer& peer, uint32_t slot);
  void on_post_failed(Peer& peer, uint32_t slot, Transfer& transfer);

 private:
  using Slot = Peer::StageOut::Slot;

  Status open_in(Peer::StageIn& in, StageGrant& grant);
  Status open_out(Peer& peer, Peer::StageOut& out);
  void make_packs(Peer& peer, Peer::StageOut& out, const std::shared_ptr<Transfer>& transfer);
  bool gather(Peer::StageOut& out, uint32_t slot);
  void post(Peer& peer, Peer::StageOut& out, uint32_t slot);
  Status check(const Peer& peer, const PackHead& head) const;
  void place(Peer& peer, uint32_t slot, PackHead head);
  void finish_placing(Peer& peer, const PackHead& head, uint32_t slot, const Status& status);
  void mark_busy(Peer& peer);
  bool advance_placing(Peer& peer);
  int pin_device() const;
  bool is_same_host() const;

  Core& core_;
  std::vector<Peer*> busy_;  // peers with packs under way in either direction
};

}  // namespace weft::transfer
