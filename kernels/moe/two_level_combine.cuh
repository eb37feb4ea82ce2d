// SPDX-License-Identifier: Apache-2.0
//
// two_level_combine.cuh: rows return to their tokens where ranks do not all map each other (two_level_args.h), and are
// added on the way.
//
// Steps: 1. All ranks say where their staging is.
//        2. Push warps copy rows into the staging of the rail peer of the rank that they return to, burst by burst, a
//           signal each. A rail peer's own rows stay where they are.
//        3. Batch warps add the rows of each message of this rank's sources, and send the sums; and add what came
//           from each domain to this rank's tokens, in order.
//
// Waits: step 1 for every peer's address; step 3 for the bursts of its domain, for slots that sources have read, and
// for the sums of other domains.
//
// Sums: float32 over the ranks of a domain ascending, rounded to the rows' type once; then float32 over the biases and
// the domains ascending, rounded once. Where a token's ranks have an order (HandleMemory::sum_place), it goes in the
// place of ascending, and domains are added in the order of the last rank of each.
//
// Cost over the network, per (token, other domain): row_bytes + 4 * K bytes, in whole vectors; per slot of them a put
// with a signal there and a signal back.
#pragma once

#include "kernels/moe/two_level_sum.cuh"

namespace weft {
namespace two_level {

template <class MeshT, class Shape>
class CombineBatches : public DomainRows<MeshT, Shape> {
  using Rows = DomainRows<MeshT, Shape>;
  using Rows::a_, Rows::warp_, Rows::mesh_, Rows::shape_, Rows::epoch_, Rows::own_;
  using Rows::add_domain, Rows::for_vectors, Rows::have_come, Rows::is_ordered, Rows::domain_weight,
      Rows::messages, Rows::pushed_at;
  using Rows::record_of, Rows::rows_of, Rows::slot_messages, Rows::stride, Rows::top_k;

 public:
  using Rows::Rows;

  // Step 2. Tasks are (number of a burst, source), those of this rank's successors first.
  WEFT_DEVICE void push(const Rendezvous& rendezvous, const Share& share) const {
    const uint32_t ranks = mesh_.ranks(), self = mesh_.rank();
    for (uint64_t task = share.index; task < uint64_t{ranks} * kPushBursts; task += share.total) {
      const auto source = static_cast<uint32_t>((self + 1 + task % ranks) % ranks);
      const uint32_t rail_peer = a_.domains.rail_peer(source, own_);
      if (rail_peer != self) push_burst(rendezvous, source, rail_peer, static_cast<uint32_t>(task / ranks));
    }
  }

  // Step 3.
  WEFT_DEVICE void take_turn(uint32_t batch, RingState* states, Turn& turn) const {
    for (uint32_t i = 0; i < a_.domains.source_count; ++i) send(batch, i, states[a_.domains.count + i], turn);
    sum_tokens(batch, states, turn);
  }

 private:
  WEFT_DEVICE void push_burst(const Rendezvous& rendezvous, uint32_t source, uint32_t rail_peer,
                              uint32_t burst) const {
    const RowSpan span = rows_of(source, mesh_.rank());
    const uint32_t size = push_rows_of(span.count), begin = burst * size;
    if (begin >= span.count) return;
    const Span traced(a_.base.wait.trace, Work::kPushBack, warp_.rank() == 0);
    const uint32_t count = span.count - begin < size ? span.count - begin : size;
    const uint32_t place = a_.domains.place[mesh_.rank()];
    const RendezvousRecord* theirs = rendezvous_record(rendezvous, mesh_, epoch_, rail_peer);
    std::byte* window = near_window(mesh_, rail_peer);
    const uint64_t to =
        uint64_t{static_cast<uint32_t>(a_.routes.back_first[source * a_.domains.widest + place])} + begin;
    const uint64_t from = uint64_t{span.first} + begin;
    std::byte* rows = window + theirs->rows_at + to * shape_.row_bytes;
    const std::byte* x = a_.base.x + from * shape_.row_bytes;
    const uint64_t bytes = count * uint64_t(shape_.row_bytes);
    if (!copy_past_caches(rows, x, bytes)) copy_bytes(warp_, rows, x, bytes);
    if (top_k() != 0)
      copy_bytes(warp_, window + theirs->meta_at + to * top_k() * 4, a_.base.topk_weights + from * top_k(),
                 uint64_t{count} * top_k() * 4);
    warp_.sync();
    if (warp_.rank() == 0) put_word(mesh_, rail_peer, pushed_at(source, place, burst), epoch_);
  }

  // -- to sources
  WEFT_DEVICE Ring ring_to(uint32_t batch, uint32_t i) const {
    const uint64_t here = ring_number(a_.domains, i, batch);
    const uint64_t there = ring_number(a_.domains, own_, batch);
    return {a_.domains.sources[i], slot_at(a_.at, a_.at.source_rings, here, 0),
            slot_at(a_.at, a_.at.domain_rings, there, 0), a_.at.sums_taken + here * 8,
            a_.at.sums_sent + there * 8};
  }

  // Adds rows of the batch's next messages into its slot until it is full, or a row is missing. state.at: messages added.
  WEFT_DEVICE void send(uint32_t batch, uint32_t i, RingState& stored, Turn& turn) const {
    RingState state = stored;
    const Ring ring = ring_to(batch, i);
    if (state.is_done || messages(ring.peer, own_) == 0) return;
    const uint32_t row = ring.peer * a_.domains.batches + batch;
    const auto first = static_cast<uint32_t>(a_.routes.batch_first[row]);
    const auto count = static_cast<uint32_t>(a_.routes.batch_count[row]);
    if (count == 0) return;
    if (!has_slot(warp_, mesh_, ring, state, epoch_, Site::kCombineSlot, turn)) return;
    std::byte* slot = own_slot(mesh_, a_.at, ring, state.slots);
    const uint32_t before = state.at;
    const uint32_t end = count - state.moved < slot_messages() ? count : state.moved + slot_messages();
    for (; state.at < end; ++state.at) {
      const int32_t* record = record_of(ring.peer, first + state.at);
      if (!have_come(ring.peer, record, 0, turn)) break;
      build(ring.peer, record, slot + (state.at - state.moved) * stride());
    }
    if (state.at == end) {
      const uint64_t bytes = (end - state.moved) * stride();
      state.moved = end;
      state.is_done = end == count;
      send_slot(warp_, mesh_, a_.at, ring, state, epoch_, bytes);
    }
    if (state.at != before) turn.moved();
    keep(warp_, stored, state);
  }

  WEFT_DEVICE void build(uint32_t source, const int32_t* record, std::byte* at) const {
    const Span traced(a_.base.wait.trace, Work::kSum, warp_.rank() == 0);
    if (shape_.element == kElementFp32)
      build_row<Fp32>(source, record, at);
    else
      build_row<Bf16>(source, record, at);
    auto* weights = reinterpret_cast<float*>(at + shape_.row_bytes);
    for (uint32_t k = warp_.rank(); k < top_k(); k += warp_.size())
      weights[k] = domain_weight(source, record, 0, k);
  }
  template <class Element>
  WEFT_DEVICE void build_row(uint32_t source, const int32_t* record, std::byte* at) const {
    if (build_by_thread<Element>(source, record, at)) return;
    for_vectors([&]<uint32_t kVecs>(uint64_t v) {
      float sums[kVecs][Element::kPerVec] = {};
      this->template add_domain<Element>(sums, source, record, 0, v, warp_.size());
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        store_vec(reinterpret_cast<Vec16*>(at) + v + j * warp_.size(), Element::round(sums[j]));
    });
  }

  // The same at once; false: not here. The network reads the sum next.
  template <class Element>
  WEFT_DEVICE bool build_by_thread(uint32_t source, const int32_t* record, std::byte* at) const {
    if constexpr (kSumsByThread) {
      AddedRow rows[kMostAddedRows];
      const uint32_t count = this->list_domain(rows, source, record, 0);
      return count <= kMostAddedRows &&
             Element::template sum_by_thread<false>(at, rows, count, shape_.row_bytes, false);
    }
    return false;
  }

  // -- to this rank's tokens
  WEFT_DEVICE Ring ring_from(uint32_t batch, uint32_t domain) const {
    const uint64_t here = ring_number(a_.domains, domain, batch);
    const uint64_t there = ring_number(a_.domains, a_.domains.number[domain], batch);
    return {a_.domains.rail_peer(mesh_.rank(), domain), slot_at(a_.at, a_.at.domain_rings, here, 0), 0,
            a_.at.sums_sent + here * 8, a_.at.sums_taken + there * 8};
  }
  WEFT_DEVICE bool goes_to(uint64_t token, uint32_t domain) const {
    return a_.routes.send_pair[token * a_.domains.count + domain] >= 0;
  }
  // The domain whose sum is added as number n; -1: none, nor later ones.
  WEFT_DEVICE int32_t domain_added(uint64_t token, uint32_t n) const {
    return is_ordered() ? a_.routes.domain_order[token * a_.domains.count + n] : static_cast<int32_t>(n);
  }
  // The next sum of a domain that this rank has not taken yet.
  WEFT_DEVICE const std::byte* next_sum(uint32_t batch, uint32_t domain, const RingState* states) const {
    const uint64_t rings = a_.at.domain_rings;
    const uint32_t taken = states[domain].moved;
    return mesh_.local() + payload_of(mesh_, a_.domains.rail_peer(mesh_.rank(), domain)) +
           slot_at(a_.at, rings, ring_number(a_.domains, domain, batch), taken / slot_messages()) +
           taken % slot_messages() * stride();
  }

  // Whether all that a token needs is here. states[domain].at: sums of it that are.
  WEFT_DEVICE bool is_ready(uint32_t batch, uint64_t token, RingState* states, Turn& turn) const {
    for (uint32_t domain = 0; domain < a_.domains.count; ++domain) {
      if (!goes_to(token, domain)) continue;
      if (domain == own_) {
        if (!have_come(mesh_.rank(), nullptr, token, turn)) return false;
        continue;
      }
      RingState state = states[domain];
      if (state.at > state.moved) continue;
      const Ring ring = ring_from(batch, domain);
      state.at =
          static_cast<uint32_t>(read_word(warp_, mesh_, ring.peer, ring.own_word, epoch_) & kRingCount);
      if (state.at <= state.moved) {
        turn.waits_for({Site::kCombineSum, ring.peer, state.moved + 1, state.at});
        return false;
      }
      keep(warp_, states[domain], state);
    }
    return true;
  }

  // A token's sums were taken: slots whose last one that was are free.
  WEFT_DEVICE void take_sums(uint32_t batch, uint64_t token, RingState* states) const {
    for (uint32_t domain = 0; domain < a_.domains.count; ++domain) {
      if (domain == own_ || !goes_to(token, domain)) continue;
      RingState state = states[domain];
      ++state.moved;
      if (state.moved % slot_messages() == 0)
        free_slot(warp_, mesh_, ring_from(batch, domain), state, epoch_);
      keep(warp_, states[domain], state);
    }
  }

  // The batch's tokens in order, until one is not ready. The own domain's state counts them.
  WEFT_DEVICE void sum_tokens(uint32_t batch, RingState* states, Turn& turn) const {
    const BatchRange range = batch_range(a_.base.tokens, batch, a_.domains.batches);
    RingState state = states[own_];
    const uint32_t before = state.at;
    for (; range.first + state.at < range.end; ++state.at) {
      const uint64_t token = range.first + state.at;
      if (!is_ready(batch, token, states, turn)) break;
      const Span traced(a_.base.wait.trace, Work::kSum, warp_.rank() == 0);
      if (shape_.element == kElementFp32)
        sum_row<Fp32>(batch, token, states);
      else
        sum_row<Bf16>(batch, token, states);
      for (uint32_t k = warp_.rank(); k < top_k(); k += warp_.size()) sum_weight(batch, token, states, k);
      take_sums(batch, token, states);
    }
    if (state.at != before) turn.moved();
    keep(warp_, states[own_], state);
  }

  template <class Element>
  WEFT_DEVICE void sum_row(uint32_t batch, uint64_t token, const RingState* states) const {
    if (sum_by_thread<Element>(batch, token, states)) return;
    const uint64_t stride = warp_.size(), at = token * shape_.row_bytes;
    for_vectors([&]<uint32_t kVecs>(uint64_t v) {
      float sums[kVecs][Element::kPerVec] = {};
      const auto add = [&](const std::byte* row) {
        WEFT_UNROLL
        for (uint32_t j = 0; j < kVecs; ++j)
          Element::add(sums[j], load_vec_fresh(reinterpret_cast<const Vec16*>(row) + v + j * stride));
      };
      for (const std::byte* bias : a_.base.bias)
        if (bias) add(bias + at);
      for (uint32_t n = 0; n < a_.domains.count; ++n) {
        const int32_t added = domain_added(token, n);
        if (added < 0) break;
        const auto domain = static_cast<uint32_t>(added);
        if (!goes_to(token, domain)) continue;
        if (domain != own_) {
          add(next_sum(batch, domain, states));
          continue;
        }
        float part[kVecs][Element::kPerVec] = {};
        this->template add_domain<Element>(part, mesh_.rank(), nullptr, token, v, stride);
        WEFT_UNROLL
        for (uint32_t j = 0; j < kVecs; ++j) Element::add(sums[j], Element::round(part[j]));
      }
      auto* out = reinterpret_cast<Vec16*>(a_.base.combined + at) + v;
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j) store_vec_streaming(out + j * stride, Element::round(sums[j]));
    });
  }
  // The same at once; false: not here. Where there are several rows of the own domain, their sum is made a piece
  // before.
  template <class Element>
  WEFT_DEVICE bool sum_by_thread(uint32_t batch, uint64_t token, const RingState* states) const {
    if constexpr (kSumsByThread) {
      AddedRow own[kMostAddedRows], terms[kMostAddedRows];
      const uint32_t own_count = this->list_domain(own, mesh_.rank(), nullptr, token);
      uint32_t count = 0, own_at = 0;
      const uint64_t at = token * shape_.row_bytes;
      for (const std::byte* bias : a_.base.bias)
        if (bias) terms[count++] = {bias + at, 1.0f};
      if (own_count > kMostAddedRows || count + a_.domains.count > kMostAddedRows) return false;
      for (uint32_t n = 0; n < a_.domains.count; ++n) {
        const int32_t added = domain_added(token, n);
        if (added < 0) break;
        const auto domain = static_cast<uint32_t>(added);
        if (!goes_to(token, domain)) continue;
        if (domain == own_) own_at = count;
        terms[count++] = {domain == own_ ? own[0].at : next_sum(batch, domain, states), 1.0f};
      }
      return sum_pieces<Element>(a_.base.combined + at, terms, count, own, own_count, own_at);
    }
    return false;
  }
  // terms[own_at] stands for the sum of the own rows, if there are several.
  template <class Element>
  WEFT_DEVICE bool sum_pieces(std::byte* out, AddedRow* terms, uint32_t count, AddedRow* own,
                              uint32_t own_count, uint32_t own_at) const {
    constexpr uint32_t kPieceBytes = 4096;
    alignas(64) std::byte part[kPieceBytes];
    for (uint64_t done = 0; done < shape_.row_bytes; done += kPieceBytes) {
      const uint64_t left = shape_.row_bytes - done, bytes = left < kPieceBytes ? left : kPieceBytes;
      if (own_count > 1) {
        if (!Element::template sum_by_thread<false>(part, own, own_count, bytes, false)) return false;
        terms[own_at].at = part;
      }
      if (!Element::template sum_by_thread<false>(out + done, terms, count, bytes, true)) return false;
      for (uint32_t i = 0; i < own_count; ++i) own[i].at += kPieceBytes;
      for (uint32_t i = 0; i < count; ++i) terms[i].at += kPieceBytes;
    }
    return true;
  }
  WEFT_DEVICE void sum_weight(uint32_t batch, uint64_t token, const RingState* states, uint32_t k) const {
    float sum = 0.0f;
    for (uint32_t domain = 0; domain < a_.domains.count; ++domain) {
      if (!goes_to(token, domain)) continue;
      if (domain == own_)
        sum += domain_weight(mesh_.rank(), nullptr, token, k);
      else
        sum += float_of_bits(load_relaxed(
            reinterpret_cast<const uint32_t*>(next_sum(batch, domain, states) + shape_.row_bytes) + k));
    }
    a_.base.combined_weights[token * top_k() + k] = sum;
  }
};

}  // namespace two_level

template <class MeshT, class Shape>
WEFT_KERNEL void two_level_combine(const TwoLevelCombineArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  const CombineArgs& base = a.base;
  const BlockSpan traced(base.wait.trace, Work::kCombine);
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  const uint64_t epoch = base.state->epoch + 1;
  const Rendezvous rendezvous = rendezvous_of(base);
  if (!begin_rendezvous(base, rendezvous, block, warp, mesh, epoch, flags)) return;
  const two_level::CombineBatches<MeshT, Shape> batches(a, warp, mesh, shape, epoch);
  const Share share = share_of(block, warp, base.push_warps);
  if (share.active) batches.push(rendezvous, share);
  two_level::serve_batches(a, block, warp, batches);
  finish_launch(block, base.state, &flags[1]);
}

}  // namespace weft
