// SPDX-License-Identifier: Apache-2.0
//
// Makes one Transfer from one request: checks what it names, adds its pieces, decides how they travel. Runs on the
// user's thread, without the token. All of it is inline: it is on the path of every write.
#pragma once

#include <time.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "transfer/core.h"
#include "transfer/pool.h"
#include "transfer/staging.h"

namespace weft::transfer {

inline Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, kLongestWait_s)));
}

// A few milliseconds old, and a tenth of the price.
inline Clock::time_point coarse_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return Clock::time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
}

inline Status check_handle(const char* argument, bool is_given) {
  return is_given ? Status() : Status::invalid("{}: got nothing, allowed: a handle of this engine", argument);
}

// Makes one Transfer from one request; runs on the user's thread, without the token.
class Builder {
 public:
  Builder(Core& core, OpKind kind, How& how)
      : core_(core), how_(how), made_(std::allocate_shared<Transfer>(PoolAllocator<Transfer>())) {
    made_->kind_ = kind;
    made_->maker_ = core.serial;
  }

  Status begin(std::shared_ptr<Memory> memory, bool is_imm_allowed = true) {
    if (Status status = check(memory, is_imm_allowed); !status.ok()) return status;
    made_->memory_ = std::move(memory);
    made_->has_imm_ = how_.imm.has_value();
    made_->imm_key_ = counter_key(ImmClass::kCount, how_.imm.value_or(0));
    made_->notify_ = how_.notify;
    return {};
  }

  Status check(const std::shared_ptr<Memory>& memory, bool is_imm_allowed) const {
    if (core_.is_closed()) return core_.closed_status();
    if (memory) WEFT_TRY(core_.check_own("memory", memory->maker_));
    if (memory && !memory->is_registered())
      return Status::invalid("memory: got memory that was unregistered, allowed: registered memory");
    if (memory && (memory->access() & kTemporary) && made_->kind_ != OpKind::kWrite)
      return Status::invalid("memory: got a temporary registration, allowed for {}: a lasting one",
                             to_string(made_->kind_));
    const bool is_target = made_->kind_ == OpKind::kRead || made_->kind_ == OpKind::kRecv;
    if (memory && memory->is_read_only() && is_target)
      return Status::invalid("memory: got read-only memory as the target of a {}, allowed: writable memory",
                             to_string(made_->kind_));
    if (how_.imm && !is_imm_allowed)
      return Status::invalid("imm: got {}, allowed: none with {}", *how_.imm, to_string(made_->kind_));
    if (how_.imm && *how_.imm > kImmIdMax)
      return Status::invalid("imm: got {}, allowed: 0 to {}", *how_.imm, kImmIdMax);
    if (how_.rail != kAnyRail && how_.rail >= core_.rail_count())
      return Status::invalid("rail: got {}, allowed: 0 to {}", how_.rail, core_.rail_count() - 1);
    if (how_.timeout_s < 0) return Status::invalid("timeout_s: got {}, allowed: above 0", how_.timeout_s);
    return {};
  }

  Status set_peer(const std::shared_ptr<Peer>& peer) {
    WEFT_TRY(check_handle("peer", peer != nullptr));
    WEFT_TRY(core_.check_own("peer", peer->maker_));
    made_->peer_ = peer;
    return {};
  }

  // Adds a target; its pieces follow by add_piece() with the number that this returns, before the next target's.
  Result<uint32_t> add_target(std::shared_ptr<Remote> remote, Access wanted) {
    if (!remote) return Status::invalid("remote: got nothing, allowed: attached memory of a peer");
    WEFT_TRY(core_.check_own("remote", remote->peer()->maker_));
    // A peer is lost before its memory is revoked: in the other order its loss would look like a descriptor taken back.
    const bool is_revoked = remote->is_revoked();
    if (const Peer& peer = *remote->peer(); !peer.is_alive())
      return Status::make(Code::kPeerLost, "transfer.{}: peer '{}' is {}: {}", to_string(made_->kind_),
                          peer.name(), to_string(peer.state()), peer.why().message());
    if (is_revoked)
      return Status::invalid("remote: got memory that peer '{}' has taken back, allowed: a live descriptor",
                             remote->peer()->name());
    if (!(remote->access() & wanted))
      return Status::invalid(
          "remote: got memory of peer '{}' without remote {} access, allowed: memory registered for it",
          remote->peer()->name(), wanted == kRemoteWrite ? "write" : "read");
    if (!made_->remote_) {
      made_->remote_ = std::move(remote);
      return 0u;
    }
    made_->more_.push_back(std::move(remote));
    return static_cast<uint32_t>(made_->more_.size());
  }

  void add_piece(const Transfer::Piece& piece) {
    made_->bytes_.store(made_->bytes() + piece.bytes, std::memory_order_relaxed);
    if (is_empty_)
      made_->first_ = piece;
    else
      made_->rest_.push_back(piece);
    is_empty_ = false;
  }

  // Spreads one range over `rails` rails, beginning with the pinned or the next one.
  void add_range(uint32_t target, uint64_t local, uint64_t remote, uint64_t bytes, uint32_t rails) {
    const uint32_t all = core_.rail_count();
    const uint32_t first = how_.rail == kAnyRail ? next_rail(all) : how_.rail;
    const uint64_t piece_max = core_.write_bytes_max();
    if (rails == 1 || how_.rail != kAnyRail) {
      if (bytes <= piece_max)
        return add_piece({local, remote, bytes, target, static_cast<uint16_t>(first), false});
      for (const Shard& s : shard_range(bytes, {1, core_.options.shard_bytes_min, piece_max}, 0))
        add_piece(
            {local + s.offset, remote + s.offset, s.bytes, target, static_cast<uint16_t>(first), false});
      return;
    }
    for (const Shard& s : shard_range(bytes, {rails, core_.options.shard_bytes_min, piece_max}, first))
      add_piece({local + s.offset, remote + s.offset, s.bytes, target, static_cast<uint16_t>(s.rail), false});
  }

  // Decides how the bytes travel and where the immediate rides, and hands the transfer over.
  Result<std::shared_ptr<Transfer>> submit() {
    if (made_->kind_ == OpKind::kWrite) choose_path();
    if (made_->has_imm_ && !made_->staged_ && made_->kind_ == OpKind::kWrite) place_imms();
    made_->pieces_in_all_.store(static_cast<uint32_t>(made_->pieces()), std::memory_order_relaxed);
    made_->submitted_ = coarse_now();
    made_->began_ns_ = tally_now_ns();
    made_->deadline_ =
        made_->submitted_ + to_duration(how_.timeout_s > 0 ? how_.timeout_s : core_.options.timeout_s);
    made_->counter_ = std::move(how_.counter);
    made_->callback_ = std::move(how_.callback);
    core_.submit(made_);
    return made_;
  }

  Transfer* operator->() { return made_.get(); }

 private:
  uint32_t next_rail(uint32_t rails) {
    return rails == 1 ? 0 : core_.next_rail.fetch_add(1, std::memory_order_relaxed) % rails;
  }

  void choose_path() {
    for (uint32_t target = 0; target <= made_->more_.size(); ++target)
      made_->staged_ = made_->staged_ || core_.wants_staging(*made_->memory_, *made_->remote(target),
                                                             made_->pieces(), made_->bytes());
  }

  void place_imms() {
    size_t next = 0;  // pieces are in the order of their targets
    std::vector<Transfer::Piece*> pieces;
    for (uint32_t target = 0; target <= made_->more_.size(); ++target) {
      pieces.clear();
      for (; next < made_->pieces(); ++next) {
        Transfer::Piece& piece = next == 0 ? made_->first_ : made_->rest_[next - 1];
        if (piece.target != target) break;
        pieces.push_back(&piece);
      }
      const bool is_each = how_.notify == Notify::kEach;
      if (!core_.can_write_imm()) {
        made_->delivered_ = true;
        made_->notices_.insert(made_->notices_.end(), is_each ? pieces.size() : 1, target);
      } else if (is_each || pieces.size() == 1) {
        for (Transfer::Piece* piece : pieces) piece->has_imm = true;
      } else if (is_one_ordered_stream(pieces, *made_->remote(target))) {
        pieces.back()->has_imm = true;
      } else {
        made_->delivered_ = true;
        made_->notices_.push_back(target);
      }
    }
  }

  bool is_one_ordered_stream(const std::vector<Transfer::Piece*>& pieces, const Remote&) const {
    const provider::Caps& caps = core_.rails[pieces[0]->rail].rail->caps();
    if (!caps.ordered_writes || caps.pages_apart) return false;
    return std::all_of(pieces.begin(), pieces.end(),
                       [&](const auto* piece) { return piece->rail == pieces[0]->rail; });
  }

  Core& core_;
  How& how_;
  std::shared_ptr<Transfer> made_;
  bool is_empty_ = true;
};

}  // namespace weft::transfer
