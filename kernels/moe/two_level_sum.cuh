// SPDX-License-Identifier: Apache-2.0
//
// two_level_sum.cuh: the sum, at the rail peer, of the rows of one token in one domain. Rows of other members lie in
// the rail peer's staging, its own in x. A burst of rows of a (source, member) pair has a signal.
#pragma once

#include "kernels/core/numbers.cuh"
#include "kernels/moe/two_level_ring.cuh"

namespace weft {
namespace two_level {

// Vectors of a row that a lane adds at once: there are two sums of each.
inline constexpr uint32_t kDomainVecs = Warp::kMaxSize == 1 ? kSumVecs : 2;

template <class MeshT, class Shape>
class DomainRows {
 public:
  WEFT_DEVICE DomainRows(const TwoLevelCombineArgs& a, Warp warp, const MeshT& mesh, const Shape& shape,
                         uint64_t epoch)
      : a_(a),
        warp_(warp),
        mesh_(mesh),
        shape_(shape),
        epoch_(epoch),
        own_(a.domains.domain[mesh.rank()]),
        staging_(mesh.local() + a.base.mine.rows_at),
        staging_weights_(reinterpret_cast<const float*>(mesh.local() + a.base.mine.meta_at)) {}

  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape_.top_k); }
  WEFT_DEVICE uint64_t stride() const { return sum_stride(shape_.row_bytes, top_k()); }
  WEFT_DEVICE uint32_t slot_messages() const { return static_cast<uint32_t>(a_.at.slot_bytes / stride()); }
  WEFT_DEVICE RowSpan rows_of(uint32_t source, uint32_t rank) const {
    return row_span(a_.base.prefix, mesh_.ranks(), source, rank);
  }
  WEFT_DEVICE uint32_t messages(uint32_t source, uint32_t domain) const {
    return static_cast<uint32_t>(a_.routes.pairs[source * a_.domains.count + domain]);
  }
  WEFT_DEVICE uint64_t pushed_at(uint32_t source, uint32_t place, uint32_t burst) const {
    return a_.at.pushed + ((uint64_t{source} * a_.domains.widest + place) * kPushBursts + burst) * 8;
  }

  // The rows of message `number` of a source of this rank.
  WEFT_DEVICE const int32_t* record_of(uint32_t source, uint32_t number) const {
    const uint64_t first = static_cast<uint32_t>(a_.routes.source_first[source]);
    return a_.routes.records + (first + number) * record_words(a_.domains.widest, is_ordered());
  }
  // Where sums have no order of their own, domains and members ascend.
  WEFT_DEVICE bool is_ordered() const { return a_.routes.own_order != nullptr; }
  // The place of the member whose row of a token is added as number n; -1: none, nor later ones.
  WEFT_DEVICE int32_t member_added(const int32_t* record, uint64_t token, uint32_t n) const {
    if (!is_ordered()) return static_cast<int32_t>(n);
    return record ? record[a_.domains.widest + n] : a_.routes.own_order[token * a_.domains.widest + n];
  }
  // Which row of those from `source` a token has at member i; -1: none. A token of this rank itself has no record.
  WEFT_DEVICE int32_t row_number(const int32_t* record, uint64_t token, uint32_t i) const {
    return record ? record[i] : a_.base.send_row[token * mesh_.ranks() + a_.domains.member(own_, i)];
  }

  // Whether a token's rows have come from every member of the domain.
  WEFT_DEVICE bool have_come(uint32_t source, const int32_t* record, uint64_t token, Turn& turn) const {
    for (uint32_t i = 0; i < a_.domains.size(own_); ++i) {
      const uint32_t member = a_.domains.member(own_, i);
      const int32_t number = row_number(record, token, i);
      if (number < 0 || member == mesh_.rank()) continue;
      const uint32_t burst = static_cast<uint32_t>(number) / push_rows_of(rows_of(source, member).count);
      uint64_t seen = 0;
      if (warp_.rank() == 0)
        seen = load_acquire(reinterpret_cast<const uint64_t*>(mesh_.local() + pushed_at(source, i, burst)));
      seen = warp_.broadcast(seen);
      if (seen >= epoch_) continue;
      turn.waits_for({Site::kCombineRecv, member, epoch_, seen});
      return false;
    }
    return true;
  }

  // Where the row of a token at member i is, counted in rows: in x where the member is this rank, else in staging.
  struct Place {
    bool is_own;
    uint64_t row;
  };
  WEFT_DEVICE Place place_of(uint32_t source, uint32_t i, int32_t number) const {
    const uint32_t member = a_.domains.member(own_, i);
    const bool is_own = member == mesh_.rank();
    const uint32_t first = is_own
                               ? rows_of(source, member).first
                               : static_cast<uint32_t>(a_.routes.back_first[source * a_.domains.widest + i]);
    return {is_own, uint64_t{first} + static_cast<uint32_t>(number)};
  }

  // Calls with_row(row) for each of a token's rows in this domain, in the order in which they are added.
  template <class WithRow>
  WEFT_DEVICE void for_domain_rows(uint32_t source, const int32_t* record, uint64_t token,
                                   WithRow with_row) const {
    for (uint32_t n = 0; n < a_.domains.size(own_); ++n) {
      const int32_t added = member_added(record, token, n);
      if (added < 0) break;
      const auto i = static_cast<uint32_t>(added);
      const int32_t number = row_number(record, token, i);
      if (number < 0) continue;
      const Place place = place_of(source, i, number);
      with_row((place.is_own ? a_.base.x : staging_) + place.row * shape_.row_bytes);
    }
  }
  // The sum of a token's rows in this domain at vectors v, v + stride, ...
  template <class Element, uint32_t kVecs>
  WEFT_DEVICE void add_domain(float (&sums)[kVecs][Element::kPerVec], uint32_t source, const int32_t* record,
                              uint64_t token, uint64_t v, uint64_t stride) const {
    for_domain_rows(source, record, token, [&](const std::byte* row) {
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        Element::add(sums[j], load_vec_streaming(reinterpret_cast<const Vec16*>(row) + v + j * stride));
    });
  }
  // By one host thread: lists those rows, as many as fit, and returns how many there are.
  WEFT_DEVICE uint32_t list_domain(AddedRow (&rows)[kMostAddedRows], uint32_t source, const int32_t* record,
                                   uint64_t token) const {
    uint32_t count = 0;
    for_domain_rows(source, record, token, [&](const std::byte* row) {
      if (count < kMostAddedRows) rows[count] = {row, 1.0f};
      ++count;
    });
    return count;
  }
  WEFT_DEVICE float domain_weight(uint32_t source, const int32_t* record, uint64_t token, uint32_t k) const {
    float sum = 0.0f;
    for (uint32_t i = 0; i < a_.domains.size(own_); ++i) {
      const int32_t number = row_number(record, token, i);
      if (number < 0) continue;
      const Place place = place_of(source, i, number);
      sum += (place.is_own ? a_.base.topk_weights : staging_weights_)[place.row * top_k() + k];
    }
    return sum;
  }

  // Calls part<kVecs>(v) until it has had every vector of a row, kDomainVecs at a time as far as they go.
  template <class Part>
  WEFT_DEVICE void for_vectors(Part part) const {
    const uint64_t vectors = shape_.row_bytes / 16, stride = warp_.size();
    uint64_t v = warp_.rank();
    for (; v + (kDomainVecs - 1) * stride < vectors; v += kDomainVecs * stride)
      part.template operator()<kDomainVecs>(v);
    for (; v < vectors; v += stride) part.template operator()<1>(v);
  }

  const TwoLevelCombineArgs& a_;
  const Warp warp_;
  const MeshT& mesh_;
  const Shape& shape_;
  const uint64_t epoch_;
  const uint32_t own_;
  const std::byte* const staging_;
  const float* const staging_weights_;
};

}  // namespace two_level
}  // namespace weft
