// SPDX-License-Identifier: Apache-2.0
//
// Where everything of low-latency mode lies, described once for host and device. R ranks, M tokens per rank
// at most, K slots per token, Le experts per rank.
//
// The region is the same range of every rank's window: first LowLatencyControl, whose layout depends on R
// alone, then two halves. Call number n (dispatches and combines counted together) uses half n % 2, laid out
// for its own sizes, so calls of any sizes may follow each other. A half is written again two calls later,
// and only after its owner has said that it has read all of it.
//
// A source's tokens are dealt out to batches, consecutive tokens to one batch. A batch's messages to one peer
// stand in order, and one word in the peer's control area counts them: (epoch, all came, how many). A source
// with few tokens, one to a batch, sends messages as lines (core/line.cuh), without a word; its replies are
// lines too. Lines have the last part of each half, from lines_begin() on, for themselves, whatever the sizes
// of a call: where other reads had left pieces of a line in a cache, a line would not be seen whole.
#pragma once

#include "kernels/core/carver.h"
#include "kernels/core/divisor.h"
#include "kernels/core/line.cuh"

namespace weft {

inline constexpr uint32_t kMaxBatches = 128;  // one token each at 128 tokens: as many blocks as a GPU has SMs
inline constexpr uint32_t kWordsPerSource = 1024;  // batches, or (batch, piece) pairs in combine
inline constexpr uint32_t kMaxExperts = 16384;
inline constexpr uint32_t kMostTopK = 32;
inline constexpr uint32_t kRailTables = 5;  // see low_latency_ports.h
inline constexpr uint32_t kCallSlots = 64;  // calls whose receive phase may be outstanding, far more than two

// Names one call across its two launches, and counts launches. Local, zero before the first launch.
struct LowLatencyState {
  uint64_t started;      // kLaunchShare for each launch with a send phase: see begin_call()
  uint64_t received[2];  // by half: the last call that was received whole
  uint64_t watched;      // launches that the watching block has seen the end of
  uint64_t left;         // kLaunchShare for each launch whose other blocks have all come to their end
  uint64_t raised;       // of the fault box, as the watching block last saw it
  uint64_t call_epoch[kCallSlots];
};
static_assert(sizeof(LowLatencyState) == 48 + 8 * kCallSlots);

// The arguments that a rank sends to every peer at the start of a call; they must agree.
struct LowLatencyHandshake {
  static constexpr uint32_t kWords = 6;
  uint32_t
      words[kWords];  // max tokens, bytes of a row, top-k, experts, bytes of its scales, form of the payload
  uint64_t dispatch_epoch;  // combine: which dispatch it answers
};
static_assert(sizeof(LowLatencyHandshake) == 32);

struct LowLatencyControl {
  uint64_t state;        // LowLatencyState of this rank
  uint64_t masked;       // u32[R] of this rank: 1 for peers to leave out
  uint64_t consumed;     // u64[2][R]          by half, peer: the last call that the peer has read whole
  uint64_t arrived;      // u64[2][R]          by half, source: the last call whose handshake or weights came
  uint64_t counts;       // u64[2][kMaxExperts] by half: [R][Le] by source: count_word() of my experts
  uint64_t handshake;    // LowLatencyHandshake[2][R]
  uint64_t word;         // u64[2][R][kWordsPerSource]
  uint64_t rail_tables;  // RailTables of this rank: see low_latency_ports.h
  uint64_t end;
};
WEFT_DEVICE constexpr LowLatencyControl low_latency_control(uint64_t ranks) {
  Carver carver;
  LowLatencyControl at{};
  at.state = carver.take(sizeof(LowLatencyState));
  at.masked = carver.take(ranks * 4);
  at.consumed = carver.take(2 * ranks * 8);
  at.arrived = carver.take(2 * ranks * 8);
  at.counts = carver.take(uint64_t{2} * kMaxExperts * 8);
  at.handshake = carver.take(2 * ranks * sizeof(LowLatencyHandshake));
  at.word = carver.take(2 * ranks * kWordsPerSource * 8);
  at.rail_tables = carver.take(kRailTables * ranks * 4);
  at.end = carver.take(0);
  return at;
}

// How many of a source's tokens chose an expert, and in which call: a peer that finds the call's number there
// needs no other signal. The words' memory holds nothing else, ever.
WEFT_DEVICE constexpr uint64_t count_word(uint64_t epoch, uint32_t count) {
  return epoch << 32 | count;
}
WEFT_DEVICE constexpr bool is_of_call(uint64_t count_word, uint64_t epoch) {
  return count_word >> 32 == (epoch & 0xffffffffu);
}

// A word's value: it grows within a call and from call to call.
inline constexpr uint64_t kWordEpoch = 1 << 16;
inline constexpr uint64_t kWordDone = 1 << 15;
inline constexpr uint32_t kMaxBatchTokens = kWordDone - 1;

struct Batches {
  uint32_t count;
  uint32_t capacity;  // tokens of one batch at most

  // Tokens of each batch when a source has `tokens`.
  WEFT_DEVICE constexpr uint32_t share(uint32_t tokens) const { return (tokens + count - 1) / count; }
};
WEFT_DEVICE constexpr Batches batches_of(uint32_t max_tokens) {
  const uint32_t capacity = (max_tokens + kMaxBatches - 1) / kMaxBatches;
  return {(max_tokens + capacity - 1) / capacity, capacity};
}

WEFT_DEVICE constexpr uint64_t round_up_16(uint64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

WEFT_DEVICE constexpr uint32_t vecs_in(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + sizeof(Vec16) - 1) / sizeof(Vec16));
}
// The bytes on the link of data that travels as lines.
WEFT_DEVICE constexpr uint64_t line_bytes_of(uint64_t bytes) {
  return uint64_t{lines_of(vecs_in(bytes))} * kLineBytes;
}
WEFT_DEVICE constexpr uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

// A token on its way to one rank, or to a domain: a head and a body. The head has u32 words {token, 1 where the source
// keeps the row (host alone: source_row_at()), reserved x 2, expert [K], place in its segment [K], weight [K] if any},
// the body the row and its scales. The expert is the rank's own number of it, or -1; in a message to a domain the
// number among all experts. As lines, those of the head come first.
inline constexpr uint32_t kHeadKeepsRow = 1;
struct MessageLayout {
  uint64_t expert;  // in words
  uint64_t place;
  uint64_t weight;
  uint64_t row;  // in bytes
  uint64_t scales;
  uint64_t bytes;
  uint64_t stride;  // of slots

  WEFT_DEVICE constexpr uint32_t head_vecs() const { return vecs_in(row); }
  WEFT_DEVICE constexpr uint32_t body_vecs() const { return vecs_in(bytes - row); }
  WEFT_DEVICE constexpr uint64_t line_bytes() const {
    return line_bytes_of(row) + line_bytes_of(bytes - row);
  }
};
WEFT_DEVICE constexpr MessageLayout message_layout(uint64_t top_k, bool has_weights, uint64_t row_bytes,
                                                   uint64_t scale_bytes) {
  MessageLayout at{};
  at.expert = 4;
  at.place = at.expert + top_k;
  at.weight = at.place + top_k;
  at.row = round_up_16((at.weight + (has_weights ? top_k : 0)) * 4);
  at.scales = at.row + row_bytes;
  at.bytes = at.scales + round_up_16(scale_bytes);
  at.stride = (at.bytes + 127) / 128 * 128;
  return at;
}

// The most bytes of a half that lines get: room for one token per batch of every rank, or of 16 ranks, in
// 64 KiB each.
WEFT_DEVICE constexpr uint64_t most_line_bytes(uint64_t ranks) {
  return larger(ranks, 16) * kMaxBatches * 65536;
}
// Where the lines of a half begin. Up to that, words and lines share it evenly.
WEFT_DEVICE constexpr uint64_t lines_begin(uint64_t ranks, uint64_t half_bytes) {
  const uint64_t even = half_bytes / 2 / kLineBytes * kLineBytes;
  const uint64_t most = most_line_bytes(ranks);
  return half_bytes - (even < most ? even : most);
}

// Bytes of a half that a dispatch takes: messages that words follow, [R][batches][capacity] of stride, from its
// start, and those that are lines, [R][batches] of line_bytes(), from lines_begin().
WEFT_DEVICE constexpr uint64_t message_bytes(uint64_t ranks, Batches batches, const MessageLayout& message) {
  return ranks * batches.count * batches.capacity * message.stride;
}
WEFT_DEVICE constexpr uint64_t line_message_bytes(uint64_t ranks, Batches batches,
                                                  const MessageLayout& message) {
  return ranks * batches.count * message.line_bytes();
}

// A combine: the same offsets from the start of a half for words, and from lines_begin() for lines. A reply
// stands at the token's slot: the slot of its expert, or (reduced) the first of its rank's.
struct CombineLayout {
  uint64_t weights;  // [R][M] weights_stride(): by owner, f32[K] of its tokens, as lines where there are any
  uint64_t replies;  // [M][K]; as lines [batches][K], since who has more tokens than batches gets none
  uint64_t word_bytes;
  uint64_t line_bytes;
};
WEFT_DEVICE constexpr uint64_t weights_stride(uint64_t top_k) {
  return line_bytes_of(top_k * 4);
}
WEFT_DEVICE constexpr CombineLayout combine_layout(uint64_t ranks, uint64_t max_tokens, uint64_t top_k,
                                                   uint64_t reply_stride) {
  Carver carver;
  CombineLayout at{};
  at.weights = carver.take(ranks * max_tokens * weights_stride(top_k));
  at.replies = carver.take(max_tokens * top_k * reply_stride);
  at.word_bytes = carver.end();
  at.line_bytes = at.replies + batches_of(static_cast<uint32_t>(max_tokens)).count * top_k * reply_stride;
  return at;
}

// The record of a dispatch for its combine, in 4-byte words: which rows belong to which token, and the choices of this
// rank's own tokens. Offsets in words.
struct RoutesLayout {
  uint64_t epoch;   // u64: the dispatch's call number
  uint64_t lines;   // 1: this rank's tokens travelled as lines
  uint64_t counts;  // i32[R][batches], with kCameAsLines
  // [R][batches][capacity] of record_words: token, row [K] of the output or -1, weight [K] if any.
  uint64_t records;
  uint64_t record_words;
  uint64_t chosen;   // i32[M][K] of this rank's tokens, in the order of topk_idx: the expert or -1
  uint64_t weights;  // f32[M][K], if any
  uint64_t words;
};
inline constexpr uint32_t kCameAsLines = 1 << 16;  // beyond kMaxBatchTokens
WEFT_DEVICE constexpr RoutesLayout routes_layout(uint64_t ranks, Batches batches, uint64_t top_k,
                                                 bool has_weights) {
  RoutesLayout at{};
  at.epoch = 0;
  at.lines = 2;
  at.counts = 4;
  at.records = at.counts + ranks * batches.count;
  at.record_words = 1 + top_k * (has_weights ? 2 : 1);
  const uint64_t tokens = uint64_t{batches.count} * batches.capacity;
  at.chosen = at.records + ranks * tokens * at.record_words;
  at.weights = at.chosen + tokens * top_k;
  at.words = at.weights + (has_weights ? tokens * top_k : 0);
  return at;
}

// ---- shared memory of a block

// First u64 epoch; then u32 present[R]; then what only one phase or one kernel needs.
struct DispatchShared {
  uint64_t present;     // u32[R]   0: nothing goes to that rank
  uint64_t sends_rows;  // u32[R]  0: nothing comes from that rank
  uint64_t found;       // u32      1 once `begin` is there
  uint64_t sent;        // u32[R]   messages of the current batch, by peer
  uint64_t slot;  // u32[4][K]  of the current token: expert, its rank, its number there, place in its segment
  uint64_t targets;  // u32      how many ranks the current token goes to
  uint64_t target;   // u32[K]   which
  uint64_t place;    // std::byte*[K]  where its message goes there
  uint64_t prefix;   // u32[R][Le] this rank's rows before the current token, by expert
  uint64_t begin;    // u32[R][Le] where segments begin, by source and local expert
  uint64_t rows;     // u32[Le] of each expert, where outputs are packed
  uint64_t row;      // i32[warps][K]  the current message's rows, by warp
  uint64_t scales;   // u64[warps][K]  where the scales of each begin
  uint64_t head;     // [warps] the head of the current message, where it came as lines
  uint64_t heads;    // [K] the heads of the current token's messages, where they leave as lines
  uint64_t image;    // the current token's message, where it leaves as lines; its head is not used
  uint64_t bytes;
};
WEFT_DEVICE constexpr DispatchShared dispatch_shared(uint64_t ranks, uint64_t experts_per_rank,
                                                     uint64_t top_k, uint64_t warps,
                                                     const MessageLayout& message, bool has_image,
                                                     bool is_packed) {
  Carver carver(16);
  DispatchShared at{};
  at.present = carver.take(ranks * 4, 16);
  at.sends_rows = carver.take(ranks * 4, 16);
  at.found = carver.take(4, 16);
  at.sent = carver.take(ranks * 4, 16);
  at.slot = carver.take(4 * top_k * 4, 16);
  at.targets = carver.take(4, 16);
  at.target = carver.take(top_k * 4, 16);
  at.place = carver.take(top_k * 8, 16);
  at.prefix = carver.take(ranks * experts_per_rank * 4, 16);
  at.begin = carver.take(ranks * experts_per_rank * 4, 16);
  at.rows = carver.take(is_packed ? experts_per_rank * 4 : 0, 16);
  at.row = carver.take(warps * top_k * 4, 16);
  at.scales = carver.take(warps * top_k * 8, 16);
  at.head = carver.take(warps * message.row, 16);
  at.heads = carver.take(has_image ? top_k * message.row : 0, 16);
  at.image = carver.take(has_image ? message.bytes : 0, 16);
  at.bytes = carver.end();
  return at;
}

struct CombineShared {
  uint64_t unanswered;  // u32    with port peers: 1 if some of the batch that the block answers could not be
  uint64_t present;
  uint64_t row;     // i32[warps][K]  what the warp sums: row numbers, or slots of replies
  uint64_t slot;    // u32[warps][K]  which slots of the token these are
  uint64_t weight;  // f32[warps][K]
  uint64_t rank;    // u32[warps][K]  where the slots of the warp's token went; R for nowhere
  uint64_t owners;  // f32[warps][K, in whole vectors]  the weights that the owner of a message sent
  // u32[gathered words] with replies once for each domain: see low_latency_combine_ports.cuh.
  uint64_t gathered;
  uint64_t bytes;
};
WEFT_DEVICE constexpr CombineShared combine_shared(uint64_t ranks, uint64_t top_k, uint64_t warps,
                                                   uint64_t gathered_words) {
  Carver carver(16);
  CombineShared at{};
  at.unanswered = 8;  // beside the epoch
  at.present = carver.take(ranks * 4, 16);
  at.row = carver.take(warps * top_k * 4, 16);
  at.slot = carver.take(warps * top_k * 4, 16);
  at.weight = carver.take(warps * top_k * 4, 16);
  at.rank = carver.take(warps * top_k * 4, 16);
  at.owners = carver.take(warps * round_up_16(top_k * 4), 16);
  at.gathered = carver.take(gathered_words * 4, 16);
  at.bytes = carver.end();
  return at;
}

// ---- calls whose rows go by bulk copies (low_latency_dispatch_bulk.cuh, low_latency_combine_bulk.cuh): behind what every
// call has, a part for each warp

// A lane has one place of a row, at most.
inline constexpr uint32_t kMostBulkTopK = kMostTopK;
inline constexpr uint32_t kMostBulkPieceBytes = 2560;

// Rows go in pieces as even as they come.
WEFT_DEVICE constexpr uint32_t bulk_piece_bytes(uint64_t row_bytes) {
  const uint64_t pieces = (row_bytes + kMostBulkPieceBytes - 1) / kMostBulkPieceBytes;
  return static_cast<uint32_t>(round_up_16((row_bytes + pieces - 1) / pieces));
}

// Batches of one token that a warp sends before it waits until they have arrived.
inline constexpr uint32_t kBatchesTogether = 4;

// Each warp has its own copy of the DispatchShared fields of a block's token.
struct DispatchBulkShared {
  uint64_t parts;  // [warps] of part_bytes
  uint64_t slot;   // in a part, like what follows
  uint64_t targets;
  uint64_t target;
  uint64_t place;
  uint64_t sent;  // u32[kBatchesTogether][R]
  uint64_t prefix;
  uint64_t part_bytes;
  uint64_t pipes;  // [warps] of pipe_bytes(bulk_piece_bytes())
  uint64_t bytes;
};
WEFT_DEVICE constexpr DispatchBulkShared dispatch_bulk_shared(uint64_t base_bytes, uint64_t ranks,
                                                              uint64_t experts_per_rank, uint64_t top_k,
                                                              uint64_t warps, uint64_t row_bytes) {
  Carver part;
  DispatchBulkShared at{};
  at.slot = part.take(4 * top_k * 4, 16);
  at.targets = part.take(4, 16);
  at.target = part.take(top_k * 4, 16);
  at.place = part.take(top_k * 8, 16);
  at.sent = part.take(kBatchesTogether * ranks * 4, 16);
  at.prefix = part.take(ranks * experts_per_rank * 4, 16);
  at.part_bytes = part.end();
  Carver carver(base_bytes);
  at.parts = carver.take(warps * at.part_bytes);
  at.pipes = carver.take(warps * pipe_bytes(bulk_piece_bytes(row_bytes)));
  at.bytes = carver.end();
  return at;
}

// Pieces of rows that a warp has asked for, and of sums that are on their way.
inline constexpr uint32_t kBulkQueueSlots = 3;

// Two lists of rows for each warp: what it sums, and what comes next.
struct CombineBulkShared {
  uint64_t parts;   // [warps] of part_bytes
  uint64_t row;     // in a part: const std::byte*[2][K]
  uint64_t weight;  // f32[2][K]
  uint64_t part_bytes;
  uint64_t queues;   // [warps] of queue_bytes(kBulkQueueSlots)
  uint64_t writers;  // [warps] of kWriterBytes
  uint64_t bytes;
};
WEFT_DEVICE constexpr CombineBulkShared combine_bulk_shared(uint64_t base_bytes, uint64_t top_k,
                                                            uint64_t warps) {
  Carver part;
  CombineBulkShared at{};
  at.row = part.take(2 * top_k * 8, 16);
  at.weight = part.take(2 * top_k * 4, 16);
  at.part_bytes = part.end();
  Carver carver(base_bytes);
  at.parts = carver.take(warps * at.part_bytes);
  at.queues = carver.take(warps * queue_bytes(kBulkQueueSlots));
  at.writers = carver.take(warps * kWriterBytes);
  at.bytes = carver.end();
  return at;
}

}  // namespace weft
