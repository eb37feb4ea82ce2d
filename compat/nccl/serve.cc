// SPDX-License-Identifier: Apache-2.0
//
// How a communicator carries out operations. Collectives are exchanges or programs, as the book says; sends
// and receives of a group become rounds of one exchange program, the k-th message between two ranks in the
// k-th round.
#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl/comm.h"
#include "compat/nccl/real.h"
#include "kernels/collective/element.cuh"

using weft::BookCollective;
using weft::Code;
using weft::Element;
using weft::Reduction;
using weft::Result;
using weft::Status;
using weft::nccl::Function;
using weft::nccl::Operation;
using weft::nccl::PreMulSum;

namespace weft::nccl {
namespace {

Reduction reduction_of(ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return Reduction::kProduct;
    case ncclMax:
      return Reduction::kMax;
    case ncclMin:
      return Reduction::kMin;
    case ncclAvg:
      return Reduction::kAverage;
    default:
      return Reduction::kSum;
  }
}

bool is_float(ncclDataType_t type) {
  return type >= ncclFloat16;
}

bool reduces(Function function) {
  return function == Function::kAllReduce || function == Function::kReduceScatter ||
         function == Function::kReduce;
}

bool is_transfer(Function function) {
  return function == Function::kSend || function == Function::kRecv;
}

// What has the same kernel, and needs memory by its size.
std::array<int, 4> kind_of(const Operation& o) {
  return {static_cast<int>(o.function), static_cast<int>(o.type), static_cast<int>(o.op), o.peer};
}

// Served as sends and receives.
bool is_of_messages(Function function) {
  return function == Function::kGather || function == Function::kScatter || function == Function::kAllToAllv;
}

// The kernel, and the row of the book, for a function that the exchange kernel can serve.
struct ExchangeOf {
  Exchange kind;
  BookCollective collective;
};
std::optional<ExchangeOf> exchange_of(Function function) {
  switch (function) {
    case Function::kAllReduce:
      return ExchangeOf{Exchange::kAllReduce, BookCollective::kAllReduce};
    case Function::kAllGather:
      return ExchangeOf{Exchange::kAllGather, BookCollective::kAllGather};
    case Function::kReduceScatter:
      return ExchangeOf{Exchange::kReduceScatter, BookCollective::kReduceScatter};
    case Function::kAllToAll:
      return ExchangeOf{Exchange::kAllToAll, BookCollective::kAllToAll};
    default:
      return {};
  }
}

template <class T>
T bits_as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class Format>
void multiply_format(std::byte* data, uint64_t elems, double factor) {
  using Stored = typename Format::Stored;
  for (uint64_t i = 0; i < elems; ++i) {
    Stored stored;
    std::memcpy(&stored, data + i * sizeof stored, sizeof stored);
    stored = element::multiplied<Format>(stored, factor);
    std::memcpy(data + i * sizeof stored, &stored, sizeof stored);
  }
}

void multiply_floats(ncclDataType_t type, std::byte* data, uint64_t elems, double factor) {
  switch (type) {
    case ncclFloat16:
      return multiply_format<element::Half>(data, elems, factor);
    case ncclBfloat16:
      return multiply_format<element::Brain>(data, elems, factor);
    case ncclFloat8e4m3:
      return multiply_format<element::E4m3>(data, elems, factor);
    case ncclFloat8e5m2:
      return multiply_format<element::E5m2>(data, elems, factor);
    case ncclFloat64:
      return multiply_format<element::Plain<double>>(data, elems, factor);
    default:
      return multiply_format<element::Plain<float>>(data, elems, factor);
  }
}

double float_value(ncclDataType_t type, uint64_t bits) {
  switch (type) {
    case ncclFloat16:
      return element::Half::load(bits_as<uint16_t>(bits));
    case ncclBfloat16:
      return element::Brain::load(bits_as<uint16_t>(bits));
    case ncclFloat8e4m3:
      return element::E4m3::load(bits_as<uint8_t>(bits));
    case ncclFloat8e5m2:
      return element::E5m2::load(bits_as<uint8_t>(bits));
    case ncclFloat64:
      return bits_as<double>(bits);
    default:
      return bits_as<float>(bits);
  }
}

// Integers wrap.
template <class T>
void multiply(std::byte* data, uint64_t elems, uint64_t bits) {
  const auto factor = static_cast<uint64_t>(bits_as<T>(bits));
  for (uint64_t i = 0; i < elems; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    value = static_cast<T>(static_cast<uint64_t>(value) * factor);
    std::memcpy(data + i * sizeof(T), &value, sizeof(T));
  }
}

void multiply_integers(ncclDataType_t type, std::byte* data, uint64_t elems, uint64_t bits) {
  switch (bytes_of(type)) {
    case 1:
      return multiply<uint8_t>(data, elems, bits);
    case 4:
      return multiply<uint32_t>(data, elems, bits);
    default:
      return multiply<uint64_t>(data, elems, bits);
  }
}

// Offsets and lengths, in bytes from `base`, of what goes to or comes from each rank.
struct Table {
  std::byte* base = nullptr;
  std::vector<weft::ChunkSpan> entries;
};
Table table_of(const std::vector<const Operation*>& operations, int ranks) {
  Table table;
  const auto address = [](const Operation& o) {
    return o.function == Function::kSend ? const_cast<std::byte*>(o.src) : o.dst;
  };
  for (const Operation* o : operations)
    if (o && (!table.base || address(*o) < table.base)) table.base = address(*o);
  table.entries.resize(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const Operation* o = operations[rank];
    if (!o) continue;
    table.entries[rank] = {static_cast<uint64_t>(address(*o) - table.base), o->count * bytes_of(o->type),
                           static_cast<uint32_t>(element_of(o->type)), 0};
  }
  return table;
}

}  // namespace
}  // namespace weft::nccl

Status ncclComm::run(const std::vector<Operation>& operations) {
  std::lock_guard lock(mutex_);
  if (is_stopped_) return Status(Code::kClosed, "the communicator was aborted");
  std::vector<Operation> transfers, forwarded;
  for (const Operation& operation : operations) {
    if (operation.count == 0 && operation.function != Function::kAllToAllv) continue;
    if (!serves(operation)) {
      forwarded.push_back(operation);
      continue;
    }
    WEFT_TRY(forward(forwarded));
    forwarded.clear();
    weft::nccl::count_served(operation.function);
    size_t& most = served_[weft::nccl::kind_of(operation)];
    most = std::max(most, operation.count);
    if (weft::nccl::is_transfer(operation.function))
      transfers.push_back(operation);
    else
      WEFT_TRY(size_ == 1 ? serve_alone(operation) : serve(operation));
  }
  WEFT_TRY(forward(forwarded));
  return exchange(transfers);
}

bool ncclComm::starts_at_once(const std::vector<Operation>& operations) {
  std::lock_guard lock(mutex_);
  if (!is_weft_ || device_.is_host() || weft::config().check) return false;
  // The second launch may have to wait for room in a table that the first one reads.
  std::set<std::pair<Function, int>> messages;
  for (const Operation& o : operations) {
    const bool is_alone = operations.size() == 1 && !weft::nccl::is_of_messages(o.function);
    const bool is_first = weft::nccl::is_transfer(o.function) && messages.insert({o.function, o.peer}).second;
    const auto known = served_.find(weft::nccl::kind_of(o));
    const bool is_known = known != served_.end() && o.count <= known->second;
    if (!is_known || !(is_alone || is_first) || !serves(o)) return false;
  }
  return true;
}

// By what all ranks know alike: the option, the operation, the group of operators, whether a graph is
// captured.
bool ncclComm::serves(const Operation& operation) {
  if (!is_weft_) return false;
  if (!real_) return true;  // nobody else would
  if (is_forwarded_[static_cast<size_t>(operation.function)]) return false;
  if (weft::nccl::reduces(operation.function) && operation.op >= ncclNumOps) {
    const PreMulSum* op = find_op(operation.op);
    return op && !op->pointer && weft::nccl::is_float(op->type);
  }
  // Tables of sizes are host memory at the time of the call, which a replayed graph would not see.
  const bool has_tables =
      weft::nccl::is_transfer(operation.function) || weft::nccl::is_of_messages(operation.function);
  if (has_tables && is_capturing(operation.stream)) return false;
  const bool has_root = operation.function == Function::kBroadcast || operation.function == Function::kReduce;
  return !(has_root && operation.peer != 0 && is_capturing(operation.stream));
}

Status ncclComm::serve(const Operation& o) {
  const uint64_t bytes = o.count * weft::nccl::bytes_of(o.type);
  const auto ranks = static_cast<uint64_t>(size_);
  WEFT_TRY(enter_stream(o.stream));
  if (const weft::BookChoice* choice = exchange_for(o)) {
    WEFT_TRY(run_exchange(o, *choice));
    return leave_stream(o.stream);
  }
  switch (o.function) {
    case Function::kAllReduce: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count));
      WEFT_TRY(copy(o.dst, src, bytes, o.stream));
      WEFT_TRY(run_program(o, BookCollective::kAllReduce, o.dst, o.dst, o.count, 0));
      break;
    }
    case Function::kReduceScatter: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count * ranks));
      WEFT_TRY(run_program(o, BookCollective::kReduceScatter, src, o.dst, o.count * ranks, 0));
      break;
    }
    case Function::kReduce: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count));
      // Other ranks' buffers stay as they are: what they add up lies in slots and scratch.
      auto* data = const_cast<std::byte*>(src);
      if (rank_ == o.peer) {
        data = o.dst;
        WEFT_TRY(copy(data, src, bytes, o.stream));
      }
      WEFT_TRY(run_program(o, BookCollective::kReduce, data, data, o.count, o.peer));
      break;
    }
    case Function::kAllGather: {
      std::byte* own = o.dst + static_cast<uint64_t>(rank_) * bytes;
      WEFT_TRY(copy(own, o.src, bytes, o.stream));
      WEFT_TRY(run_program(o, BookCollective::kAllGather, own, o.dst, o.count * ranks, 0));
      break;
    }
    case Function::kAllToAll:
      WEFT_TRY(run_program(o, BookCollective::kAllToAll, o.src, o.dst, o.count * ranks, 0));
      break;
    case Function::kBroadcast:
      if (rank_ == o.peer) WEFT_TRY(copy(o.dst, o.src, bytes, o.stream));
      WEFT_TRY(run_program(o, BookCollective::kBroadcast, o.dst, o.dst, o.count, o.peer));
      break;
    default:
      WEFT_TRY(exchange(as_transfers(o)));
  }
  return leave_stream(o.stream);
}

// What the book says of a collective that one kernel does as a whole; null: a program serves it.
const weft::BookChoice* ncclComm::exchange_for(const Operation& o) const {
  const auto kind = weft::nccl::exchange_of(o.function);
  if (!kind) return nullptr;
  const uint64_t parts = kind->kind == weft::Exchange::kAllReduce ? 1 : static_cast<uint64_t>(size_);
  const weft::BookChoice* choice =
      book_->choose(kind->collective, o.count * parts * weft::nccl::bytes_of(o.type));
  return choice && choice->mode != weft::BookMode::kProgram ? choice : nullptr;
}

// In place and out of place alike.
Status ncclComm::run_exchange(const Operation& o, const weft::BookChoice& choice) {
  const weft::Exchange kind = weft::nccl::exchange_of(o.function)->kind;
  const uint64_t parts = kind == weft::Exchange::kReduceScatter ? static_cast<uint64_t>(size_) : 1;
  WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count * parts));
  const bool is_in_place = choice.mode == weft::BookMode::kPlaces;
  return collectives_->exchange(
      {kind, weft::nccl::element_of(o.type), weft::nccl::reduction_of(o.op), const_cast<std::byte*>(src),
       o.dst, o.count, choice.mode == weft::BookMode::kLinesAtOnce,
       is_in_place ? weft::ExchangeWay::kPlaces : weft::ExchangeWay::kLines, choice.num_sms, o.stream});
}

// One rank: every collective is a copy.
Status ncclComm::serve_alone(const Operation& o) {
  if (o.function == Function::kAllToAllv) {
    const uint64_t bytes = weft::nccl::bytes_of(o.type);
    return copy(o.dst + o.dst_places[0] * bytes, o.src + o.src_places[0] * bytes, o.src_counts[0] * bytes,
                o.stream);
  }
  WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count));
  return copy(o.dst, src, o.count * weft::nccl::bytes_of(o.type), o.stream);
}

// The input; multiplied by the operator's scalar, and elsewhere, if it has one.
Result<const std::byte*> ncclComm::premultiplied(const Operation& o, uint64_t elems) {
  if (!weft::nccl::reduces(o.function) || o.op < ncclNumOps) return o.src;
  const PreMulSum* op = find_op(o.op);
  uint64_t factor = op->bits;
  if (op->pointer && !device_.is_host())
    return Status(Code::kUnsupported, "PreMulSum with a scalar in device memory needs the real NCCL");
  if (op->pointer) std::memcpy(&factor, op->pointer, weft::nccl::bytes_of(o.type));
  const uint64_t bytes = elems * weft::nccl::bytes_of(o.type);
  WEFT_TRY_ASSIGN(std::byte * data, staging(bytes));
  WEFT_TRY(copy(data, o.src, bytes, o.stream));
  if (!weft::nccl::is_float(o.type)) {
    if (!device_.is_host()) return Status(Code::kUnsupported, "PreMulSum of integers needs the real NCCL");
    weft::nccl::multiply_integers(o.type, data, elems, factor);
    return data;
  }
  const double scalar = weft::nccl::float_value(o.type, factor);
  if (device_.is_host()) {
    weft::nccl::multiply_floats(o.type, data, elems, scalar);
    return data;
  }
  if (size_ == 1) return Status(Code::kUnsupported, "PreMulSum on one rank needs the real NCCL");
  WEFT_TRY(collectives_->scale(weft::nccl::element_of(o.type), data, elems, scalar, o.stream));
  return data;
}

Status ncclComm::run_program(const Operation& o, BookCollective collective, const std::byte* input,
                             std::byte* output, uint64_t total_elems, int root) {
  const weft::BookChoice* choice = book_->choose(collective, total_elems * weft::nccl::bytes_of(o.type));
  if (!choice)
    return Status::make(Code::kUnsupported, "program book: nothing for {}",
                        weft::nccl::kFunctionNames[static_cast<int>(o.function)]);
  const weft::BookProgram& program = book_->program(choice->program);
  WEFT_TRY_ASSIGN(const uint32_t number, load(*collectives_, collective, choice->program, root));
  return collectives_->run({number,
                            weft::nccl::element_of(o.type),
                            weft::nccl::reduction_of(o.op),
                            program.protocol,
                            const_cast<std::byte*>(input),
                            output,
                            o.count,
                            program.per_part,
                            false,
                            {},
                            {},
                            choice->slice_bytes,
                            choice->num_sms,
                            o.stream});
}

// Gather, Scatter and AllToAllv as this rank's sends and receives.
std::vector<Operation> ncclComm::as_transfers(const Operation& o) const {
  std::vector<Operation> transfers;
  const uint64_t bytes = weft::nccl::bytes_of(o.type);
  const auto add = [&](Function function, int peer, uint64_t place, size_t count) {
    Operation part{function, o.comm,   nullptr, nullptr, count, o.type, ncclSum,
                   peer,     o.stream, {},      {},      {},    {}};
    if (function == Function::kSend)
      part.src = o.src + place * bytes;
    else
      part.dst = o.dst + place * bytes;
    if (count) transfers.push_back(part);
  };
  const bool is_root = rank_ == o.peer;
  if (o.function == Function::kGather) add(Function::kSend, o.peer, 0, o.count);
  if (o.function == Function::kScatter) add(Function::kRecv, o.peer, 0, o.count);
  for (int peer = 0; peer < size_; ++peer) {
    if (o.function == Function::kGather && is_root) add(Function::kRecv, peer, peer * o.count, o.count);
    if (o.function == Function::kScatter && is_root) add(Function::kSend, peer, peer * o.count, o.count);
    if (o.function != Function::kAllToAllv) continue;
    add(Function::kSend, peer, o.src_places[peer], o.src_counts[peer]);
    add(Function::kRecv, peer, o.dst_places[peer], o.dst_counts[peer]);
  }
  return transfers;
}

// Rounds keep the messages between two ranks in order, whatever else is in the group on either side.
Status ncclComm::exchange(const std::vector<Operation>& operations) {
  if (operations.empty()) return {};
  std::vector<std::vector<const Operation*>> sends(size_), recvs(size_);
  for (const Operation& o : operations) (o.function == Function::kSend ? sends : recvs)[o.peer].push_back(&o);
  if (sends[rank_].size() != recvs[rank_].size())
    return Status::invalid("sends and receives to rank {} itself: got {} and {}, allowed: equally many",
                           rank_, sends[rank_].size(), recvs[rank_].size());
  for (size_t i = 0; i < sends[rank_].size(); ++i)
    WEFT_TRY(copy(recvs[rank_][i]->dst, sends[rank_][i]->src,
                  sends[rank_][i]->count * weft::nccl::bytes_of(sends[rank_][i]->type),
                  operations[0].stream));
  sends[rank_].clear();
  recvs[rank_].clear();
  WEFT_TRY(enter_stream(operations[0].stream));
  for (size_t round = 0;; ++round) {
    std::vector<const Operation*> out(size_), in(size_);
    bool is_empty = true;
    for (int peer = 0; peer < size_; ++peer) {
      if (round < sends[peer].size()) out[peer] = sends[peer][round];
      if (round < recvs[peer].size()) in[peer] = recvs[peer][round];
      is_empty = is_empty && !out[peer] && !in[peer];
    }
    if (is_empty) break;
    WEFT_TRY(exchange_round(out, in, operations[0].stream));
  }
  return leave_stream(operations[0].stream);
}

Status ncclComm::exchange_round(const std::vector<const Operation*>& sends,
                                const std::vector<const Operation*>& recvs, cudaStream_t stream) {
  const weft::BookChoice* choice = book_->choose(BookCollective::kExchange, 0);
  WEFT_TRY_ASSIGN(const uint32_t number, load(*pairs_, BookCollective::kExchange, choice->program, 0));
  weft::nccl::Table out = weft::nccl::table_of(sends, size_), in = weft::nccl::table_of(recvs, size_);
  const weft::BookProgram& program = book_->program(choice->program);
  return pairs_->run({number, Element::kUint8, Reduction::kSum, program.protocol, out.base, in.base, 0,
                      program.per_part, false, std::move(out.entries), std::move(in.entries), 0, 0, stream});
}

Result<uint32_t> ncclComm::load(weft::CollectiveRunner& runner, BookCollective collective, uint32_t program,
                                int root) {
  const auto found = loaded_.find({program, root});
  if (found != loaded_.end()) return found->second;
  weft::ProgramText text = book_->text(program, static_cast<uint32_t>(rank_), static_cast<uint32_t>(root));
  constexpr const char* kCalls[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                    "broadcast",  "reduce",     "send or recv"};
  text.call = kCalls[static_cast<uint32_t>(collective)];
  const bool has_root = collective == BookCollective::kBroadcast || collective == BookCollective::kReduce;
  if (has_root) text.root = root;
  text.is_reduction = collective == BookCollective::kAllReduce ||
                      collective == BookCollective::kReduceScatter || collective == BookCollective::kReduce;
  text.fingerprint = book_->digest() + program;
  text.is_of_pairs = collective == BookCollective::kExchange;
  WEFT_TRY_ASSIGN(const uint32_t number, runner.load(std::move(text)));
  loaded_[{program, root}] = number;
  return number;
}

Status ncclComm::copy(void* dst, const void* src, uint64_t bytes, cudaStream_t stream) {
  if (dst == src || bytes == 0) return {};
  if (device_.is_host()) {
    std::memmove(dst, src, bytes);
    return {};
  }
  WEFT_TRY_ASSIGN(weft::CudaContext context, weft::CudaContext::enter(device_.ordinal));
  return weft::cuda_status(context.driver().cuMemcpyAsync(reinterpret_cast<weft::CUdeviceptr>(dst),
                                                          reinterpret_cast<weft::CUdeviceptr>(src), bytes,
                                                          reinterpret_cast<weft::CUstream>(stream)),
                           "copy {} bytes", bytes);
}

// Memory for one call's input; earlier ones stay, since captured graphs may use them.
Result<std::byte*> ncclComm::staging(uint64_t bytes) {
  if (staging_.empty() || staging_.back()->bytes() < bytes) {
    WEFT_TRY_ASSIGN(auto memory, weft::LocalMemory::create(device_, bytes));
    staging_.push_back(std::move(memory));
  }
  return staging_.back()->data();
}

// A runner is for one stream at a time: a call on another stream waits for the last one. Streams under
// capture are left alone; the graph's own order counts there.
Status ncclComm::enter_stream(cudaStream_t stream) {
  if (device_.is_host() || stream == last_stream_ || is_capturing(stream)) return {};
  WEFT_TRY_ASSIGN(weft::CudaContext context, weft::CudaContext::enter(device_.ordinal));
  last_stream_ = stream;
  return weft::cuda_status(
      context.driver().cuStreamWaitEvent(reinterpret_cast<weft::CUstream>(stream), last_event_, 0),
      "order two streams");
}

Status ncclComm::leave_stream(cudaStream_t stream) {
  if (device_.is_host() || size_ == 1 || is_capturing(stream)) return {};
  WEFT_TRY_ASSIGN(weft::CudaContext context, weft::CudaContext::enter(device_.ordinal));
  return weft::cuda_status(
      context.driver().cuEventRecord(last_event_, reinterpret_cast<weft::CUstream>(stream)),
      "record an event");
}

bool ncclComm::is_capturing(cudaStream_t stream) const {
  if (device_.is_host()) return false;
  const auto context = weft::CudaContext::enter(device_.ordinal);
  int status = weft::CU_STREAM_CAPTURE_STATUS_NONE;
  if (context.ok()) context->driver().cuStreamIsCapturing(reinterpret_cast<weft::CUstream>(stream), &status);
  return status != weft::CU_STREAM_CAPTURE_STATUS_NONE;
}

// What Weft does not serve: one group of the real library, in order.
Status ncclComm::forward(const std::vector<Operation>& operations) {
  if (operations.empty()) return {};
  const auto start = weft::nccl::real<decltype(&ncclGroupStart)>("ncclGroupStart");
  const auto end = weft::nccl::real<decltype(&ncclGroupEnd)>("ncclGroupEnd");
  if (!real_ || !start || !end)
    return Status::make(Code::kUnsupported, "{} needs the real NCCL, which this communicator lacks",
                        weft::nccl::kFunctionNames[static_cast<int>(operations[0].function)]);
  start();
  Status status;
  for (const Operation& o : operations) {
    weft::nccl::count_forwarded(o.function);
    if (status.ok()) status = forward_one(o);
  }
  const ncclResult_t result = end();
  if (status.ok() && result != ncclSuccess)
    return Status::make(Code::kSystem, "the real NCCL's ncclGroupEnd gave {}", static_cast<int>(result));
  return status;
}

Status ncclComm::forward_one(const Operation& o) {
  const char* name = weft::nccl::kFunctionNames[static_cast<int>(o.function)];
  ncclRedOp_t op = o.op;
  if (const PreMulSum* made = find_op(o.op)) op = made->real;
  ncclResult_t result = ncclInvalidUsage;
  const auto call = [&](auto function, auto... arguments) {
    if (function) result = function(arguments...);
  };
  using weft::nccl::real;
  switch (o.function) {
    case Function::kAllReduce:
      call(real<decltype(&ncclAllReduce)>(name), o.src, o.dst, o.count, o.type, op, real_, o.stream);
      break;
    case Function::kReduceScatter:
      call(real<decltype(&ncclReduceScatter)>(name), o.src, o.dst, o.count, o.type, op, real_, o.stream);
      break;
    case Function::kReduce:
      call(real<decltype(&ncclReduce)>(name), o.src, o.dst, o.count, o.type, op, o.peer, real_, o.stream);
      break;
    case Function::kAllGather:
      call(real<decltype(&ncclAllGather)>(name), o.src, o.dst, o.count, o.type, real_, o.stream);
      break;
    case Function::kBroadcast:
      call(real<decltype(&ncclBroadcast)>(name), o.src, o.dst, o.count, o.type, o.peer, real_, o.stream);
      break;
    case Function::kAllToAll:
      call(real<decltype(&ncclAlltoAll)>(name), o.src, o.dst, o.count, o.type, real_, o.stream);
      break;
    case Function::kGather:
      call(real<decltype(&ncclGather)>(name), o.src, o.dst, o.count, o.type, o.peer, real_, o.stream);
      break;
    case Function::kScatter:
      call(real<decltype(&ncclScatter)>(name), o.src, o.dst, o.count, o.type, o.peer, real_, o.stream);
      break;
    case Function::kSend:
      call(real<decltype(&ncclSend)>(name), o.src, o.count, o.type, o.peer, real_, o.stream);
      break;
    case Function::kRecv:
      call(real<decltype(&ncclRecv)>(name), o.dst, o.count, o.type, o.peer, real_, o.stream);
      break;
    case Function::kAllToAllv:
      // NCCL has no such call; RCCL has. Sends and receives do the same.
      result = ncclSuccess;
      for (const Operation& part : as_transfers(o)) WEFT_TRY(forward_one(part));
      break;
  }
  if (result == ncclSuccess || result == ncclInProgress) return {};
  return Status::make(Code::kSystem, "the real NCCL's {} gave {}", name, static_cast<int>(result));
}
