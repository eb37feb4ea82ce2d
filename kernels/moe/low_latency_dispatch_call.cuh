// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_call.cuh: what every part of a low-latency dispatch knows: its sizes, where messages, words
// and counts stand in a window, and what the block keeps in shared memory.
#pragma once

#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

// Where everything lies, which a kernel works out once where its sizes are no constants, as a GPU's are.
template <bool kAreConstant>
struct DispatchLayouts {};
template <>
struct DispatchLayouts<false> {
  MessageLayout message;
  DispatchShared shared;
};

template <class MeshT, class Shape>
struct Dispatch {
  // Whether a source's handshake is looked at before anything else that it sent: where that is cheap, and where ports bring
  // what may be read only then.
  static constexpr bool kChecksFirst = kIsAllNear || kHasPorts<MeshT>;
  const LowLatencyDispatchArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Workers block;
  Warp warp;
  Epoch epoch;
  DispatchLayouts<kIsConstant<Shape>> cached;

  // First of all.
  WEFT_DEVICE void keep_layouts() {
    if constexpr (!kIsConstant<Shape>) {
      cached.message = lay_out_message();
      cached.shared = lay_out_shared();
    }
  }

  WEFT_DEVICE uint32_t ranks() const { return static_cast<uint32_t>(shape.ranks); }
  WEFT_DEVICE uint32_t local_experts() const { return static_cast<uint32_t>(shape.experts_per_rank); }
  // Of local_experts() places for experts, the last ranks use fewer where experts do not divide evenly.
  WEFT_DEVICE uint32_t own_experts() const {
    const uint32_t first = mesh.rank() * local_experts();
    const uint32_t left = a.call.experts > first ? a.call.experts - first : 0;
    return left < local_experts() ? left : local_experts();
  }
  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape.top_k); }
  WEFT_DEVICE bool has_weights() const { return shape.weights != 0; }
  // Whether rows of an expert stand behind those of the one before it.
  WEFT_DEVICE bool is_packed() const { return shape.padding != 0; }
  WEFT_DEVICE uint32_t padded(uint32_t rows) const {
    const uint32_t padding = shape.padding != 0 ? static_cast<uint32_t>(shape.padding) : 1;
    return (rows + padding - 1) / padding * padding;
  }
  WEFT_DEVICE Batches batches() const { return a.call.batches; }
  // Whether a token crosses the network once for each domain (low_latency_ports.h).
  WEFT_DEVICE bool is_shared() const { return if_ports<MeshT>(a.rail_tables) != nullptr; }
  // The rank that gets this rank's messages for a peer.
  WEFT_DEVICE uint32_t rail_peer_to(uint32_t peer) const { return is_shared() ? a.rail_tables[peer] : peer; }
  // The window in which a source's messages and words stand.
  WEFT_DEVICE const std::byte* inbox(uint32_t source) const {
    return is_shared() ? near_window(mesh, a.rail_tables[ranks() + source]) : mesh.local();
  }
  WEFT_DEVICE const std::byte* message_from(uint32_t source, uint32_t batch, uint32_t index) const {
    return inbox(source) + payload_of(mesh, source) + message_at(source, batch, index);
  }
  // Where there is a control page, this rank's messages to itself stay in memory of its device.
  WEFT_DEVICE std::byte* own_message(uint32_t batch, uint32_t index) const {
    return a.call.page.own + epoch.parity * a.call.page.own_bytes +
           (uint64_t{batch} * batches().capacity + index) * message().stride;
  }
  WEFT_DEVICE bool keeps_own(uint32_t source) const {
    return board_of(a.call, mesh).own && source == mesh.rank();
  }
  // How many words of a source the kernels of this rank wait for: its counts, and one for each batch.
  WEFT_DEVICE uint32_t awaited_counts() const { return count_words(); }
  WEFT_DEVICE uint32_t awaited_words() const { return batches().count; }
  WEFT_DEVICE bool awaits_word(uint32_t, uint32_t) const { return true; }
  WEFT_DEVICE bool is_near_word(uint32_t) const { return false; }
  // A number of own_experts() or more: of another rank, or none.
  WEFT_DEVICE uint32_t own_expert(uint32_t in_head) const {
    return is_shared() ? in_head - mesh.rank() * local_experts() : in_head;
  }
  WEFT_DEVICE MessageLayout lay_out_message() const {
    return message_layout(shape.top_k, has_weights(), shape.row_bytes, shape.scale_bytes);
  }
  WEFT_DEVICE MessageLayout message() const {
    if constexpr (kIsConstant<Shape>)
      return lay_out_message();
    else
      return cached.message;
  }
  // Whether this rank's tokens leave as lines: one batch has one token then, or none.
  WEFT_DEVICE bool sends_lines() const { return kHasLines<MeshT> && a.call.tokens <= a.line_tokens; }
  // Whether tokens of other ranks may come as lines.
  WEFT_DEVICE bool takes_lines() const { return kHasLines<MeshT> && a.call.lines != 0; }
  WEFT_DEVICE uint64_t tag() const { return line_tag(epoch.number); }
  WEFT_DEVICE RoutesLayout routes() const {
    return routes_layout(shape.ranks, batches(), shape.top_k, has_weights());
  }
  WEFT_DEVICE uint64_t half_at() const { return half_offset(a.call, shape.ranks, epoch); }
  // Offset in the window of message `index` of a batch of a source.
  WEFT_DEVICE uint64_t message_at(uint32_t source, uint32_t batch, uint32_t index) const {
    const uint64_t slot = (uint64_t{source} * batches().count + batch) * batches().capacity + index;
    return half_at() + slot * message().stride;
  }
  WEFT_DEVICE Payload payload_format() const { return payload(shape.payload); }
  // Whether this rank's rows stand once in its own window, where receivers read them: in large calls on the host. Not
  // where ranks can be masked: nobody waits for a masked rank, so rows could change while it still reads them.
  WEFT_DEVICE bool keeps_rows() const {
    if constexpr (kCopiesAlone && kHasLines<MeshT>)
      return payload_format().encoder == Encoder::kNone && a.call.masked == nullptr && !sends_lines() &&
             is_past_caches(a.call, shape.row_bytes);
    else
      return false;
  }
  // Offset, in the source's window, of a row that the source keeps: the place of the row in a message to itself.
  WEFT_DEVICE uint64_t source_row_at(uint32_t source, uint32_t token) const {
    return message_at(source, 0, token) + message().row;
  }
  // Where its only one stands if that comes as lines.
  WEFT_DEVICE uint64_t line_message_at(uint32_t source, uint32_t batch) const {
    const uint64_t slot = uint64_t{source} * batches().count + batch;
    return half_at() + a.call.lines_at + slot * message().line_bytes();
  }

  // A source's count words, with what fills up a unit of a port.
  WEFT_DEVICE uint32_t count_words() const {
    return kHasPorts<MeshT> ? port_count_words(local_experts()) : local_experts();
  }
  // Offset in the window of a source's first count_word().
  WEFT_DEVICE uint64_t counts_at(uint32_t source) const {
    return control_offset(a.call, low_latency_control(shape.ranks).counts, kMaxExperts, epoch,
                          uint64_t{source} * count_words());
  }
  WEFT_DEVICE const uint64_t* count_word_at(uint32_t source, uint32_t expert) const {
    return reinterpret_cast<const uint64_t*>(control_from(a.call, mesh, source, counts_at(source))) + expert;
  }

  WEFT_DEVICE DispatchOutbox outbox() const {
    return dispatch_outbox(shape.ranks, local_experts(), batches(), message());
  }
  // A batch's messages to a peer, from number `index` on, or the only one as lines.
  WEFT_DEVICE Outgoing<MeshT> messages_to(uint32_t peer, uint32_t batch, uint32_t index) const {
    const uint64_t slot = (uint64_t{peer} * batches().count + batch) * batches().capacity + index;
    return {mesh,
            peer,
            near_window(mesh, peer),
            sends_lines() ? line_message_at(mesh.rank(), batch) : message_at(mesh.rank(), batch, index),
            outbox_offset(a.call, shape.ranks, epoch) + outbox().messages + slot * message().stride,
            port_places(mesh).payload};
  }
  // The count words that a peer gets.
  WEFT_DEVICE Outgoing<MeshT> counts_to(uint32_t peer) const {
    return outgoing_control(
        a.call, mesh, peer, counts_at(mesh.rank()),
        outbox_offset(a.call, shape.ranks, epoch) + outbox().counts + uint64_t{peer} * count_words() * 8);
  }

  WEFT_DEVICE DispatchShared shared() const {
    if constexpr (kIsConstant<Shape>)
      return lay_out_shared();
    else
      return cached.shared;
  }
  WEFT_DEVICE DispatchShared lay_out_shared() const {
    return dispatch_shared(shape.ranks, shape.experts_per_rank, shape.top_k, block.warps(), message(),
                           a.line_tokens != 0, is_packed());
  }
  template <class T>
  WEFT_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(block.shared() + offset);
  }
  WEFT_DEVICE uint32_t* present() const { return at<uint32_t>(shared().present); }
  WEFT_DEVICE uint32_t* sent() const { return at<uint32_t>(shared().sent); }
  WEFT_DEVICE uint32_t* sends_rows() const { return at<uint32_t>(shared().sends_rows); }
  WEFT_DEVICE uint32_t* found() const { return at<uint32_t>(shared().found); }
  WEFT_DEVICE uint32_t* prefix() const { return at<uint32_t>(shared().prefix); }
  WEFT_DEVICE uint32_t* begin() const { return at<uint32_t>(shared().begin); }
  WEFT_DEVICE uint32_t* expert_rows() const { return at<uint32_t>(shared().rows); }
  // Of the current token, by slot; a slot without an expert has rank R.
  WEFT_DEVICE int32_t* slot_choice() const { return at<int32_t>(shared().slot); }
  WEFT_DEVICE uint32_t* slot_rank() const { return at<uint32_t>(shared().slot) + top_k(); }
  WEFT_DEVICE uint32_t* slot_expert() const { return slot_rank() + top_k(); }
  WEFT_DEVICE uint32_t* slot_place() const { return slot_expert() + top_k(); }
  // The ranks that the current token goes to.
  WEFT_DEVICE uint32_t* targets() const { return at<uint32_t>(shared().targets); }
  WEFT_DEVICE uint32_t* target() const { return at<uint32_t>(shared().target); }
  WEFT_DEVICE std::byte** place() const { return at<std::byte*>(shared().place); }
  // Where the warp's current message goes: rows, and the first word of each one's scales.
  WEFT_DEVICE int32_t* rows() const { return at<int32_t>(shared().row) + warp.index() * top_k(); }
  WEFT_DEVICE uint64_t* scales_at() const { return at<uint64_t>(shared().scales) + warp.index() * top_k(); }
  WEFT_DEVICE Vec16* head() const { return at<Vec16>(shared().head) + warp.index() * message().head_vecs(); }
  WEFT_DEVICE std::byte* heads(uint32_t target) const {
    return at<std::byte>(shared().heads) + target * message().row;
  }
  WEFT_DEVICE std::byte* image() const { return at<std::byte>(shared().image); }
};

}  // namespace low_latency
}  // namespace weft
