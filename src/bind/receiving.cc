// SPDX-License-Identifier: Apache-2.0
#include "bind/receiving.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <tuple>
#include <utility>

#include "bind/bind.h"
#include "bind/leases.h"

namespace nb = nanobind;

namespace weft {
namespace {

uint64_t columns_of(const nb::object& tensor) {
  return nb::cast<uint64_t>(tensor.attr("size")(1));
}

nb::object leased(const HighThroughput& by, uint64_t at, bool is_captured) {
  return is_captured ? nb::none() : Pieces::lease(by.pieces, by.buffer, at);
}

}  // namespace

CallOrder order_of(const Order& order) {
  const auto& [stream, after, waits, joins] = order;
  return {pointer<void>(stream), pointer<void>(after), waits, joins};
}

DispatchTensors SentRows::tensors() const {
  int64_t by_token = 0, by_word = 0;
  if (!scales.is_none()) {
    const nb::object strides = scales.attr("stride")();
    by_token = nb::cast<int64_t>(strides[0]);
    by_word = nb::cast<int64_t>(strides[1]);
  }
  return {pointer<std::byte>(address_of(x)),   pointer<uint32_t>(address_of(scales)),   by_token, by_word,
          pointer<void>(address_of(topk_idx)), pointer<float>(address_of(topk_weights))};
}

ReceivedRows::ReceivedRows(nb::object by, const Received& received, SentRows sent, uint64_t num_rows)
    : by_(std::move(by)), at_(received), sent_(std::move(sent)), num_rows_(num_rows) {
  rows_lease_ = leased(this->by(), at_.rows_at, at_.is_captured);
  meta_lease_ = at_.is_one_piece ? rows_lease_ : leased(this->by(), at_.meta_at, at_.is_captured);
}

nb::object ReceivedRows::rows() {
  return like(rows_, sent_.x, true, 0);
}
nb::object ReceivedRows::scales() {
  return like(scales_, sent_.scales, true, at_.layout.scales);
}
nb::object ReceivedRows::ids() {
  return like(ids_, sent_.topk_idx, false, 0);
}
nb::object ReceivedRows::weights() {
  return like(weights_, sent_.topk_weights, false, at_.layout.weights);
}
nb::object ReceivedRows::token() {
  return column(token_, at_.layout.token);
}
nb::object ReceivedRows::slot() {
  return column(slot_, at_.layout.slot);
}

nb::object ReceivedRows::payload() {
  if (sent_.scales.is_none()) return rows();
  if (sent_.has_global_scale) return by().with_global_scale(rows(), scales());
  return nb::make_tuple(rows(), scales());
}

const nb::object& ReceivedRows::like(Made& cached, const nb::object& sent, bool is_row, uint64_t offset) {
  if (cached.is_valid() || sent.is_none()) return cached.is_valid() ? cached : sent;
  const Shape shape{num_rows_, columns_of(sent), true};
  const nb::object dtype = sent.attr("dtype");
  return cached = made(is_row ? rows_lease_ : meta_lease_, (is_row ? at_.rows_at : at_.meta_at) + offset,
                       shape, dtype, is_row);
}

const nb::object& ReceivedRows::column(Made& cached, uint64_t offset) {
  if (cached.is_valid()) return cached;
  return cached = made(meta_lease_, at_.meta_at + offset, {num_rows_, 1, false}, by().int32, false);
}

nb::object ReceivedRows::made(const nb::object& lease, uint64_t at, const Shape& shape,
                              const nb::object& dtype, bool may_stay) const {
  const uint64_t elements = shape.rows * shape.columns;
  if (elements == 0) return copied(at, 0, shape, dtype);
  PyObject* const exchanged = PyDict_GetItemWithError(by().exchanged.ptr(), dtype.ptr());
  const auto [code, bits] = exchanged ? nb::cast<std::tuple<uint8_t, uint8_t>>(nb::handle(exchanged))
                                      : std::tuple<uint8_t, uint8_t>{};
  const uint64_t bytes = elements * (exchanged ? bits / 8 : nb::cast<uint64_t>(dtype.attr("itemsize")));
  if (is_host() && !(exchanged && may_stay && stays_on_host(bytes))) return copied(at, bytes, shape, dtype);
  if (exchanged) return in_place(lease, at, shape, code, bits);
  const Shape words{(bytes + 3) / 4, 1, false};
  const nb::object sizes =
      shape.is_matrix ? nb::make_tuple(shape.rows, shape.columns) : nb::make_tuple(shape.rows);
  return by().retyped(in_place(lease, at, words, static_cast<uint8_t>(nb::dlpack::dtype_code::Int), 32),
                      sizes, dtype);
}

// Where the window has room for as much again, or for the largest dispatch so far.
bool ReceivedRows::stays_on_host(uint64_t bytes) const {
  const MoeBuffer& core = by().core();
  return bytes >= by().large_bytes && std::max(bytes, core.most_rows_bytes()) <= core.largest_piece();
}

nb::object ReceivedRows::copied(uint64_t at, uint64_t bytes, const Shape& shape,
                                const nb::object& dtype) const {
  const uint64_t sizes[] = {shape.rows, shape.columns};
  nb::object copy = by().tensors().empty(std::span(sizes, shape.axes()), dtype);
  if (bytes > 0) std::memcpy(pointer<void>(address_of(copy)), by().core().window().local() + at, bytes);
  return copy;
}

nb::object ReceivedRows::in_place(const nb::object& lease, uint64_t at, const Shape& shape, uint8_t code,
                                  uint8_t bits) const {
  MoeBuffer& core = by().core();
  const Device device = core.communicator()->device();
  const int kind = device.is_host() ? nb::device::cpu::value : nb::device::cuda::value;
  std::byte* const begin = core.window().local() + at;
  const size_t sizes[] = {shape.rows, shape.columns};
  PieceShare* const share = lease.is_none() ? nullptr : new PieceShare(lease);
  const nb::object owner = share ? nb::cast(share, nb::rv_policy::take_ownership) : by().buffer;
  const nb::ndarray<> array(begin, shape.axes(), sizes, owner, nullptr, {code, bits, 1}, kind,
                            device.ordinal);
  nb::object tensor = by().from_capsule(array);
  if (share)
    share->lies_at(reinterpret_cast<uint64_t>(begin), shape.rows * shape.columns * bits / 8, by().device);
  return tensor;
}

void bind_received(nb::module_& module) {
  nb::class_<HighThroughput>(module, "HighThroughput",
                             "What the high-throughput calls of one device have in common.")
      .def(
          "__init__",
          [](HighThroughput* self, nb::object buffer, nb::object device, nb::object pieces,
             nb::object allocator, nb::object host_allocator, nb::object from_capsule, nb::object retyped,
             nb::dict exchanged, nb::object int32, nb::object int64, nb::object with_global_scale,
             uint64_t large_bytes, int64_t group_key, nb::tuple domains) {
            new (self) HighThroughput{
                buffer,    device, pieces, allocator,         host_allocator, from_capsule, retyped,
                exchanged, int32,  int64,  with_global_scale, large_bytes,    group_key,    domains};
          },
          nb::kw_only(), nb::arg("buffer"), nb::arg("device"), nb::arg("pieces"), nb::arg("allocator"),
          nb::arg("host_allocator"), nb::arg("from_capsule"), nb::arg("retyped"), nb::arg("exchanged"),
          nb::arg("int32"), nb::arg("int64"), nb::arg("with_global_scale"), nb::arg("large_bytes"),
          nb::arg("group_key"), nb::arg("domains"));
  nb::class_<ReceivedRows>(module, "ReceivedRows", "The results of a dispatch.")
      .def("rows", &ReceivedRows::rows)
      .def("scales", &ReceivedRows::scales)
      .def("payload", &ReceivedRows::payload)
      .def("ids", &ReceivedRows::ids)
      .def("weights", &ReceivedRows::weights)
      .def("token", &ReceivedRows::token)
      .def("slot", &ReceivedRows::slot);
}

}  // namespace weft
