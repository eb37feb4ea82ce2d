// SPDX-License-Identifier: Apache-2.0
#include "transfer/staging.h"

#include <algorithm>

#include "base/log.h"

namespace weft::transfer {
namespace {

constexpr size_t kPackPiecesMin = 8;              // fewer pages travel as they are
constexpr uint64_t kPackPageBytesMax = 32 << 10;  // longer ones too
constexpr uint32_t kPiecesPerPack = 1024;
constexpr size_t kKnownRequests = 4096;
constexpr size_t kPrefetchedLines = 16;

// The beginning of a page that is copied next: the processor finds no page in a random order by itself.
void prefetch(const char* page) {
  for (size_t line = 0; line < kPrefetchedLines; ++line) __builtin_prefetch(page + 64 * line);
}

}  // namespace

bool Staging::wants(const Memory& memory, const Remote& remote, size_t pieces, uint64_t bytes) const {
  if (memory.is_staged() || remote.is_staged()) return true;
  const provider::Caps& caps = core_.rails[0].rail->caps();
  return caps.packs_small_pages && pieces >= kPackPiecesMin && bytes / pieces <= kPackPageBytesMax;
}

void Staging::mark_busy(Peer& peer) {
  if (std::find(busy_.begin(), busy_.end(), &peer) == busy_.end()) busy_.push_back(&peer);
}

int Staging::pin_device() const {
  for (const auto& [id, region] : core_.regions_)
    if (region.memory->is_device_memory()) return region.memory->range_.device;
  return -1;
}

bool Staging::is_same_host() const {
  return std::all_of(core_.rails.begin(), core_.rails.end(),
                     [](const RailState& state) { return state.rail->caps().same_host; });
}

void Staging::start(Transfer& transfer) {
  transfer.next_piece_ = transfer.pieces();
  transfer.packs_left_ = 1;  // until all targets are packed
  transfer.phase_.store(Phase::kPosted, std::memory_order_relaxed);
  std::vector<Peer*> asked;
  for (uint32_t target = 0; target <= transfer.more_.size(); ++target) {
    Peer& peer = *transfer.remote(target)->peer_;
    if (std::find(asked.begin(), asked.end(), &peer) != asked.end()) continue;
    asked.push_back(&peer);
    if (!peer.stage_out_) {
      peer.stage_out_ = std::make_shared<Peer::StageOut>();
      core_.send_message(peer, MessageType::kStageAsk, "");
    }
    Peer::StageOut& out = *peer.stage_out_;
    if (out.state == Peer::StageOut::State::kReady) {
      make_packs(peer, out, transfer.self_);
    } else {
      ++transfer.packs_left_;
      out.unpacked.push_back(transfer.self_);
    }
  }
  --transfer.packs_left_;
  for (Peer* peer : asked) {
    mark_busy(*peer);
    pump(*peer);
  }
  core_.settle(transfer);
}

// Cuts the pieces that go to `peer` into packs, target by target, and queues them.
void Staging::make_packs(Peer& peer, Peer::StageOut& out, const std::shared_ptr<Transfer>& shared) {
  Transfer& transfer = *shared;
  size_t next = 0;  // pieces are in the order of their targets
  for (uint32_t target = 0; target <= transfer.more_.size(); ++target) {
    const size_t first = next;
    while (next < transfer.pieces() && transfer.piece(next).target == target) ++next;
    const Remote& remote = *transfer.remote(target);
    if (remote.peer_.get() != &peer) continue;
    std::vector<Pack> packs;
    const uint64_t request_id = core_.next_request_id_++;
    uint64_t room = 0;
    auto open_pack = [&] {
      packs.emplace_back();
      packs.back().transfer = shared;
      packs.back().head.request_id = request_id;
      room = out.grant.slot_bytes - kPackHeadBytes;
    };
    open_pack();
    for (size_t i = first; i < next; ++i) {
      const Transfer::Piece& piece = transfer.piece(i);
      for (uint64_t done = 0; done < piece.bytes || piece.bytes == 0;) {
        if (room <= kPackedPieceBytes || packs.back().head.pieces.size() == kPiecesPerPack) open_pack();
        Pack& pack = packs.back();
        const uint64_t take = std::min(piece.bytes - done, room - kPackedPieceBytes);
        pack.head.pieces.push_back({remote.region_, piece.remote + done, take});
        pack.sources.push_back(piece.local + done);
        pack.payload_bytes += take;
        room -= take + kPackedPieceBytes;
        done += take;
        if (done == piece.bytes && transfer.has_imm_ && transfer.notify_ == Notify::kEach)
          ++pack.head.imm_each;
        if (piece.bytes == 0) break;
      }
    }
    for (size_t i = 0; i < packs.size(); ++i) {
      PackHead& head = packs[i].head;
      head.pack = static_cast<uint32_t>(i);
      head.packs = static_cast<uint32_t>(packs.size());
      head.has_imm = transfer.has_imm_;
      head.imm_id = transfer.imm_key_;
      head.imm_last = transfer.has_imm_ && transfer.notify_ == Notify::kOnce;
      out.waiting.push_back(std::move(packs[i]));
    }
    transfer.packs_left_ += static_cast<uint32_t>(packs.size());
  }
}

Status Staging::open_out(Peer& peer, Peer::StageOut& out) {
  const uint64_t bytes = uint64_t{out.grant.slots} * out.grant.slot_bytes;
  if (out.grant.shared.pid && is_same_host()) {
    auto opened = SharedMemory::open(out.grant.shared, bytes);
    if (opened.ok())
      out.shared = std::move(*opened);
    else
      log_info("transfer: packs to peer '{}' are copied: {}", peer.name(), opened.status().message());
  }
  out.base = out.shared.data();
  if (!out.base) {
    WEFT_TRY_ASSIGN(out.base, out.buffer.allocate(bytes, pin_device()));
  }
  for (RailState& state : core_.rails) {
    auto made = state.rail->enroll({out.base, bytes}, kLocal);
    if (!made.ok()) return made.status();
    out.rails.push_back(*made);
  }
  out.slots.resize(out.grant.slots);
  for (Slot& slot : out.slots) slot.copies = std::make_unique<CopyQueue>(pin_device());
  return {};
}

void Staging::on_grant(Peer& peer, const StageGrant& grant) {
  if (!peer.stage_out_ || peer.stage_out_->state != Peer::StageOut::State::kAsked) return;
  const std::shared_ptr<Peer::StageOut> out = peer.stage_out_;
  out->grant = grant;
  Status status = grant.refusal.empty() ? Status() : Status(Code::kSystem, grant.refusal);
  if (status.ok() && grant.rails.size() != peer.address_.rails.size())
    status = Status::invalid("stage grant: keys for {} rails of {}", grant.rails.size(),
                             peer.address_.rails.size());
  if (status.ok()) status = open_out(peer, *out);
  std::deque<std::shared_ptr<Transfer>> unpacked;
  unpacked.swap(out->unpacked);
  if (!status.ok()) {
    drop(peer);
    for (auto& transfer : unpacked) core_.fail(*transfer, status);
    return;
  }
  out->state = Peer::StageOut::State::kReady;
  for (auto& transfer : unpacked) {
    if (transfer->phase() >= Phase::kDraining) continue;
    make_packs(peer, *out, transfer);
    --transfer->packs_left_;
  }
  pump(peer);
}

void Staging::pump_all() {
  const std::vector<Peer*> peers = busy_;
  for (Peer* peer : peers) pump(*peer);
}

void Staging::pump(Peer& peer) {
  bool is_busy = advance_placing(peer);
  const std::shared_ptr<Peer::StageOut> out = peer.stage_out_;
  if (out && out->state == Peer::StageOut::State::kReady) {
    for (uint32_t i = 0; i < out->slots.size() && peer.stage_out_ == out; ++i) {
      Slot& slot = out->slots[i];
      if (slot.use == Slot::Use::kFree && !out->waiting.empty()) {
        slot.pack = std::move(out->waiting.front());
        out->waiting.pop_front();
        if (!gather(*out, i)) continue;
      }
      if (slot.use == Slot::Use::kGathering) {
        const Result<bool> is_done = slot.copies->is_done();
        if (!is_done.ok()) core_.fail(*slot.pack.transfer, is_done.status());
        if (is_done.ok() && *is_done) slot.use = Slot::Use::kReady;
      }
      if (slot.use == Slot::Use::kReady) post(peer, *out, i);
      is_busy = is_busy || slot.use == Slot::Use::kGathering || slot.use == Slot::Use::kReady;
    }
    is_busy = is_busy || !out->waiting.empty();
  }
  if (!is_busy) busy_.erase(std::remove(busy_.begin(), busy_.end(), &peer), busy_.end());
}

// Starts the copies of a pack into its slot; false when that failed, and the transfer with it.
bool Staging::gather(Peer::StageOut& out, uint32_t index) {
  Slot& slot = out.slots[index];
  Pack& pack = slot.pack;
  pack.head.turn = ++out.turn;
  char* at = out.base + uint64_t{index} * out.grant.slot_bytes;
  write_pack_head(at, pack.head);
  at += pack_bytes(pack.head.pieces.size(), 0);
  Memory& memory = *pack.transfer->memory_;
  const char* from = static_cast<const char*>(memory.range_.data);
  Status status;
  const bool is_host = !memory.is_device_memory();
  for (size_t i = 0; i < pack.sources.size() && status.ok(); ++i) {
    const uint64_t bytes = pack.head.pieces[i].bytes;
    if (is_host && i + 1 < pack.sources.size()) prefetch(from + pack.sources[i + 1]);
    status = is_host ? copy_to_host(at, from + pack.sources[i], bytes, memory.range_)
                     : slot.copies->copy(at, from + pack.sources[i], bytes);
    at += bytes;
  }
  if (status.ok()) status = slot.copies->seal();
  slot.bytes = pack_bytes(pack.head.pieces.size(), pack.payload_bytes);
  slot.use = Slot::Use::kGathering;
  if (!status.ok()) core_.fail(*pack.transfer, status);
  return status.ok();
}

void Staging::post(Peer& peer, Peer::StageOut& out, uint32_t index) {
  Slot& slot = out.slots[index];
  const uint32_t rail = core_.rail_to(peer, out.next_rail % core_.rail_count());
  if (!core_.has_room(rail)) return;
  const uint64_t offset = uint64_t{index} * out.grant.slot_bytes;
  const RailKey& there = out.grant.rails[peer.paths_[rail].rail_there];
  Flight* flight = core_.take_flight(Flight::Use::kPack, rail, &peer, slot.pack.transfer.get());
  flight->slot = index;
  provider::RmaOp op;
  op.to = peer.paths_[rail].route;
  op.piece = {out.base + offset, out.rails[rail].lkey, there.base + offset, there.rkey,
              out.shared.data() ? 0 : slot.bytes};
  op.has_imm = core_.write_imm_;
  op.imm = core_.imm_to(peer, rail, ImmClass::kStage, index);
  op.delivered = !core_.write_imm_;
  op.context = flight;
  const Posted posted = core_.book(flight, core_.rails[rail].rail->post_write(op));
  if (posted == Posted::kFatal) {
    if (core_.leave_broken_path(peer, rail)) return;
    const std::shared_ptr<Transfer> transfer = slot.pack.transfer;
    if (transfer) core_.fail(*transfer, Status(Code::kSystem, core_.rails[rail].rail->refusal()));
  }
  if (posted > Posted::kDone) return;
  slot.use = Slot::Use::kPosted;
  ++out.next_rail;
  if (posted == Posted::kDone) on_posted(peer, index);
}

void Staging::on_posted(Peer& peer, uint32_t slot) {
  if (!core_.write_imm_) core_.send_message(peer, MessageType::kStageFilled, number_body(slot));
}

void Staging::on_post_failed(Peer& peer, uint32_t index, Transfer& transfer) {
  if (!peer.stage_out_ || index >= peer.stage_out_->slots.size()) return;
  Slot& slot = peer.stage_out_->slots[index];
  if (slot.pack.transfer.get() != &transfer) return;
  slot.pack = {};
  slot.use = Slot::Use::kFree;
}

void Staging::on_done(Peer& peer, const Outcome& outcome) {
  if (!peer.stage_out_ || outcome.slot >= peer.stage_out_->slots.size()) return;
  Slot& slot = peer.stage_out_->slots[outcome.slot];
  if (slot.use != Slot::Use::kPosted || slot.pack.head.request_id != outcome.request_id) return;
  const Pack pack = std::move(slot.pack);
  const std::shared_ptr<Transfer>& transfer = pack.transfer;
  slot.pack = {};
  slot.use = Slot::Use::kFree;
  mark_busy(peer);
  if (transfer && transfer->phase() < Phase::kDraining) {
    --transfer->packs_left_;
    if (outcome.refusal.empty()) core_.note_moved(*transfer, pack.payload_bytes, pack.head.pieces.size());
    if (outcome.refusal.empty())
      core_.settle(*transfer);
    else
      core_.fail(*transfer, Status::make(Code::kInvalid, "transfer.write: peer '{}' refused it: {}",
                                         peer.name(), outcome.refusal));
  }
  pump(peer);
}

void Staging::give_up(Transfer& transfer) {
  for (auto& [engine, peer] : core_.peers_) {
    if (!peer->stage_out_) continue;
    Peer::StageOut& out = *peer->stage_out_;
    auto is_its = [&](const auto& entry) { return entry.transfer.get() == &transfer; };
    out.waiting.erase(std::remove_if(out.waiting.begin(), out.waiting.end(), is_its), out.waiting.end());
    for (Slot& slot : out.slots) {
      if (slot.pack.transfer.get() != &transfer) continue;
      slot.pack.transfer = nullptr;  // a posted slot stays taken until the peer answers
      if (slot.use == Slot::Use::kPosted) continue;
      (void)slot.copies->finish();
      slot.use = Slot::Use::kFree;
    }
  }
}

void Staging::drop(Peer& peer) {
  auto release = [this](auto& area) {
    if (!area) return;
    for (size_t i = 0; i < area->rails.size() && i < core_.rails.size(); ++i)
      core_.rails[i].rail->release(area->rails[i]);
    area->rails.clear();
    area.reset();
  };
  if (peer.stage_out_)
    for (Slot& slot : peer.stage_out_->slots) (void)slot.copies->finish();
  release(peer.stage_out_);
  release(peer.stage_in_);
  busy_.erase(std::remove(busy_.begin(), busy_.end(), &peer), busy_.end());
}

void Staging::drop_all() {
  for (auto& [engine, peer] : core_.peers_) drop(*peer);
}

void Staging::on_ask(Peer& peer) {
  if (peer.stage_in_)
    return core_.lose_peer(peer, PeerState::kLost, Status(Code::kPeerLost, "it asked for slots twice"));
  auto area = std::make_shared<Peer::StageIn>();
  area->slots = core_.options.stage_slots;
  area->slot_bytes = core_.options.stage_slot_bytes;
  area->last_turn.resize(area->slots);
  StageGrant grant{"", area->slots, area->slot_bytes, {}, {}};
  const Status status = open_in(*area, grant);
  peer.stage_in_ = area;
  if (!status.ok()) {
    grant = {status.message(), 0, 0, {}, {}};
    for (size_t i = 0; i < area->rails.size(); ++i) core_.rails[i].rail->release(area->rails[i]);
    peer.stage_in_.reset();
  }
  core_.send_message(peer, MessageType::kStageGrant, to_body(grant));
}

Status Staging::open_in(Peer::StageIn& in, StageGrant& grant) {
  const uint64_t bytes = uint64_t{in.slots} * in.slot_bytes;
  if (is_same_host() && pin_device() < 0) {
    WEFT_TRY_ASSIGN(in.shared, SharedMemory::create(bytes));
    grant.shared = in.shared.name();
    in.base = in.shared.data();
  } else {
    WEFT_TRY_ASSIGN(in.base, in.buffer.allocate(bytes, pin_device()));
  }
  for (RailState& state : core_.rails) {
    WEFT_TRY_ASSIGN(const provider::Registration made, state.rail->enroll({in.base, bytes}, kRemoteWrite));
    in.rails.push_back(made);
    grant.rails.push_back({made.base, made.rkey});
  }
  return {};
}

// Whether this peer may write all pieces of a pack.
Status Staging::check(const Peer& peer, const PackHead& head) const {
  for (const PackedPiece& piece : head.pieces) {
    const auto found = core_.regions_.find(piece.region);
    if (found == core_.regions_.end() || found->second.users.count(const_cast<Peer*>(&peer)) == 0)
      return Status::invalid("the memory was taken back or never attached");
    const Memory& memory = *found->second.memory;
    if (!(memory.access() & kRemoteWrite))
      return Status::invalid("the memory is not registered for remote writes");
    if (piece.offset > memory.bytes() || piece.bytes > memory.bytes() - piece.offset)
      return Status::invalid("{} bytes at {} reach beyond the {} bytes registered", piece.bytes, piece.offset,
                             memory.bytes());
  }
  return {};
}

void Staging::on_filled(Peer& peer, uint32_t slot) {
  if (!peer.stage_in_ || slot >= peer.stage_in_->slots) return;
  Peer::StageIn& in = *peer.stage_in_;
  const std::string_view bytes(in.base + uint64_t{slot} * in.slot_bytes, in.slot_bytes);
  auto head = parse_pack(bytes);
  if (!head.ok()) return log_warn("transfer: from peer '{}': {}", peer.name(), head.status().message());
  if (head->turn <= in.last_turn[slot]) return;  // the same pack again
  in.last_turn[slot] = head->turn;
  if (Status status = check(peer, *head); !status.ok()) return finish_placing(peer, *head, slot, status);
  place(peer, slot, std::move(*head));
}

void Staging::place(Peer& peer, uint32_t slot, PackHead head) {
  Peer::StageIn& in = *peer.stage_in_;
  const char* from = in.base + uint64_t{slot} * in.slot_bytes + pack_bytes(head.pieces.size(), 0);
  auto copies = std::make_unique<CopyQueue>(pin_device());
  bool on_device = false;
  Status status;
  auto memory_of = [this](const PackedPiece& piece) -> const Memory& {
    return *core_.regions_.at(piece.region).memory;
  };
  auto place_of = [&](const PackedPiece& piece) {
    return static_cast<char*>(memory_of(piece).range_.data) + piece.offset;
  };
  for (size_t i = 0; i < head.pieces.size(); ++i) {
    const PackedPiece& piece = head.pieces[i];
    const Memory& memory = memory_of(piece);
    char* to = place_of(piece);
    on_device = on_device || memory.is_device_memory();
    if (!on_device && i + 1 < head.pieces.size()) prefetch(place_of(head.pieces[i + 1]));
    status = memory.is_device_memory() ? copies->copy(to, from, piece.bytes)
                                       : copy_from_host(to, from, piece.bytes, memory.range_);
    if (!status.ok()) break;
    from += piece.bytes;
  }
  if (!on_device || !status.ok()) return finish_placing(peer, head, slot, status);
  if (Status sealed = copies->seal(); !sealed.ok()) return finish_placing(peer, head, slot, sealed);
  in.placing.push_back({slot, std::move(head), std::move(copies)});
  mark_busy(peer);
}

// True while device copies of this peer's packs are under way.
bool Staging::advance_placing(Peer& peer) {
  if (!peer.stage_in_) return false;
  auto& placing = peer.stage_in_->placing;
  while (!placing.empty()) {
    const Result<bool> is_done = placing.front().copies->is_done();
    if (is_done.ok() && !*is_done) return true;
    const Peer::StageIn::Placing placed = std::move(placing.front());
    placing.pop_front();
    finish_placing(peer, placed.head, placed.slot, is_done.status());
  }
  return false;
}

void Staging::finish_placing(Peer& peer, const PackHead& head, uint32_t slot, const Status& status) {
  if (status.ok() && head.has_imm) {
    if (head.imm_each) core_.count_imm(peer, head.imm_id, head.imm_each);
    auto& seen = peer.stage_in_->packs_seen;
    if (++seen[head.request_id] == head.packs) {
      seen.erase(head.request_id);
      if (head.imm_last) core_.count_imm(peer, head.imm_id, head.imm_last);
    }
    if (seen.size() > kKnownRequests) seen.erase(seen.begin());  // of writes that failed half way
  }
  core_.send_message(peer, MessageType::kStageDone,
                     to_body(Outcome{head.request_id, slot, status.message()}));
}

}  // namespace weft::transfer
