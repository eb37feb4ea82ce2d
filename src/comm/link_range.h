// SPDX-License-Identifier: Apache-2.0
//
// A window's own part in memory that its transport brings (Caps::brings_memory): the link allocates it, and all ranks
// map it together.
//   auto range = std::make_shared<LinkRange>(link, window_number);
//   WEFT_TRY_ASSIGN(FdMessage offer, range->extend(bytes));            // nothing travels
//   WEFT_TRY_ASSIGN(std::vector<std::byte*> bases, range->map());   // after every rank has extended
// Threads: as MappedRange. Lifetime: the link outlives the range.
#pragma once

#include <vector>

#include "memory/range.h"
#include "transports/transport.h"

namespace weft {

class LinkRange : public MappedRange {
 public:
  LinkRange(Link& link, int window, int rank) : link_(link), window_(window), rank_(rank) {}
  ~LinkRange() override { cut(0); }

  std::byte* base() const override { return base_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return uint64_t{2} << 20; }

  // Errors: kUnsupported for a second segment: what a library has registered has one size.
  Result<FdMessage> extend(uint64_t bytes) override;
  Status import(const FdMessage& offer, uint64_t bytes) override;
  void cut(uint64_t bytes) override;

  // Collective, once, after extend() on all ranks: the parts of all ranks, by rank.
  Result<std::vector<std::byte*>> map();

 private:
  Link& link_;
  const int window_, rank_;
  uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace weft
