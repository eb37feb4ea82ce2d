// SPDX-License-Identifier: Apache-2.0
//
// Storages in pieces of a window. Pieces, PieceLease and PieceShare are also weft._core's: weft/moe/window_pieces.py says
// when a piece is free again.
//   const nb::object lease = Pieces::lease(pieces, buffer, offset);   // and a PieceShare for each storage in it
// All of this is called with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "base/owner_process.h"

namespace weft {

// The pieces of one window.
class Pieces {
 public:
  // give_back(offset) makes a piece free. current() is the number of the stream that is current; None on the CPU, where
  // calls finish before they return, and a piece is free at once. give_back_after(offset, stream) makes a piece free
  // once what the stream has got is done; False while a graph captures it. None: there is no such function.
  Pieces(nanobind::object give_back, nanobind::object current, nanobind::object give_back_after)
      : give_back_(std::move(give_back)),
        current_(std::move(current)),
        give_back_after_(std::move(give_back_after)) {}

  // pieces: a Pieces. owner: keeps the window mapped.
  static nanobind::object lease(nanobind::object pieces, nanobind::object owner, uint64_t offset);
  // Of a piece that several streams have to be done with pieces.take_later(offset, home, now, recorded) takes care.
  static void take_back(nanobind::handle pieces, uint64_t offset, uint64_t home,
                        const nanobind::dict& recorded);

 private:
  uint64_t now() const { return current_.is_none() ? 0 : nanobind::cast<uint64_t>(current_()); }

  nanobind::object give_back_, current_, give_back_after_;
};

// One piece that is out. It goes back when none of its shares is left.
class PieceLease {
 public:
  // home: the stream that was current when it was leased.
  PieceLease(nanobind::object pieces, nanobind::object owner, uint64_t offset, uint64_t home)
      : pieces_(std::move(pieces)), owner_(std::move(owner)), offset_(offset), home_(home) {}
  ~PieceLease();
  PieceLease(const PieceLease&) = delete;

  nanobind::dict recorded;  // streams that record_stream() named, by their numbers

 private:
  const OwnerProcess maker_;
  nanobind::object pieces_, owner_;
  uint64_t offset_, home_;
};

// The share of a piece that one storage holds, until it dies or is freed. This object owns the storage's memory.
class PieceShare {
 public:
  explicit PieceShare(nanobind::object lease) : lease_(std::move(lease)) {}
  ~PieceShare();
  PieceShare(const PieceShare&) = delete;

  // Watches the storage that begins there.
  void lies_at(uint64_t address, uint64_t bytes, nanobind::handle device);
  // Lets go of the piece before torch's object of the storage dies.
  void free(uint64_t storage);

  const nanobind::object& lease() const { return lease_; }

 private:
  void let_go();

  nanobind::object lease_;  // None once it was let go
  uint64_t address_ = 0;
  uint64_t freed_storage_ = 0;
  uint64_t told_bytes_ = 0;  // that torch's profiler knows of
  nanobind::object device_;  // where, if it does
};

}  // namespace weft
