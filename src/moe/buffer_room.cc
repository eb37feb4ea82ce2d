// SPDX-License-Identifier: Apache-2.0
//
// Room in the window: how much a call needs, growing the window alike on every rank, and taking pieces of it.
#include <algorithm>
#include <optional>

#include "base/log.h"
#include "moe/buffer.h"
#include "moe/fault_text.h"
#include "moe/room.h"

namespace weft {
namespace {

constexpr uint64_t kGrowthStep = uint64_t{2} << 20;
// A dispatch with a new handle leaves room for this many of its size, itself included: calls with a cached
// handle, as in a backward pass, can't grow the window.
constexpr uint64_t kRoomFor = 3;

uint64_t piece_bytes(const RowFormat& format, uint64_t rows, uint64_t row_bytes) {
  const ReceiveLayout layout =
      receive_layout(rows, row_bytes, format.scale_words, format.top_k, format.id_bytes);
  return heap_bytes_of(layout.rows_bytes) + heap_bytes_of(layout.meta_bytes);
}

// Of a row that a repeat may bring: gradients have the type that combine sums, several times as wide as FP8 or FP4.
// Wider ones are rows of several slots, which combine alone brings.
uint64_t repeat_row_bytes(const RowFormat& format) {
  const bool is_one_row = format.combine_row_bytes <= 4 * format.row_bytes;
  return is_one_row ? std::max(format.row_bytes, format.combine_row_bytes) : format.row_bytes;
}

}  // namespace

uint64_t worst_case_bytes(const RowFormat& format, uint64_t rows, uint64_t staging_rows) {
  const ReceiveLayout layout =
      receive_layout(rows, format.row_bytes, format.scale_words, format.top_k, format.id_bytes);
  const uint64_t staging = staging_bytes_of(staging_rows, format.combine_row_bytes, format.top_k);
  return kRoomFor * (heap_bytes_of(layout.rows_bytes) + heap_bytes_of(layout.meta_bytes)) +
         heap_bytes_of(staging);
}

// Every rank sees everyone's counts and free memory, so all decide alike whether to grow, and by how much. Room stays for
// a repeat of the largest dispatch so far, too: its handle may be used while the results of many later ones are kept.
Status MoeBuffer::make_room(const NotifyCall& call, const RankCounts* counts) {
  const RowFormat& format = call.format;
  uint64_t growth = 0;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const uint64_t staging = staging_bytes_of(counts[rank].sent_rows, format.combine_row_bytes, format.top_k);
    const uint64_t rows = piece_bytes(format, counts[rank].received_rows, format.row_bytes);
    const uint64_t need = rows + (staging > counts[rank].staging_bytes ? heap_bytes_of(staging) : 0);
    uint64_t& most = most_rows_bytes_[static_cast<size_t>(rank)];
    const uint64_t room = std::max(kRoomFor * need, need + most);
    most = std::max(most, piece_bytes(format, counts[rank].received_rows, repeat_row_bytes(format)));
    if (room > counts[rank].free_bytes) growth = std::max(growth, room);
  }
  return growth == 0 ? Status() : grow(window_->bytes() + growth);
}

Status MoeBuffer::make_room_for(const RowFormat& format, uint64_t rows, uint64_t staging_rows) {
  const ReceiveLayout layout =
      receive_layout(rows, format.row_bytes, format.scale_words, format.top_k, format.id_bytes);
  const uint64_t staging = staging_bytes_of(staging_rows, format.combine_row_bytes, format.top_k);
  uint64_t need = rows > 0 ? heap_bytes_of(layout.rows_bytes) + heap_bytes_of(layout.meta_bytes) : 0;
  if (staging > staging_bytes_) need += heap_bytes_of(staging);
  WEFT_TRY_ASSIGN(const auto shown, comm_->show("moe.make_room", {need, heap_.largest()}));
  uint64_t growth = 0;
  for (const std::vector<uint64_t>& of : shown)
    if (of[0] > of[1]) growth = std::max(growth, kRoomFor * of[0]);
  return growth == 0 ? Status() : grow(window_->bytes() + growth);
}

// Without counts, every rank decides by what is the same everywhere: the worst case and the window's size.
// Their hosts meet here, once; a captured call can't, and takes what earlier ones left.
Status MoeBuffer::make_room_for_worst(const NotifyCall& call) {
  const RowFormat& format = call.format;
  const uint64_t need = worst_case_bytes(
      format, call.worst_rows, most_staging_rows(call.worst_rows, call.worst_rows, call.most_tokens));
  if (low_latency_end_ + need <= window_->bytes()) return {};
  WEFT_TRY_ASSIGN(const bool capturing, is_capturing(comm_->device(), call.order.after));
  if (capturing) return {};
  const Status grown = grow(low_latency_end_ + need);
  if (grown.code() == Code::kCapacity)
    return logged(Status::make(Code::kCapacity,
                               "num_worst_tokens: got {} rows of {} bytes, allowed: what fits ({})",
                               call.worst_rows, format.row_bytes, grown.message()));
  if (grown.code() != Code::kInvalid) return grown;
  return logged(
      Status::invalid("num_worst_tokens: got {} rows of {} bytes, allowed: the same on all ranks ({})",
                      call.worst_rows, format.row_bytes, grown.message()));
}

Status MoeBuffer::grow(uint64_t at_least_bytes) {
  const uint64_t bytes = round_up(at_least_bytes, kGrowthStep);
  log_info("rank {}: growing the window from {} to {} bytes", comm_->rank(), window_->bytes(), bytes);
  WEFT_TRY(window_->grow(bytes));
  // Memory of the host is pinned in parts, and CUDA copies nothing that lies in two of them.
  heap_.extend(window_->bytes(), window_->is_pinned());
  return {};
}

Result<uint64_t> MoeBuffer::take(uint64_t bytes, const char* what) {
  if (std::optional<uint64_t> at = heap_.take(std::max<uint64_t>(bytes, 1))) return *at;
  lacking_ = {bytes, heap_.largest()};
  return logged(no_room(static_cast<uint32_t>(comm_->rank()), what, lacking_));
}

Status MoeBuffer::ensure_staging(uint64_t bytes, const char* what) {
  if (bytes <= staging_bytes_) return {};
  if (staging_bytes_ > 0) heap_.give(staging_at_);
  staging_bytes_ = 0;
  WEFT_TRY_ASSIGN(staging_at_, take(bytes, what));
  staging_bytes_ = bytes;
  return {};
}

Status MoeBuffer::take_pieces(const DispatchCall& call, Received& received) {
  const uint64_t rows_bytes = heap_bytes_of(received.layout.rows_bytes);
  if (call.is_one_piece) {
    if (const auto at = heap_.take(rows_bytes + received.layout.meta_bytes)) {
      received.rows_at = *at;
      received.meta_at = *at + rows_bytes;
      received.is_one_piece = true;
      return {};
    }
  }
  WEFT_TRY_ASSIGN(received.rows_at, take(received.layout.rows_bytes, "dispatch"));
  Result<uint64_t> meta_at = take(received.layout.meta_bytes, "dispatch");
  if (!meta_at.ok()) {
    heap_.give(received.rows_at);
    return meta_at.status();
  }
  received.meta_at = *meta_at;
  return {};
}

}  // namespace weft
