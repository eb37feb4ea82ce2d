// SPDX-License-Identifier: Apache-2.0
//
// weft._core.ReceivedRows: what a high-throughput dispatch received, as tensors.
#pragma once

#include <nanobind/nanobind.h>

#include <tuple>

#include "bind/tensor_maker.h"
#include "bind/tensors.h"
#include "moe/buffer.h"

namespace weft {

// Of weft.moe.device_context.
using Order = std::tuple<uint64_t, uint64_t, bool, bool>;
CallOrder order_of(const Order& order);

// What the high-throughput calls of one device have in common: weft._core.HighThroughput. It keeps no DeviceContext, which
// keeps this.
struct HighThroughput {
  nanobind::object buffer;          // a MoeBuffer
  nanobind::object device;          // torch's
  nanobind::object pieces;          // a Pieces
  nanobind::object allocator;       // an Allocator of the device
  nanobind::object host_allocator;  // and one of the CPU
  nanobind::object from_capsule;    // a DLPack capsule becomes a tensor
  // (i32[words] in a piece, shape, dtype) -> a tensor there, of a type that DLPack lacks.
  nanobind::object retyped;
  nanobind::object exchanged;          // {dtype: (code, bits) in DLPack}
  nanobind::object int32, int64;       // torch's dtypes
  nanobind::object with_global_scale;  // (rows, scales) of NVFP4 -> what the caller gets
  uint64_t large_bytes;                // on the CPU smaller rows are copied
  int64_t group_key;                   // of handles
  nanobind::object domains;

  MoeBuffer& core() const { return nanobind::cast<MoeBuffer&>(buffer); }
  const Allocator& tensors() const { return nanobind::cast<const Allocator&>(allocator); }
};

// The caller's tensors that a dispatch sends; None where they are left out.
struct SentRows {
  nanobind::object x, scales, topk_idx, topk_weights;
  bool has_global_scale;  // the last scale of a row is the float32 that all of its others are relative to

  DispatchTensors tensors() const;
};

// The results of a dispatch in the pieces that it filled: rows and scales; ids, weights and origins. N rows. On a GPU,
// and on the CPU where they are large, they lie there, each with a storage of its own: resize_(0) gives it back. A result
// is made once, as no two storages may begin at one address.
class ReceivedRows {
 public:
  // by: a HighThroughput.
  ReceivedRows(nanobind::object by, const Received& received, SentRows sent, uint64_t num_rows);

  // Rows [N, hidden].
  nanobind::object rows();
  // Scales [N, n] as they came, or None.
  nanobind::object scales();
  // The caller's result: rows, (rows, scales), or (rows, scales, global scales f32[N, 1]).
  nanobind::object payload();
  // Local expert ids [N, K], -1 for experts elsewhere; or None.
  nanobind::object ids();
  // Weights f32[N, K], 0 for experts elsewhere; or None.
  nanobind::object weights();
  // Each row's token at its source, i32[N].
  nanobind::object token();
  // Each row's place in its owner's staging, i32[N].
  nanobind::object slot();

 private:
  struct Shape {
    uint64_t rows, columns;
    bool is_matrix;
    size_t axes() const { return is_matrix ? 2 : 1; }
  };
  using Made = nanobind::object;

  const HighThroughput& by() const { return nanobind::cast<const HighThroughput&>(by_); }
  bool is_host() const { return by().core().communicator()->device().is_host(); }
  // A result of the shape and type of a tensor that was sent, if it was.
  const Made& like(Made& cached, const nanobind::object& sent, bool is_row, uint64_t offset);
  const Made& column(Made& cached, uint64_t offset);
  Made made(const nanobind::object& lease, uint64_t at, const Shape& shape, const nanobind::object& dtype,
            bool may_stay) const;
  Made copied(uint64_t at, uint64_t bytes, const Shape& shape, const nanobind::object& dtype) const;
  Made in_place(const nanobind::object& lease, uint64_t at, const Shape& shape, uint8_t code,
                uint8_t bits) const;
  bool stays_on_host(uint64_t bytes) const;

  nanobind::object by_;
  Received at_;
  SentRows sent_;
  uint64_t num_rows_;
  nanobind::object rows_lease_, meta_lease_;           // None: of a graph, which writes there at every replay
  Made rows_, scales_, ids_, weights_, token_, slot_;  // where they were asked for
};

void bind_received(nanobind::module_& module);

}  // namespace weft
