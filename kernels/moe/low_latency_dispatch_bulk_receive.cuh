// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_bulk_receive.cuh: receives messages that words announce: a warp follows its batches, notes where each
// message's rows go, and has the row copied there through its pipe.
#pragma once

#include "kernels/moe/low_latency_dispatch_bulk_call.cuh"

namespace weft {
namespace low_latency {

// The messages of a warp's (source, batch) pairs, in order. The warp.
template <class D>
class Messages {
 public:
  WEFT_DEVICE explicit Messages(const D& d)
      : d_(d), share_(warp_share(d.block, d.warp)), job_(share_.index) {}

  // The row of the next message, when it has come and all else of it was unpacked. False: there are no more.
  template <class Pipe>
  WEFT_DEVICE bool find(RowInPieces& row, const Pipe& pipe) {
    while (true) {
      if (unpacked_ < arrived_) {
        row = unpack();
        return true;
      }
      if (!has_batch_) {
        if (!begin_batch()) return false;
      } else if ((word_ & kWordDone) != 0 || !await_more(pipe)) {
        end_batch();
      }
    }
  }

 private:
  WEFT_DEVICE bool begin_batch() {
    if (job_ >= d_.a.source_jobs.value * d_.ranks()) return false;
    source_ = (d_.mesh.rank() + job_ / d_.a.source_jobs) % d_.ranks();
    batch_ = job_ % d_.a.source_jobs;
    job_ += share_.total;
    unpacked_ = arrived_ = 0;
    word_ = d_.present()[source_] == 0 ? kWordDone : 0;
    has_batch_ = true;
    return true;
  }
  WEFT_DEVICE void end_batch() {
    if (d_.warp.rank() == 0)
      d_.a.routes[d_.routes().counts + uint64_t{source_} * d_.batches().count + batch_] =
          static_cast<int32_t>(unpacked_);
    has_batch_ = false;
  }
  template <class Pipe>
  WEFT_DEVICE bool await_more(const Pipe& pipe) {
    const uint64_t want = d_.epoch.number * kWordEpoch + unpacked_ + 1;
    const uint64_t start = cycles();
    uint64_t word = 0;
    if (d_.warp.rank() == 0) {
      if (!await(d_.a.call, d_.mesh, batch_word(d_.of_block(), source_, batch_), want, source_,
                 Site::kLowLatencyDispatchRecv, kWordEpoch, word))
        word = 0;
      if (word != 0 && unpacked_ == 0 && batch_ == 0 && d_.a.wait_cycles)
        add_local(&d_.a.wait_cycles[source_], cycles() - start);
    }
    word_ = d_.warp.broadcast(word);
    if (word_ < want) return false;
    arrived_ = static_cast<uint32_t>(word_ & kMaxBatchTokens);
    pipe.fence_acquired();
    return true;
  }

  WEFT_DEVICE RowInPieces unpack() {
    const Span traced(d_.a.call.wait.trace, Work::kUnpack, d_.warp.rank() == 0, source_);
    const std::byte* message = d_.inbox(source_) + d_.message_at(source_, batch_, unpacked_);
    const auto* vecs = reinterpret_cast<const Vec16*>(message);
    const uint32_t head_vecs = d_.message().head_vecs(), lane = d_.warp.rank();
    const auto row_vecs = static_cast<uint32_t>(d_.shape.row_bytes / sizeof(Vec16));
    const uint32_t scale_vecs = d_.message().body_vecs() - row_vecs;
    const Vec16* scales = vecs + head_vecs + row_vecs;
    // Both at once: memory is far.
    Vec16 held{};
    if (lane < scale_vecs) held = load_vec_fresh(scales + lane);
    for (uint32_t i = lane; i < head_vecs; i += d_.warp.size()) d_.head()[i] = load_vec_fresh(vecs + i);
    d_.warp.sync();
    const uint32_t count = place_message(d_.of_block(), source_);
    WEFT_ROLLED
    for (uint32_t i = lane; i < scale_vecs; i += d_.warp.size()) {
      if (i != lane) held = load_vec_fresh(scales + i);
      store_scales(d_.of_block(), count, row_vecs + i, held);
    }
    const RoutesLayout routes = d_.routes();
    const uint64_t slot =
        (uint64_t{source_} * d_.batches().count + batch_) * d_.batches().capacity + unpacked_;
    note_message(d_.of_block(), source_, d_.a.routes + routes.records + slot * routes.record_words);
    RowInPieces row{message + d_.message().row,
                    row_places(d_.warp, count,
                               [&](uint32_t i) {
                                 return d_.a.out + static_cast<uint64_t>(d_.rows()[i]) * d_.shape.row_bytes;
                               }),
                    count == 0 ? 0 : static_cast<uint32_t>(d_.shape.row_bytes)};
    d_.warp.sync();
    ++unpacked_;
    return row;
  }

  const D& d_;
  WarpShare share_;
  uint32_t job_;
  uint32_t source_ = 0;
  uint32_t batch_ = 0;
  uint32_t unpacked_ = 0;
  uint32_t arrived_ = 0;
  uint64_t word_ = 0;
  bool has_batch_ = false;
};

template <class D, class Pipe>
WEFT_DEVICE void receive_in_bulk(const D& d, Pipe& pipe) {
  Messages<D> messages(d);
  stream_rows(pipe, d.piece_bytes(), [&](RowInPieces& row) { return messages.find(row, pipe); });
  pipe.drain();
}

}  // namespace low_latency
}  // namespace weft
