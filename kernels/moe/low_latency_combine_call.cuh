// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_call.cuh: what every part of a low-latency combine knows: its sizes, where weights and replies stand
// in a window, and what a warp keeps in shared memory: the rows that it sums and their weights.
//
// Other ranks know a token's slots as the dispatch had them. The combine's ids may mask some by an id below 0, and have the
// others in other places: a slot means the row of its expert. So an owner tells weights by slots of the dispatch, and waits
// for the replies that those bring. A masked slot has no weight, and its row is not looked at.
#pragma once

#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

// The bits of a weight that mean "masked". No caller's weight has them: see given_weight().
inline constexpr uint32_t kMaskedWeight = 0xffffffffu;
inline constexpr uint32_t kNanWeight = 0x7fc00000u;
WEFT_DEVICE constexpr uint32_t unmasked(uint32_t weight) {
  return weight == kMaskedWeight ? kNanWeight : weight;
}
// Of sent_slot().
inline constexpr int32_t kMaskedSlot = -1;
inline constexpr int32_t kStraySlot = -2;  // its expert is none that the dispatch sent the token to

// Where everything lies, which a kernel works out once where its sizes are no constants, as a GPU's are.
template <bool kAreConstant>
struct CombineLayouts {};
template <>
struct CombineLayouts<false> {
  CombineLayout window;
  CombineShared shared;
  RoutesLayout routes;
};

// How weights and replies travel: MappedCombine (low_latency_combine_send.cuh), where all ranks map each other, or
// PortCombine (low_latency_combine_ports.cuh). Both have
//   Replies                  this rank's replies to a batch of an owner: where each is built, and how they leave
//   kOwnersPlace             an owner's note says where its replies stand: it has come before any is built
//   weights_at, reply_parts, reply_number, reply    where weights, parts of replies and replies stand
//   send                     the send phase
struct MappedCombine;
struct PortCombine;
template <bool kAllAreMapped>
struct CombineDelivery {
  using type = MappedCombine;
};
template <>
struct CombineDelivery<false> {
  using type = PortCombine;
};

template <class MeshT, class Shape>
struct Combine {
  using Delivery = typename CombineDelivery<MappedMeshOnly<MeshT>>::type;

  const LowLatencyCombineArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Workers block;
  Warp warp;
  Epoch epoch;
  CombineLayouts<kIsConstant<Shape>> cached;

  // First of all.
  WEFT_DEVICE void keep_layouts() {
    if constexpr (!kIsConstant<Shape>) {
      cached.window = lay_out_window();
      cached.shared = lay_out_shared();
      cached.routes = lay_out_routes();
    }
  }

  WEFT_DEVICE uint32_t ranks() const { return static_cast<uint32_t>(shape.ranks); }
  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape.top_k); }
  WEFT_DEVICE Batches batches() const { return a.call.batches; }
  WEFT_DEVICE uint64_t tag() const { return line_tag(epoch.number); }
  // Tokens that came as lines are answered so, unless the answers are LogFMT.
  WEFT_DEVICE bool has_lines() const { return kHasLines<MeshT> && a.call.lines != 0; }
  WEFT_DEVICE bool answers_lines() const { return has_lines() && !is_log(shape.reply); }
  WEFT_DEVICE bool sent_lines() const { return a.routes[routes().lines] != 0 && answers_lines(); }
  WEFT_DEVICE RoutesLayout routes() const {
    if constexpr (kIsConstant<Shape>)
      return lay_out_routes();
    else
      return cached.routes;
  }
  WEFT_DEVICE RoutesLayout lay_out_routes() const {
    return routes_layout(shape.ranks, batches(), shape.top_k, shape.weights != 0);
  }
  WEFT_DEVICE uint64_t stride() const { return reply_stride(shape.row_bytes, shape.reply); }
  WEFT_DEVICE CombineLayout layout() const {
    if constexpr (kIsConstant<Shape>)
      return lay_out_window();
    else
      return cached.window;
  }
  WEFT_DEVICE CombineLayout lay_out_window() const {
    return combine_layout(shape.ranks, a.call.max_tokens, shape.top_k, stride());
  }
  WEFT_DEVICE uint64_t part_at(bool lines) const {
    return half_offset(a.call, shape.ranks, epoch) + (lines ? a.call.lines_at : 0);
  }
  WEFT_DEVICE uint64_t dispatch_epoch() const {
    return *reinterpret_cast<const uint64_t*>(a.routes + routes().epoch);
  }
  // The part of a row that makes one piece of a reply.
  WEFT_DEVICE Range vecs_of(uint32_t piece) const { return part_of(row_vecs(), piece, reply_parts()); }
  // Of a reply, each of which a warp builds.
  WEFT_DEVICE const Divisor& reply_parts() const { return Delivery::reply_parts(a); }
  WEFT_DEVICE uint32_t row_vecs() const { return static_cast<uint32_t>(shape.row_bytes / sizeof(Vec16)); }
  WEFT_DEVICE uint64_t out_row_bytes() const {
    return static_cast<uint64_t>(shape.row_bytes) / bytes_of_element(shape.element) *
           bytes_of_element(shape.out_element);
  }
  // The part of one piece that a receiver takes at a time, in units of pieces.
  WEFT_DEVICE Range part_of_units(uint32_t units, uint32_t split) const {
    const Range piece = part_of(units, split / a.piece_splits, a.pieces);
    const Range part = part_of(piece.last - piece.first, split % a.piece_splits, a.piece_splits);
    return {piece.first + part.first, piece.first + part.last};
  }
  WEFT_DEVICE uint64_t reply_at(uint64_t token, uint64_t k, bool lines) const {
    return part_at(lines) + layout().replies + (token * top_k() + k) * stride();
  }
  // Offset in the window of the weights that `owner` sends for its token.
  WEFT_DEVICE uint64_t weights_at(uint32_t owner, uint32_t token) const {
    return Delivery::weights_at(*this, owner, token);
  }
  WEFT_DEVICE uint32_t weight_vecs() const { return vecs_in(top_k() * sizeof(float)); }
  WEFT_DEVICE bool takes_own_weights() const { return is_reduced(shape.reply) && a.topk_weights; }

  // Whether the ids are those of the dispatch because they are the same memory.
  WEFT_DEVICE bool has_sent_ids() const { return a.topk_idx == a.sent_idx; }
  // The expert of slot k of a token of this rank: at the dispatch, and in this combine; -1: none.
  WEFT_DEVICE int64_t sent_expert(uint32_t token, uint32_t k) const {
    return expert_or_none(a.call, expert_at(a.sent_idx, a.sent_id_bytes, uint64_t{token} * top_k() + k));
  }
  WEFT_DEVICE int64_t meant_expert(uint32_t token, uint32_t k) const {
    return chosen_expert(a, top_k(), token, k);
  }
  // The slot of the dispatch that brought the row which slot k means: the same one, or the first of that expert.
  WEFT_DEVICE int32_t sent_slot(uint32_t token, uint32_t k) const {
    const int64_t expert = meant_expert(token, k);
    if (expert < 0) return kMaskedSlot;
    if (sent_expert(token, k) == expert) return static_cast<int32_t>(k);
    WEFT_ROLLED
    for (uint32_t slot = 0; slot < top_k(); ++slot)
      if (sent_expert(token, slot) == expert) return static_cast<int32_t>(slot);
    return kStraySlot;
  }
  // Whether a token's ids are others than at the dispatch. One thread.
  WEFT_DEVICE bool has_moved(uint32_t token) const {
    uint32_t moved = 0;  // no branch: loads go together
    WEFT_UNROLL
    for (uint32_t k = 0; k < top_k(); ++k) moved |= sent_expert(token, k) != meant_expert(token, k) ? 1u : 0u;
    return moved != 0;
  }
  // The bits of the weight with which a slot of the dispatch counts. `moved`: has_moved(). One thread.
  WEFT_DEVICE uint32_t weight_bits(uint32_t token, uint32_t slot, bool moved) const {
    return moved ? moved_weight(token, slot) : given_weight(token, slot);
  }
  // Those of four slots, from `first` on, as they travel. One thread.
  WEFT_DEVICE Vec16 weight_vec(uint32_t token, uint32_t first) const {
    Vec16 vec{};
    WEFT_UNROLL
    for (uint32_t w = 0; w < 4; ++w)
      if (first + w < top_k()) vec.words[w] = given_weight(token, first + w);
    if (has_sent_ids() || !has_moved(token)) return vec;
    WEFT_ROLLED
    for (uint32_t w = 0; w < 4; ++w) {
      const uint32_t weight = first + w < top_k() ? moved_weight(token, first + w) : 0;
      WEFT_UNROLL
      for (uint32_t word = 0; word < 4; ++word)
        if (word == w) vec.words[word] = weight;
    }
    return vec;
  }
  WEFT_DEVICE uint32_t given_weight(uint32_t token, uint32_t k) const {
    return unmasked(bits_of_float(a.topk_weights[uint64_t{token} * top_k() + k]));
  }
  // Which weight slot k has, whose row slot `sent` of the dispatch brought.
  WEFT_DEVICE uint32_t weight_slot(uint32_t k, uint32_t sent) const {
    return a.has_saved_weights != 0 ? sent : k;
  }
  WEFT_DEVICE uint32_t moved_weight(uint32_t token, uint32_t slot) const {
    uint32_t weight = kMaskedWeight;
    WEFT_ROLLED
    for (uint32_t k = 0; k < top_k(); ++k) {
      if (sent_slot(token, k) != static_cast<int32_t>(slot)) continue;
      const uint32_t given = given_weight(token, weight_slot(k, slot));
      weight = weight == kMaskedWeight
                   ? given
                   : unmasked(bits_of_float(add(float_of_bits(weight), float_of_bits(given))));
    }
    return weight;
  }

  // Whether this rank sums its own rows of a token while it waits for the others' replies, and sends itself none. It
  // does not where x may change before replies come, where x comes row by row, or where a batch has many tokens. Where
  // weights came with the dispatch, phases are mostly separate launches and the code would hardly run.
  WEFT_DEVICE bool sums_own() const {
    return kHasLines<MeshT> && is_reduced(shape.reply) && !is_log(shape.reply) && shape.weights == 0 &&
           batches().capacity == 1 && a.call.phases == (kPhaseSend | kPhaseReceive) && !a.signals;
  }
  // Owners that get replies of this rank.
  WEFT_DEVICE uint32_t owners() const { return sums_own() ? ranks() - 1 : ranks(); }

  // Where ranks have port peers: what owners tell this rank, what this rank tells a port peer, and which reply slot k of
  // token t, at t * K + k, gets.
  WEFT_DEVICE PortCombineLayout port_layout() const {
    return port_combine_layout(shape.ranks, a.call.max_tokens, top_k(), batches(), shape.row_bytes,
                               shape.reply);
  }
  WEFT_DEVICE uint64_t note_at(uint32_t owner) const {
    return part_at(false) + port_layout().notes + owner * port_layout().note.bytes;
  }
  // The note that an owner has put here.
  WEFT_DEVICE const std::byte* note_from(uint32_t owner) const {
    return mesh.local() + payload_of(mesh, owner) + note_at(owner);
  }
  WEFT_DEVICE Outgoing<MeshT> note_to(uint32_t peer) const {
    return {
        mesh,
        peer,
        near_window(mesh, peer),
        note_at(mesh.rank()),
        outbox_offset(a.call, shape.ranks, epoch) + port_layout().own_notes + peer * port_layout().note.bytes,
        port_places(mesh).payload};
  }
  WEFT_DEVICE uint32_t* places() const {
    if (std::byte* own = own_half()) return reinterpret_cast<uint32_t*>(own + own_layout().places);
    return reinterpret_cast<uint32_t*>(mesh.local() + outbox_offset(a.call, shape.ranks, epoch) +
                                       port_layout().places);
  }
  WEFT_DEVICE uint64_t port_reply_at(uint32_t number) const {
    return part_at(false) + port_layout().replies + number * port_layout().stride;
  }
  // This rank's own part in memory of its device, where there is a control page; else null.
  WEFT_DEVICE std::byte* own_half() const {
    const LowLatencyPage page = board_of(a.call, mesh);
    return page.own ? page.own + epoch.parity * page.own_bytes : nullptr;
  }
  WEFT_DEVICE OwnCombine own_layout() const {
    return own_combine(port_layout(), a.call.max_tokens, top_k(), batches());
  }
  // Exact replies may need more room than there is.
  WEFT_DEVICE bool keeps_own(uint32_t owner) const {
    const LowLatencyPage page = board_of(a.call, mesh);
    return page.own && owner == mesh.rank() && own_layout().bytes <= page.own_bytes;
  }
  // Where reply `number` of a rank to this one stands.
  WEFT_DEVICE const std::byte* reply_of(uint32_t rank, uint32_t number) const {
    return keeps_own(rank) ? own_half() + own_layout().replies + number * port_layout().stride
                           : mesh.local() + payload_of(mesh, rank) + port_reply_at(number);
  }
  // Where replies cross once for each domain.
  WEFT_DEVICE bool is_shared() const {
    return shape.reply == kReplyReduced && if_ports<MeshT>(a.rail_tables) != nullptr;
  }
  WEFT_DEVICE uint32_t rail(RailTable table, uint32_t of) const {
    return a.rail_tables[table * ranks() + of];
  }
  // The rank that sends this rank the replies of `rank`.
  WEFT_DEVICE uint32_t replier(uint32_t rank) const { return is_shared() ? rail(kRailPeerTo, rank) : rank; }
  // Whether replies to the owner go through the rail peer of this domain.
  WEFT_DEVICE bool goes_by_rail(uint32_t owner) const {
    return is_shared() && rail(kSourceNumber, owner) != kOwnDomain;
  }
  WEFT_DEVICE bool gathers_for(uint32_t owner) const {
    return goes_by_rail(owner) && rail(kRailPeerFrom, owner) == mesh.rank();
  }
  WEFT_DEVICE DomainCombineLayout domain_layout() const {
    return domain_combine_layout(port_layout(), batches(), a.domain_ranks, a.domain_sources);
  }
  // Tokens before a batch of an owner, among all in its rail peer's outbox.
  WEFT_DEVICE uint64_t source_at(uint32_t owner, uint32_t batch) const {
    return (uint64_t{rail(kSourceNumber, owner)} * batches().count + batch) * batches().capacity;
  }
  // How many words of a source the kernels of this rank wait for.
  WEFT_DEVICE uint32_t awaited_counts() const { return 0; }
  WEFT_DEVICE uint32_t awaited_words() const {
    return batches().count * (is_shared() ? 1 + a.domain_ranks : 1);
  }
  WEFT_DEVICE bool awaits_word(uint32_t source, uint32_t word) const {
    return word < batches().count ||
           (gathers_for(source) && word / batches().count - 1 != rail(kPlaceInDomain, mesh.rank()));
  }
  // Of a source's words, those that ranks of this domain move.
  WEFT_DEVICE bool is_near_word(uint32_t word) const { return word >= batches().count; }
  WEFT_DEVICE uint64_t counts_at(uint32_t) const { return 0; }
  WEFT_DEVICE const std::byte* inbox(uint32_t) const { return mesh.local(); }

  WEFT_DEVICE CombineShared shared() const {
    if constexpr (kIsConstant<Shape>)
      return lay_out_shared();
    else
      return cached.shared;
  }
  WEFT_DEVICE CombineShared lay_out_shared() const {
    return combine_shared(shape.ranks, shape.top_k, block.warps(), gathered_words());
  }
  WEFT_DEVICE uint32_t gathered_words() const {
    return is_shared() ? a.domain_ranks * batches().capacity : 0;
  }
  template <class T>
  WEFT_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(block.shared() + offset);
  }
  WEFT_DEVICE uint32_t* present() const { return at<uint32_t>(shared().present); }
  WEFT_DEVICE uint32_t* unanswered() const { return at<uint32_t>(shared().unanswered); }
  WEFT_DEVICE int32_t* rows() const { return at<int32_t>(shared().row) + warp.index() * top_k(); }
  WEFT_DEVICE uint32_t* slots() const { return at<uint32_t>(shared().slot) + warp.index() * top_k(); }
  WEFT_DEVICE float* weights() const { return at<float>(shared().weight) + warp.index() * top_k(); }
  WEFT_DEVICE uint32_t* slot_rank() const { return at<uint32_t>(shared().rank) + warp.index() * top_k(); }
  WEFT_DEVICE Vec16* owners_weights() const {
    return at<Vec16>(shared().owners) + warp.index() * weight_vecs();
  }
  // By place in the domain and token of a batch, what note_messages() has noted.
  WEFT_DEVICE uint32_t* gathered(uint32_t place) const {
    return at<uint32_t>(shared().gathered) + place * batches().capacity;
  }
  // While tokens are summed, in the same place: this rank's own rows, whose weights are in weights().
  WEFT_DEVICE int32_t* own_rows() const { return reinterpret_cast<int32_t*>(owners_weights()); }
};

// With one peer, and no replies to itself, a rank has warps for two to share a piece that goes as lines.
template <class C>
WEFT_DEVICE uint32_t parts_of_piece(const C& c) {
  return !kHasFewBlocks && c.shape.ranks == 2 && c.sums_own() ? 2 : 1;
}

// A message of which a warp answers a piece, or a part of one.
struct Message {
  const int32_t* record;
  uint32_t owner;
  uint32_t piece;
  uint32_t part;
  bool as_lines;
};

// Lists, in the warp's rows() and slots(), what is to be summed: item_of(k) for every slot k where it is not
// negative, in slot order. Returns how many. The warp.
template <class C, class ItemOf>
WEFT_DEVICE uint32_t list_rows(const C& c, ItemOf item_of) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < c.top_k(); first += c.warp.size()) {
    const uint32_t k = first + c.warp.rank();
    const int32_t item = k < c.top_k() ? item_of(k) : -1;
    const uint32_t at = count + c.warp.count_below(item >= 0);
    count += c.warp.count(item >= 0);
    if (item < 0) continue;
    c.rows()[at] = item;
    c.slots()[at] = k;
  }
  c.warp.sync();
  return count;
}

// Loads the weights of the listed rows, by slot. The warp.
template <class C, class WeightOf>
WEFT_DEVICE void list_weights(const C& c, uint32_t count, WeightOf weight_of) {
  for (uint32_t i = c.warp.rank(); i < count; i += c.warp.size()) c.weights()[i] = weight_of(c.slots()[i]);
  c.warp.sync();
}

// Where kAsksAhead: asks for the first lines of a row that is used soon.
WEFT_DEVICE void ask_for_row(const std::byte* row, uint64_t bytes) {
  constexpr uint64_t kLineBytes = 64, kMostBytes = 2048;
  for (uint64_t at = 0; at < bytes && at < kMostBytes; at += kLineBytes) prefetch(row + at);
}

}  // namespace low_latency
}  // namespace weft
