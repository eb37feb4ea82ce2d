// SPDX-License-Identifier: Apache-2.0
//
// Storages in pieces of a window, as Python counts them: weft/moe/window_pieces.py says when a piece is free again.
// All of this is called with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "base/owner_process.h"

namespace weft {

// One piece that is out. It goes back, to pieces.take_back(offset, home, recorded), when none of its shares is left.
class PieceLease {
 public:
  // owner: keeps the window mapped. home: the stream that was current when it was lent; None on the CPU.
  PieceLease(nanobind::object pieces, nanobind::object owner, uint64_t offset, nanobind::object home);
  ~PieceLease();
  PieceLease(const PieceLease&) = delete;

  nanobind::dict recorded;  // streams that record_stream() named, by their numbers

 private:
  const OwnerProcess maker_;
  nanobind::object pieces_, owner_;
  uint64_t offset_;
  nanobind::object home_;
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
