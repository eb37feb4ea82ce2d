// SPDX-License-Identifier: Apache-2.0
//
// Where things lie in a half of low-latency mode's region when some rank has peers that it does not map. Every rank
// lays out alike, whatever peers it has itself. R ranks, M tokens per rank at most, K slots per token, Le experts
// per rank.
//
// The half's first part is written by peers, the second, from LowLatencyCall::lines_at on, is this rank's outbox, since
// nothing travels as lines then. Data for a port peer is built in the outbox with the layout that it has at the peer,
// and leaves in ranges, one or more for each batch. Batches have more tokens here, so that a range is worth a write.
// Each peer has its own part of the outbox, so unsent data for a masked peer is not overwritten.
//
// Where a token crosses the network once for each domain (two_level_args.h), it goes to the source's rail peer there.
// All ranks of the domain read it in the rail peer's window, which they map. The rail peer forwards nothing, so no
// launch waits for another rank's launch. Every rank acknowledges to the source what it has read. Counts and handshakes
// go to each rank.
//
// Replies to a batch stand next to each other: those of rank 0, of rank 1, ..., each in the order of tokens and slots.
// The owner tells each rank where its own begin.
//
// A sum of a domain's replies to a token crosses once, too, where that is shorter. The owner's rail peer gathers the
// replies: the others store theirs to its outbox, each row at the place of its token, with the slot of the token that
// the row is the first of. The rail peer's answers stand in the same outbox.
#pragma once

#include "kernels/moe/low_latency_args.h"

namespace weft {

inline constexpr uint32_t kPortBatchTokens = 8;

WEFT_DEVICE constexpr Batches port_batches_of(uint32_t max_tokens) {
  const uint32_t most = (max_tokens + kPortBatchTokens - 1) / kPortBatchTokens;
  const uint32_t wanted = most < kMaxBatches ? most : kMaxBatches;
  const uint32_t capacity = (max_tokens + wanted - 1) / wanted;
  return {(max_tokens + capacity - 1) / capacity, capacity};
}

// LowLatencyControl::rail_tables: u32[kRailTables][R].
enum RailTable : uint32_t {
  kRailPeerTo,  // by peer: the rank that gets what this rank has for it, and sends what it has for this rank
  kRailPeerFrom,  // by source: the rank of this domain in whose window its messages stand, and which answers it
  kSourceNumber,  // by source: its number among the sources of its rail peer here; kOwnDomain: it is of this domain
  kPlaceInDomain,  // by rank of this domain
  kRankOfDomain,   // by place
};
inline constexpr uint32_t kOwnDomain = ~uint32_t{0};

// Puts are of whole units of 16 bytes: a source's count words come in pairs.
WEFT_DEVICE constexpr uint32_t port_count_words(uint32_t experts_per_rank) {
  return (experts_per_rank + 1) / 2 * 2;
}

// Offsets from the outbox. A handshake stands first in that of a combine, too.
struct DispatchOutbox {
  uint64_t handshake;  // LowLatencyHandshake[R]
  uint64_t counts;     // [R][port_count_words(Le)]
  uint64_t messages;   // [R][batches][capacity] of the message's stride
  uint64_t bytes;
};
WEFT_DEVICE constexpr DispatchOutbox dispatch_outbox(uint64_t ranks, uint32_t experts_per_rank,
                                                     Batches batches, const MessageLayout& message) {
  Carver carver;
  DispatchOutbox at{};
  at.handshake = carver.take(ranks * sizeof(LowLatencyHandshake));
  at.counts = carver.take(ranks * port_count_words(experts_per_rank) * 8);
  at.messages = carver.take(message_bytes(ranks, batches, message));
  at.bytes = carver.end();
  return at;
}

// The note of an owner to every rank: where the replies of that rank, or its domain, to each batch begin, u32[batches],
// counted in replies; how many tokens each batch has, but for the last; then, with a reduced reply, the weights of its
// tokens, f32[T][K in whole vectors].
struct NoteLayout {
  uint64_t share;  // u32
  uint64_t weights;
  uint64_t weights_stride;
  uint64_t bytes;  // of a note with M tokens
};
WEFT_DEVICE constexpr NoteLayout note_layout(Batches batches, uint64_t max_tokens, uint64_t top_k) {
  NoteLayout at{};
  at.share = uint64_t{batches.count} * 4;
  at.weights = round_up_16(at.share + 4);
  at.weights_stride = round_up_16(top_k * 4);
  at.bytes = at.weights + max_tokens * at.weights_stride;
  return at;
}

struct PortCombineLayout {
  NoteLayout note;
  uint64_t stride;         // of replies
  uint32_t batch_replies;  // to one batch, of all ranks together, at most
  uint32_t batch_answers;  // of one rank to one batch at most
  // From the start of the half:
  uint64_t notes;    // [R] by owner
  uint64_t replies;  // [batches][batch_replies]
  uint64_t inbox_bytes;
  // From the outbox:
  uint64_t handshake;  // LowLatencyHandshake[R]
  uint64_t own_notes;  // [R] by peer
  uint64_t places;     // u32[M][K]: which reply a slot's is; local
  uint64_t answers;    // [R][batches][answer_room()], by owner
};
WEFT_DEVICE constexpr PortCombineLayout port_combine_layout(uint64_t ranks, uint64_t max_tokens,
                                                            uint32_t top_k, Batches batches,
                                                            uint64_t row_bytes, int64_t reply) {
  PortCombineLayout at{};
  const uint32_t per_token = !is_reduced(reply) || top_k < ranks ? top_k : static_cast<uint32_t>(ranks);
  at.note = note_layout(batches, max_tokens, top_k);
  at.stride = is_log(reply) ? reply_stride(row_bytes, reply) : row_bytes;
  at.batch_replies = batches.capacity * per_token;
  at.batch_answers = batches.capacity * (is_reduced(reply) ? 1 : top_k);
  Carver inbox;
  at.notes = inbox.take(ranks * at.note.bytes);
  at.replies = inbox.take(uint64_t{batches.count} * at.batch_replies * at.stride);
  at.inbox_bytes = inbox.end();
  Carver outbox;
  at.handshake = outbox.take(ranks * sizeof(LowLatencyHandshake));
  at.own_notes = outbox.take(ranks * at.note.bytes);
  at.places = outbox.take(max_tokens * top_k * 4);
  at.answers = outbox.take(0);
  return at;
}

// The outbox's layout in place of `answers` where replies cross once for each domain. A domain has `domain_ranks`
// ranks, each of which has `sources` sources at most. From the outbox:
struct DomainCombineLayout {
  uint64_t answers;  // [sources][batches][capacity] of the stride: to this rank's sources
  // [sources][batches][domain_ranks - 1][capacity] of the stride: what the others have for them.
  uint64_t rows;
  uint64_t slots;  // u32, of the same shape: the token's slot that a row is the first of, plus one; 0: no row
  uint64_t bytes;
};
WEFT_DEVICE constexpr DomainCombineLayout domain_combine_layout(const PortCombineLayout& at, Batches batches,
                                                                uint32_t domain_ranks, uint32_t sources) {
  const uint64_t tokens = uint64_t{sources} * batches.count * batches.capacity;
  Carver carver(at.answers);
  DomainCombineLayout domain{};
  domain.answers = carver.take(tokens * at.stride);
  domain.rows = carver.take(tokens * (domain_ranks - 1) * at.stride);
  domain.slots = carver.take(tokens * (domain_ranks - 1) * 4);
  domain.bytes = carver.end();
  return domain;
}
// The index, among a source's words, of the one by which the rank at a place in the domain says that its replies to a
// batch of that source are there.
WEFT_DEVICE constexpr uint32_t domain_word(Batches batches, uint32_t place, uint32_t batch) {
  return batches.count * (1 + place) + batch;
}

// The data that a rank keeps in memory of its device where there is a control page (LowLatencyPage::own), from the
// start of a half. A dispatch: the messages to itself, [batches][capacity] of the message's stride. A combine:
struct OwnCombine {
  uint64_t places;   // u32[M][K], as above
  uint64_t replies;  // [batches][batch_answers] of the stride: to itself
  uint64_t bytes;
};
WEFT_DEVICE constexpr OwnCombine own_combine(const PortCombineLayout& at, uint64_t max_tokens, uint32_t top_k,
                                             Batches batches) {
  Carver carver;
  OwnCombine own{};
  own.places = carver.take(max_tokens * top_k * 4);
  own.replies = carver.take(uint64_t{batches.count} * at.batch_answers * at.stride);
  own.bytes = carver.end();
  return own;
}
WEFT_DEVICE constexpr uint64_t own_dispatch_bytes(Batches batches, const MessageLayout& message) {
  return uint64_t{batches.count} * batches.capacity * message.stride;
}

// The smallest outbox that a combine can work with, in bytes; and the number of answers to one batch of one owner
// that fit an outbox of `bytes`. A rank with more answers waits until the first ones have left.
WEFT_DEVICE constexpr uint64_t least_outbox(const PortCombineLayout& at, uint64_t ranks, Batches batches) {
  return at.answers + ranks * batches.count * at.stride;
}
WEFT_DEVICE constexpr uint32_t answer_room(const PortCombineLayout& at, uint64_t ranks, Batches batches,
                                           uint64_t bytes) {
  if (bytes < at.answers) return 0;
  const uint64_t fit = (bytes - at.answers) / (ranks * batches.count * at.stride);
  return fit < at.batch_answers ? static_cast<uint32_t>(fit) : at.batch_answers;
}

}  // namespace weft
