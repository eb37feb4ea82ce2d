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

bool reduces(Function function) {
  return function == Function::kAllReduce || function == Function::kReduceScatter ||
         function == Function::kReduce;
}

bool is_premultiplied(const Operation& o) {
  return reduces(o.function) && o.op >= ncclNumOps;
}

bool is_transfer(Function function) {
  return function == Function::kSend || function == Function::kRecv;
}

// What has the same kernel, and needs memory by its size.
std::array<int, 4> kind_of(const Operation& o) {
  return {static_cast<int>(o.function), static_cast<int>(o.type), static_cast<int>(o.op), o.peer};
}

// Served as sends and receives, where no exchange serves it.
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
    case Function::kBroadcast:
      return ExchangeOf{Exchange::kBroadcast, BookCollective::kBroadcast};
    case Function::kReduce:
      return ExchangeOf{Exchange::kReduce, BookCollective::kReduce};
    case Function::kGather:
      return ExchangeOf{Exchange::kGather, BookCollective::kGather};
    case Function::kScatter:
      return ExchangeOf{Exchange::kScatter, BookCollective::kScatter};
    default:
      return {};
  }
}

// The row of the book for a function, and how many times its count the full buffer has.
std::pair<BookCollective, uint64_t> program_of(Function function, int ranks) {
  const auto parts = static_cast<uint64_t>(ranks);
  switch (function) {
    case Function::kAllGather:
      return {BookCollective::kAllGather, parts};
    case Function::kReduceScatter:
      return {BookCollective::kReduceScatter, parts};
    case Function::kAllToAll:
      return {BookCollective::kAllToAll, parts};
    case Function::kBroadcast:
      return {BookCollective::kBroadcast, 1};
    case Function::kReduce:
      return {BookCollective::kReduce, 1};
    default:
      return {BookCollective::kAllReduce, 1};
  }
}

// The key of calls that differ in addresses alone, in PlannedCalls::collectives.
std::pair<uint64_t, uint64_t> form_of(const Operation& o) {
  const uint64_t reduction = reduces(o.function) ? static_cast<uint64_t>(reduction_of(o.op)) : 0;
  return {static_cast<uint64_t>(o.function) << 56 | static_cast<uint64_t>(o.type) << 48 | reduction << 40 |
              static_cast<uint32_t>(o.peer),
          o.count};
}

}  // namespace
}  // namespace weft::nccl

Status ncclComm::run(std::span<const Operation> operations) {
  std::lock_guard lock(mutex_);
  const weft::CaptureLooks looks;
  const Status status =
      is_stopped_ ? Status(Code::kClosed, "the communicator was aborted") : run_on_device(operations);
  note(status);
  return status;
}

// In a process with several GPUs each step of a call would enter the context, and leave it, by itself.
Status ncclComm::run_on_device(std::span<const Operation> operations) {
  if (device_.is_host()) return run_in_order(operations);
  WEFT_TRY_ASSIGN(const weft::CudaContext context, weft::CudaContext::enter(device_.ordinal));
  return run_in_order(operations);
}

Status ncclComm::run_in_order(std::span<const Operation> operations) {
  if (last_round_.is_like(operations) && serves(operations[0])) return run_last_round(operations);
  std::vector<const Operation*> transfers, forwarded;
  for (const Operation& operation : operations) {
    if (operation.count == 0 && operation.function != Function::kAllToAllv) continue;
    if (!serves(operation)) {
      forwarded.push_back(&operation);
      continue;
    }
    WEFT_TRY(forward(forwarded));
    forwarded.clear();
    weft::nccl::count_served(operation.function);
    size_t& most = served_[weft::nccl::kind_of(operation)];
    most = std::max(most, operation.count);
    if (weft::nccl::is_transfer(operation.function))
      transfers.push_back(&operation);
    else
      WEFT_TRY(size_ == 1 ? serve_one_rank(operation) : serve(operation));
  }
  WEFT_TRY(forward(forwarded));
  return exchange(transfers);
}

bool ncclComm::starts_at_once(std::span<const Operation> operations) {
  std::lock_guard lock(mutex_);
  if (!is_weft_ || device_.is_host() || weft::config().check) return false;
  if (last_round_.is_like(operations)) return serves(operations[0]);
  // The second launch may have to wait for room in a table that the first one reads.
  std::set<std::pair<Function, int>> messages;
  for (const Operation& o : operations) {
    // A size of AllToAllv says nothing of the memory that its messages need.
    const bool is_single = operations.size() == 1 && o.function != Function::kAllToAllv;
    const bool is_first = weft::nccl::is_transfer(o.function) && messages.insert({o.function, o.peer}).second;
    const auto known = served_.find(weft::nccl::kind_of(o));
    const bool is_known = known != served_.end() && o.count <= known->second;
    if (!is_known || !(is_single || is_first) || !serves(o)) return false;
  }
  return true;
}

// By what all ranks know alike: the option, the operation, the group of operators, whether a graph is
// captured.
bool ncclComm::serves(const Operation& operation) {
  if (!is_weft_) return false;
  if (!real_) return true;  // nobody else would
  if (is_forwarded_[static_cast<size_t>(operation.function)]) return false;
  if (weft::nccl::is_premultiplied(operation)) {
    return find_op(operation.op) && size_ > 1;  // add_op() made no kernel for one rank
  }
  if (size_ == 1) return true;  // a copy
  // Tables of sizes are host memory at the time of the call, which a replayed graph would not see.
  // Programs of other roots than 0 would have to be loaded. An exchange has none of both.
  const bool has_tables =
      weft::nccl::is_transfer(operation.function) || weft::nccl::is_of_messages(operation.function);
  const bool has_root = operation.function == Function::kBroadcast || operation.function == Function::kReduce;
  const bool is_for_eager_calls = has_tables || (has_root && operation.peer != 0);
  return !is_for_eager_calls || !is_capturing(operation.stream) || exchange_for(operation);
}

Status ncclComm::serve(const Operation& o) {
  if (weft::nccl::is_of_messages(o.function) && !exchange_for(o)) {
    const std::vector<Operation> parts = as_transfers(o);
    std::vector<const Operation*> transfers;
    for (const Operation& part : parts) transfers.push_back(&part);
    return exchange(transfers);  // in the order of its stream
  }
  WEFT_TRY(enter_stream(o.stream));
  WEFT_TRY_ASSIGN(const PlannedCall* planned, plan_of(o));
  if (const auto* exchange = std::get_if<weft::CollectiveRunner::PlannedExchange>(planned)) {
    // In place and out of place alike.
    const bool is_scattered = o.function == Function::kReduceScatter;
    const uint64_t parts = is_scattered ? static_cast<uint64_t>(size_) : 1;
    WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count * parts));
    WEFT_TRY(collectives_->run(*exchange, const_cast<std::byte*>(src), o.dst, o.stream));
  } else {
    WEFT_TRY_ASSIGN(const Buffers buffers, buffers_of(o));
    const auto& run = std::get<weft::CollectiveRunner::PlannedRun>(*planned);
    WEFT_TRY(collectives_->run(run, buffers.input, buffers.output, o.stream));
  }
  return leave_stream(o.stream);
}

// The buffer that a program works on, where the book has it in place; what was not given so is copied there.
Result<ncclComm::Buffers> ncclComm::buffers_of(const Operation& o) {
  const uint64_t bytes = o.count * weft::nccl::bytes_of(o.type);
  switch (o.function) {
    case Function::kAllReduce: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count));
      WEFT_TRY(copy(o.dst, src, bytes, o.stream));
      return Buffers{o.dst, o.dst};
    }
    case Function::kReduceScatter: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count * static_cast<uint64_t>(size_)));
      return Buffers{const_cast<std::byte*>(src), o.dst};
    }
    case Function::kReduce: {
      WEFT_TRY_ASSIGN(const std::byte* src, premultiplied(o, o.count));
      // Other ranks' buffers stay as they are: what they add up lies in slots and scratch.
      auto* data = const_cast<std::byte*>(src);
      if (rank_ == o.peer) {
        data = o.dst;
        WEFT_TRY(copy(data, src, bytes, o.stream));
      }
      return Buffers{data, data};
    }
    case Function::kAllGather: {
      std::byte* own = o.dst + static_cast<uint64_t>(rank_) * bytes;
      WEFT_TRY(copy(own, o.src, bytes, o.stream));
      return Buffers{own, o.dst};
    }
    case Function::kBroadcast:
      if (rank_ == o.peer) WEFT_TRY(copy(o.dst, o.src, bytes, o.stream));
      return Buffers{o.dst, o.dst};
    default:
      return Buffers{const_cast<std::byte*>(o.src), o.dst};
  }
}

// The plan of calls of this form, made for the first of them. As the book says: an exchange, or a program.
Result<const ncclComm::PlannedCall*> ncclComm::plan_of(const Operation& o) {
  const auto form = weft::nccl::form_of(o);
  const auto known = planned_.find(form);
  if (known != planned_.end()) return &known->second;
  const weft::BookChoice* choice = exchange_for(o);
  std::optional<PlannedCall> planned;
  if (choice) {
    WEFT_TRY_ASSIGN(planned, plan_exchange(o, *choice));
  } else {
    WEFT_TRY_ASSIGN(planned, plan_program(o));
  }
  if (planned_.size() >= kCachedPlans) planned_.clear();
  return &planned_.emplace(form, std::move(*planned)).first->second;
}

// What the book says of a collective that one kernel does as a whole; null: a program serves it.
const weft::BookChoice* ncclComm::exchange_for(const Operation& o) const {
  const auto kind = weft::nccl::exchange_of(o.function);
  if (!kind) return nullptr;
  const bool has_root = weft::has_root(kind->kind);
  const uint64_t parts =
      kind->kind == weft::Exchange::kAllReduce || has_root ? 1 : static_cast<uint64_t>(size_);
  const weft::BookChoice* choice =
      book_->choose(kind->collective, o.count * parts * weft::nccl::bytes_of(o.type));
  return choice && choice->mode != weft::BookMode::kProgram ? choice : nullptr;
}

Result<weft::CollectiveRunner::PlannedExchange> ncclComm::plan_exchange(const Operation& o,
                                                                        const weft::BookChoice& choice) {
  const bool is_in_place = choice.mode == weft::BookMode::kPlaces;
  return collectives_->plan({weft::nccl::exchange_of(o.function)->kind, weft::nccl::element_of(o.type),
                             weft::nccl::reduction_of(o.op), nullptr, nullptr, o.count,
                             choice.mode == weft::BookMode::kLinesAtOnce,
                             is_in_place ? weft::ExchangeWay::kPlaces : weft::ExchangeWay::kLines,
                             choice.num_sms, nullptr, o.peer});
}

// One rank: every collective is a copy.
Status ncclComm::serve_one_rank(const Operation& o) {
  if (o.function == Function::kAllToAllv) {
    const weft::nccl::MessageSizes& sizes = *o.sizes;
    if (sizes.src_counts[0] != sizes.dst_counts[0])
      return Status::invalid(
          "sendcounts[0] and recvcounts[0]: got {} and {}, allowed: the same, as both are of rank 0",
          sizes.src_counts[0], sizes.dst_counts[0]);
    const uint64_t bytes = weft::nccl::bytes_of(o.type);
    return copy(o.dst + sizes.dst_places[0] * bytes, o.src + sizes.src_places[0] * bytes,
                sizes.src_counts[0] * bytes, o.stream);
  }
  WEFT_TRY(copy(o.dst, o.src, o.count * weft::nccl::bytes_of(o.type), o.stream));
  return weft::nccl::is_premultiplied(o) ? multiply(o.dst, o.count, o) : Status();
}

// The input; multiplied by the operator's scalar, and elsewhere, if it has one.
Result<const std::byte*> ncclComm::premultiplied(const Operation& o, uint64_t elems) {
  if (!weft::nccl::is_premultiplied(o)) return o.src;
  const uint64_t bytes = elems * weft::nccl::bytes_of(o.type);
  WEFT_TRY_ASSIGN(std::byte * data, staging(bytes));
  WEFT_TRY(copy(data, o.src, bytes, o.stream));
  WEFT_TRY(multiply(data, elems, o));
  return data;
}

Status ncclComm::multiply(std::byte* data, uint64_t elems, const Operation& o) {
  const PreMulSum* op = find_op(o.op);
  weft::CollectiveRunner& runner = scaler_ ? *scaler_ : *collectives_;
  return runner.scale(weft::nccl::element_of(o.type), {data, elems, op->pointer, op->bits}, o.stream);
}

Result<weft::CollectiveRunner::PlannedRun> ncclComm::plan_program(const Operation& o) {
  const auto [collective, parts] = weft::nccl::program_of(o.function, size_);
  const weft::BookChoice* choice = book_->choose(collective, o.count * parts * weft::nccl::bytes_of(o.type));
  if (!choice)
    return Status::make(Code::kUnsupported, "program book: nothing for {}",
                        weft::nccl::kFunctionNames[static_cast<int>(o.function)]);
  const weft::BookProgram& program = book_->program(choice->program);
  const bool has_root = o.function == Function::kBroadcast || o.function == Function::kReduce;
  WEFT_TRY_ASSIGN(const uint32_t number,
                  load(*collectives_, collective, choice->program, has_root ? o.peer : 0));
  return collectives_->plan({number,
                             weft::nccl::element_of(o.type),
                             weft::nccl::reduction_of(o.op),
                             program.protocol,
                             nullptr,
                             nullptr,
                             o.count,
                             program.per_part,
                             false,
                             {},
                             {},
                             choice->slice_bytes,
                             choice->num_sms,
                             nullptr});
}

// Gather, Scatter and AllToAllv as this rank's sends and receives.
std::vector<Operation> ncclComm::as_transfers(const Operation& o) const {
  std::vector<Operation> transfers;
  const uint64_t bytes = weft::nccl::bytes_of(o.type);
  const auto add = [&](Function function, int peer, uint64_t place, size_t count) {
    Operation part{function, o.comm, nullptr, nullptr, count, o.type, ncclSum, peer, o.stream, nullptr};
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
    add(Function::kSend, peer, o.sizes->src_places[peer], o.sizes->src_counts[peer]);
    add(Function::kRecv, peer, o.sizes->dst_places[peer], o.sizes->dst_counts[peer]);
  }
  return transfers;
}

Result<uint32_t> ncclComm::load(weft::CollectiveRunner& runner, BookCollective collective, uint32_t program,
                                int root) {
  const auto found = loaded_.find({program, root});
  if (found != loaded_.end()) return found->second;
  weft::ProgramText text = book_->text(program, static_cast<uint32_t>(rank_), static_cast<uint32_t>(root));
  constexpr const char* kCalls[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                    "broadcast",  "reduce",     "send or recv"};  // what has programs
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

// Calls follow one another over both runners, their copies and their staging, on whatever streams they are. Streams
// under capture are left alone; the graph's own order counts there.
Status ncclComm::enter_stream(cudaStream_t stream) {
  return is_capturing(stream) ? Status() : last_call_.wait(stream);
}

Status ncclComm::leave_stream(cudaStream_t stream) {
  return size_ == 1 || is_capturing(stream) ? Status() : last_call_.note(stream);
}

bool ncclComm::is_capturing(cudaStream_t stream) const {
  const weft::Result<bool> is_captured = weft::is_capturing(device_, stream);
  return is_captured.ok() && *is_captured;
}
