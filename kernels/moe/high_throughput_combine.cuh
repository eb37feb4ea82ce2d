// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine.cuh: rows return to their tokens and are summed there.
//
// Steps: 1. All ranks say where their staging is.
//        2. Push warps send rows to their owners, chunk by chunk, a signal each.
//        3. One watch warp per block follows the signals.
//        4. Sum warps add a token's rows as soon as their chunks came.
//
// Waits: step 1 for every peer's address, step 3 for the chunks of every peer, step 4 for step 3 in shared
// memory.
//
// Why a watch warp: when every sum warp polled and acquired its own chunks, combine slowed down severely
// (seen on 4 H200). Why exactly is open: rows that are summed while others arrive still cost more than both
// alone.
//
// Sums: float32, from the bias on, ranks ascending or as sum_place says, one rounding. Rows of this rank
// itself are read in place.
//
// Cost: per (token, other rank): row_bytes + 4 * K bytes over the link, written and read once more at the
// owner.
#pragma once

#include "kernels/core/numbers.cuh"
#include "kernels/moe/ready.cuh"

namespace weft {
namespace combine {

// Rows that a lane loads before it uses any: memory is far. A host core looks ahead by itself, and would
// rather add long pieces of one row.
inline constexpr uint32_t kRowsInFlight = Warp::kMaxSize == 1 ? 1 : 4;
inline constexpr uint32_t kVecsInFlight = kSumVecs;
// It is asked for the next token's rows while it sums one's: by itself it starts anew with every row.
inline constexpr bool kAsksAhead = Warp::kMaxSize == 1;
inline constexpr uint32_t kChunksAtOnce = 8;  // signals of a peer that a look asks for: memory is far
inline constexpr uint32_t kLookEveryNs = 500;
inline constexpr uint32_t kSharedPollNs = 200;

// In shared memory: how far the chunks of each peer have come.
struct Progress {
  uint32_t* failed;
  uint32_t* chunks_here;  // [R] all below may be read
  uint32_t* chunks_seen;  // [R] all below have been signalled; the watch warp's own
};

struct Staging {
  std::byte* rows;
  float* weights;
};

template <class MeshT>
WEFT_DEVICE Staging staging_of(const ReadyExchange& x, const MeshT& mesh, uint64_t epoch, uint32_t owner) {
  const ReadyRecord* theirs = ready_record(x, mesh, epoch, owner);
  std::byte* window = mesh.to(owner).mapped();
  return {window + theirs->rows_at, reinterpret_cast<float*>(window + theirs->meta_at)};
}

// Rows of one owner that share a signal.
struct Chunk {
  uint32_t owner;
  uint32_t number;
  uint64_t first_row;
  uint64_t rows;  // 0: the owner has no such chunk
};

// Task 0 is chunk 0 of the first owner, task 1 chunk 0 of the next one, ...: owners start with this rank's
// successor, so links share the load.
template <class MeshT>
WEFT_DEVICE Chunk chunk_of(const CombineArgs& a, const MeshT& mesh, uint32_t task) {
  const uint32_t peers = mesh.ranks() - 1;
  const uint32_t owner = (mesh.rank() + 1 + task % peers) % mesh.ranks();
  const uint32_t number = task / peers;
  const RowSpan span = row_span(a.prefix, mesh.ranks(), owner, mesh.rank());
  const uint64_t size = chunk_rows(span.count);
  if (number * size >= span.count) return {owner, number, 0, 0};
  const uint64_t left = span.count - number * size;
  return {owner, number, span.first + number * size, left < size ? left : size};
}

template <class MeshT>
WEFT_DEVICE uint64_t most_chunks(const CombineArgs& a, const MeshT& mesh) {
  uint32_t most_rows = 0;
  for (uint32_t owner = 0; owner < mesh.ranks(); ++owner) {
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), owner, mesh.rank()).count;
    most_rows = rows > most_rows ? rows : most_rows;
  }
  return most_rows < kMaxChunks * kMinChunkRows ? (most_rows + kMinChunkRows - 1) / kMinChunkRows
                                                : kMaxChunks;
}

// Tells owners that chunks have come, each a few items later than its last row left: the release finds it
// arrived, and those items travel while it waits.
template <class MeshT>
class ChunkSignals {
 public:
  WEFT_DEVICE ChunkSignals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch)
      : a_(a), warp_(warp), mesh_(mesh), epoch_(epoch) {}

  // After each item that is stored; `ends` with the last one of a chunk.
  template <class Pipe>
  WEFT_DEVICE void stored(Pipe& pipe, bool ends, uint32_t owner, uint32_t chunk) {
    if (is_owed_ && ++items_since_ > kItemsInFlight) {
      pipe.template drain_but<kItemsInFlight>();
      tell();
    }
    if (!ends) return;
    if (is_owed_) finish(pipe);  // chunks of a few rows
    is_owed_ = true;
    items_since_ = 0;
    owner_ = owner;
    chunk_ = chunk;
  }
  template <class Pipe>
  WEFT_DEVICE void finish(Pipe& pipe) {
    if (!is_owed_) return;
    pipe.drain();
    tell();
  }

 private:
  static constexpr uint32_t kItemsInFlight = 6;

  WEFT_DEVICE void tell() {
    is_owed_ = false;
    if (warp_.rank() != 0) return;
    const WindowOffset signal_at = a_.at.chunk_signal + (uint64_t{mesh_.rank()} * kMaxChunks + chunk_) * 8;
    mesh_.to(owner_).put_value(signal_at, epoch_);
  }

  const CombineArgs& a_;
  Warp warp_;
  const MeshT& mesh_;
  uint64_t epoch_;
  bool is_owed_ = false;
  uint32_t items_since_ = 0;
  uint32_t owner_ = 0;
  uint32_t chunk_ = 0;
};

template <class Shape>
WEFT_DEVICE void push_weights(const CombineArgs& a, Warp warp, const Shape& shape, float* staging,
                              const Chunk& chunk) {
  for (uint64_t i = warp.rank(); i < chunk.rows * shape.top_k; i += warp.size()) {
    const uint64_t row = chunk.first_row + i / shape.top_k;
    staging[uint64_t{static_cast<uint32_t>(a.slot[row])} * shape.top_k + i % shape.top_k] =
        a.topk_weights[row * shape.top_k + i % shape.top_k];
  }
}

struct PushTag {
  std::byte* to;
  uint32_t owner;
  uint32_t chunk;
  bool ends_chunk;
};

template <class MeshT, class Shape>
WEFT_DEVICE void push_rows(const CombineArgs& a, const ReadyExchange& x, Block block, Warp warp,
                           const MeshT& mesh, const Shape& shape, uint64_t epoch) {
  const Share share = share_of(block, warp, a.push_warps);
  if (!share.active || mesh.ranks() == 1) return;
  const Span traced(a.wait.trace, Work::kPushBack, warp.rank() == 0);
  std::byte* stages = block.shared() + pipes_at(mesh.ranks()) +
                      (warp.index() - a.push_warps.first) * pipe_bytes(shape.piece_bytes);
  RowPipe<kPipeStages> pipe(warp, stages, shape.piece_bytes);
  const Pieces pieces{static_cast<uint64_t>(shape.row_bytes), static_cast<uint64_t>(shape.piece_bytes)};
  const uint64_t num_tasks = most_chunks(a, mesh) * (mesh.ranks() - 1);
  Tasks tasks(warp, share, a.state);
  ChunkSignals signals(a, warp, mesh, epoch);
  Chunk chunk{};
  Staging staging{};
  uint64_t item = 0;  // of the chunk
  pipe.run(
      [&]() -> RowItem<PushTag> {
        while (item == chunk.rows * pieces.per_row()) {
          const uint64_t task = tasks.take();
          if (task >= num_tasks) return {};
          chunk = chunk_of(a, mesh, static_cast<uint32_t>(task));  // at most kMaxChunks * ranks of them
          staging = staging_of(x, mesh, epoch, chunk.owner);
          if (a.topk_weights) push_weights(a, warp, shape, staging.weights, chunk);
          item = 0;
        }
        const uint64_t row = chunk.first_row + pieces.row(item);
        const uint64_t at = pieces.offset(item);
        const uint64_t slot = static_cast<uint32_t>(a.slot[row]);
        const RowPiece piece{a.x + row * pieces.row_bytes + at, pieces.bytes(item)};
        const bool ends = ++item == chunk.rows * pieces.per_row();
        return {piece, {staging.rows + slot * pieces.row_bytes + at, chunk.owner, chunk.number, ends}};
      },
      [&](const PushTag& tag, RowPiece stage) {
        pipe.store(warp.rank() == 0 ? tag.to : nullptr, stage);
        signals.stored(pipe, tag.ends_chunk, tag.owner, tag.chunk);
      });
  signals.finish(pipe);
}

// The rows of one token: `count` of them, consecutive in staging, but number `mine` (if any) is in this
// rank's x.
struct TokenRows {
  const std::byte* staging;
  const std::byte* own_row;
  uint64_t staging_row;
  uint64_t x_row;
  uint32_t count;
  uint32_t mine;
  uint32_t tokens_ahead;  // to the next token of this warp

  WEFT_DEVICE const std::byte* row(uint32_t i, uint64_t row_bytes) const {
    return i == mine ? own_row : staging + i * row_bytes;
  }
  // How far behind row i a row of the next token probably is: tokens lie in order, about as many rows each.
  WEFT_DEVICE uint64_t ahead(uint32_t i, uint64_t row_bytes) const {
    return uint64_t{tokens_ahead} * (i == mine ? 1 : count) * row_bytes;
  }
};

template <class MeshT>
WEFT_DEVICE const uint64_t* chunk_signal(const CombineArgs& a, const MeshT& mesh, uint32_t peer,
                                         uint32_t chunk) {
  return reinterpret_cast<const uint64_t*>(mesh.local() + a.at.chunk_signal) + uint64_t{peer} * kMaxChunks +
         chunk;
}

// How many of a peer's chunks from `first` on have come, one after the other: kChunksAtOnce at most. What
// they brought is visible afterwards. One thread.
WEFT_DEVICE uint32_t chunks_come(const uint64_t* signals, uint64_t epoch, uint32_t first, uint32_t chunks) {
  uint64_t seen[kChunksAtOnce];
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i) seen[i] = first + i < chunks ? peek(signals + first + i) : 0;
  bool has_come[kChunksAtOnce];
  uint32_t count = 0;
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i) {
    has_come[i] = seen[i] >= epoch && count == i;
    count += has_come[i];
  }
  // Not a fence, which would also wait for all that the SM is sending.
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i)
    if (has_come[i]) load_acquire(signals + first + i);
  return count;
}

// What one look at the signals of a lane's peers found.
struct Look {
  bool has_moved;
  bool is_missing;
  uint32_t missing_peer;
};

// Follows the signals of the peers that fall to this lane.
template <class MeshT>
WEFT_DEVICE Look look_at_signals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                 uint32_t* chunks_seen) {
  Look look{};
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    if (peer == mesh.rank()) continue;
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count;
    const uint32_t chunks = (rows + chunk_rows(rows) - 1) / chunk_rows(rows);
    const uint32_t came = chunks_come(chunk_signal(a, mesh, peer, 0), epoch, chunks_seen[peer], chunks);
    chunks_seen[peer] += came;
    look.has_moved = look.has_moved || came != 0;
    if (chunks_seen[peer] == chunks) continue;
    look.is_missing = true;
    look.missing_peer = peer;
  }
  return look;
}

// The watch warp: until every chunk is here, or none has come for too long.
template <class MeshT>
WEFT_DEVICE void watch_chunks(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                              const Progress& progress) {
  if (a.watch_warps.count == 0 || warp.index() != a.watch_warps.first) return;
  Patience patience{a.wait};
  for (uint32_t looks = 0;; ++looks) {
    const Look look = look_at_signals(a, warp, mesh, epoch, progress.chunks_seen);
    if (warp.any(look.has_moved)) {
      for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size())
        store_release_block(&progress.chunks_here[peer], progress.chunks_seen[peer]);
      patience.since_ns = 0;
    }
    if (!warp.any(look.is_missing)) return;
    pause_ns(kLookEveryNs);
    if (!warp.any(patience.ends(looks))) continue;
    if (look.is_missing)
      raise(a.wait.fault, Site::kCombineRecv, a.wait.self, look.missing_peer, epoch, epoch - 1,
            patience.waited_ns);
    if (warp.rank() == 0) store_release_block(progress.failed, 1);
    return;
  }
}

template <class MeshT>
WEFT_DEVICE bool wait_for_signals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                  const int32_t* send_row) {
  return wait_peers(
      warp, mesh.ranks(), epoch, Site::kCombineRecv, a.wait,
      [&](uint32_t peer) {
        const uint32_t size = chunk_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
        return chunk_signal(a, mesh, peer, static_cast<uint32_t>(send_row[peer]) / size);
      },
      [&](uint32_t peer) { return peer != mesh.rank() && send_row[peer] >= 0; },
      [&](uint32_t peer, uint64_t seen, uint64_t waited_ns) {
        raise(a.wait.fault, Site::kCombineRecv, a.wait.self, peer, epoch, seen, waited_ns);
      });
}

template <class MeshT>
WEFT_DEVICE bool wait_for_token(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                const Progress& progress, uint64_t token) {
  const int32_t* send_row = a.send_row + token * mesh.ranks();
  if (a.watch_warps.count == 0) return wait_for_signals(a, warp, mesh, epoch, send_row);
  bool failed = false;
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    if (peer == mesh.rank() || send_row[peer] < 0) continue;
    const Span traced(a.wait.trace, Site::kCombineRecv, peer);
    const uint32_t size = chunk_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
    const uint32_t chunk = static_cast<uint32_t>(send_row[peer]) / size;
    while (!failed &&
           load_acquire_block(&progress.chunks_here[peer]) <= chunk) {  // bounded by the watch warp
      pause_ns(kSharedPollNs);
      failed = load_acquire_block(progress.failed) != 0;
    }
  }
  return !warp.any(failed);
}

template <class MeshT, class Shape>
WEFT_DEVICE TokenRows rows_of_token(const CombineArgs& a, Warp warp, const MeshT& mesh, const Shape& shape,
                                    const Staging& staging, uint64_t token, uint32_t tokens_ahead) {
  const int32_t* send_row = a.send_row + token * mesh.ranks();
  uint32_t count = 0;
  uint32_t before_mine = 0;
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    const uint32_t goes = send_row[peer] >= 0;
    count += goes;
    before_mine += peer < mesh.rank() ? goes : 0;
  }
  TokenRows rows{};
  rows.tokens_ahead = tokens_ahead;
  rows.count = warp.sum(count);
  rows.mine = warp.sum(before_mine);
  if (a.sum_place) rows.mine = static_cast<uint32_t>(a.sum_place[token * mesh.ranks() + mesh.rank()]);
  rows.staging_row = static_cast<uint32_t>(a.slot_base[token]);
  rows.staging = staging.rows + rows.staging_row * shape.row_bytes;
  if (send_row[mesh.rank()] < 0) {
    rows.mine = rows.count;
    return rows;
  }
  rows.x_row = row_span(a.prefix, mesh.ranks(), mesh.rank(), mesh.rank()).first +
               static_cast<uint32_t>(send_row[mesh.rank()]);
  rows.own_row = a.x + rows.x_row * shape.row_bytes;
  return rows;
}

template <uint32_t kBytes>
WEFT_DEVICE void prefetch_piece(const std::byte* piece) {
  constexpr uint32_t kLineBytes = 64;
  WEFT_UNROLL
  for (uint32_t at = 0; at < kBytes; at += kLineBytes) prefetch(piece + at);
}

// The sum of a token's rows at vectors v, v + stride, ...; kVecs of them at once keep enough loads in flight.
template <class Element, uint32_t kVecs, class Shape>
WEFT_DEVICE void sum_vectors(const CombineArgs& a, const Shape& shape, const TokenRows& rows, uint64_t token,
                             uint64_t v, uint64_t stride) {
  float sums[kVecs][Element::kPerVec] = {};
  const uint64_t row_bytes = shape.row_bytes;
  auto vec = [&](const std::byte* row, uint32_t j) {
    return reinterpret_cast<const Vec16*>(row) + v + j * stride;
  };
  for (const std::byte* bias : a.bias) {
    if (!bias) continue;
    WEFT_UNROLL
    for (uint32_t j = 0; j < kVecs; ++j) Element::add(sums[j], load_vec(vec(bias + token * row_bytes, j)));
  }
  for (uint32_t first = 0; first < rows.count; first += kRowsInFlight) {
    Vec16 held[kRowsInFlight][kVecs] = {};
    WEFT_UNROLL
    for (uint32_t i = 0; i < kRowsInFlight; ++i) {
      if (first + i >= rows.count) continue;
      const std::byte* row = rows.row(first + i, row_bytes);
      if constexpr (kAsksAhead) prefetch_piece<kVecs * 16>(row + v * 16 + rows.ahead(first + i, row_bytes));
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j) held[i][j] = load_vec_streaming(vec(row, j));
    }
    WEFT_UNROLL
    for (uint32_t i = 0; i < kRowsInFlight; ++i) {
      if (first + i >= rows.count) continue;
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j) Element::add(sums[j], held[i][j]);
    }
  }
  auto* out = reinterpret_cast<Vec16*>(a.combined + token * row_bytes) + v;
  WEFT_UNROLL
  for (uint32_t j = 0; j < kVecs; ++j) store_vec_streaming(out + j * stride, Element::round(sums[j]));
}

template <class Element, class Shape>
WEFT_DEVICE void sum_rows(const CombineArgs& a, Warp warp, const Shape& shape, const TokenRows& rows,
                          uint64_t token) {
  const uint64_t vectors = shape.row_bytes / 16;
  const uint64_t stride = warp.size();
  uint64_t v = warp.rank();
  for (; v + (kVecsInFlight - 1) * stride < vectors; v += kVecsInFlight * stride)
    sum_vectors<Element, kVecsInFlight>(a, shape, rows, token, v, stride);
  for (; v < vectors; v += stride) sum_vectors<Element, 1>(a, shape, rows, token, v, stride);
}

template <class Shape>
WEFT_DEVICE void sum_weights(const CombineArgs& a, Warp warp, const Shape& shape, const Staging& staging,
                             const TokenRows& rows, uint64_t token) {
  for (uint32_t k = warp.rank(); k < shape.top_k; k += warp.size()) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < rows.count; ++i)
      sum += i == rows.mine ? a.topk_weights[rows.x_row * shape.top_k + k]
                            : staging.weights[(rows.staging_row + i) * shape.top_k + k];
    a.combined_weights[token * shape.top_k + k] = sum;
  }
}

template <class MeshT, class Shape>
WEFT_DEVICE void sum_tokens(const CombineArgs& a, const ReadyExchange& x, Block block, Warp warp,
                            const MeshT& mesh, const Shape& shape, uint64_t epoch, const Progress& progress) {
  const Share share = share_of(block, warp, a.sum_warps);
  if (!share.active) return;
  const Staging staging = staging_of(x, mesh, epoch, mesh.rank());
  for (uint64_t token = share.index; token < a.tokens; token += share.total) {
    if (!wait_for_token(a, warp, mesh, epoch, progress, token)) return;
    const Span traced(a.wait.trace, Work::kSum, warp.rank() == 0);
    const TokenRows rows = rows_of_token(a, warp, mesh, shape, staging, token, share.total);
    if (shape.element == kElementFp32)
      sum_rows<Fp32>(a, warp, shape, rows, token);
    else
      sum_rows<Bf16>(a, warp, shape, rows, token);
    if (a.topk_weights) sum_weights(a, warp, shape, staging, rows, token);
  }
}

}  // namespace combine

template <class MeshT, class Shape>
WEFT_KERNEL void combine_rows(const CombineArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  const Span traced(a.wait.trace, Work::kCombine, block.rank() == 0);
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  auto* counters =
      reinterpret_cast<uint32_t*>(block.shared() + 128);  // where dispatch_rows has its PeerPlaces
  const combine::Progress progress{&flags[2], counters, counters + mesh.ranks()};
  for (uint32_t i = block.rank(); i < 2 * mesh.ranks(); i += block.size()) counters[i] = 0;
  if (block.rank() == 0) *progress.failed = 0;

  const uint64_t epoch = a.state->epoch + 1;
  const ReadyExchange ready{a.at.combine_signal, a.at.combine_record, Site::kCombineReady,
                            Site::kCombineHandle};
  if (!exchange_ready(ready, block, warp, mesh, a.mine, epoch, a.wait, &flags[0]))
    return finish_launch(block, a.state, &flags[1]);  // where ranks disagree all know it, and stay in step
  combine::push_rows(a, ready, block, warp, mesh, shape, epoch);
  combine::watch_chunks(a, warp, mesh, epoch, progress);
  combine::sum_tokens(a, ready, block, warp, mesh, shape, epoch, progress);
  finish_launch(block, a.state, &flags[1]);
}

}  // namespace weft
