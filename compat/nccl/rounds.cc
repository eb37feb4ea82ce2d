// SPDX-License-Identifier: Apache-2.0
//
// Sends and receives of a group, as rounds of an exchange: one message to and from each rank at most in each.
#include <algorithm>
#include <cstring>
#include <utility>

#include "compat/nccl/comm.h"
#include "kernels/collective/element.cuh"

using weft::BookCollective;
using weft::Element;
using weft::Reduction;
using weft::Result;
using weft::Status;
using weft::nccl::Function;
using weft::nccl::Operation;

namespace weft::nccl {
namespace {

std::byte* address_of(const Operation& o) {
  return o.function == Function::kSend ? const_cast<std::byte*>(o.src) : o.dst;
}

// The one of a function that lies lowest in memory; null: there is none.
const Operation* lowest_of(const std::vector<const Operation*>& operations, Function function) {
  const Operation* lowest = nullptr;
  for (const Operation* o : operations)
    if (o && o->function == function && (!lowest || address_of(*o) < address_of(*lowest))) lowest = o;
  return lowest;
}

// Offsets and lengths, in bytes from `base`, of what goes to or comes from each rank.
struct Table {
  std::byte* base = nullptr;
  std::vector<weft::ChunkSpan> entries;
};
Table table_of(const std::vector<const Operation*>& operations, Function function, int ranks) {
  Table table;
  if (const Operation* lowest = lowest_of(operations, function)) table.base = address_of(*lowest);
  table.entries.resize(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const Operation* o = operations[rank];
    if (!o) continue;
    table.entries[rank] = {static_cast<uint64_t>(address_of(*o) - table.base), o->count * bytes_of(o->type),
                           static_cast<uint32_t>(element_of(o->type)), 0};
  }
  return table;
}

// The calls of a group that are for one rank, in order; round k has the k-th of each rank.
const Operation* in_round(const std::vector<std::vector<const Operation*>>& of_ranks, int rank,
                          size_t round) {
  const auto& calls = of_ranks[static_cast<size_t>(rank)];
  return round < calls.size() ? calls[round] : nullptr;
}

KnownRound::Message message_of(const Operation& o, const std::byte* send_base, const std::byte* recv_base) {
  const std::byte* base = o.function == Function::kSend ? send_base : recv_base;
  return {o.function, o.peer, o.type, o.count,
          reinterpret_cast<uintptr_t>(address_of(o)) - reinterpret_cast<uintptr_t>(base)};
}

KnownRound known_round(const std::vector<const Operation*>& operations,
                       const CollectiveRunner::PlannedRun* planned) {
  // Any index does for a function that the group has none of: no message asks for its base.
  const auto place_of_lowest = [&](Function function) -> size_t {
    const auto found = std::ranges::find(operations, lowest_of(operations, function));
    return found == operations.end() ? 0 : static_cast<size_t>(found - operations.begin());
  };
  KnownRound round{{}, place_of_lowest(Function::kSend), place_of_lowest(Function::kRecv), planned};
  const std::byte* send_base = operations[round.lowest_send]->src;
  const std::byte* recv_base = operations[round.lowest_recv]->dst;
  for (const Operation* o : operations) round.messages.push_back(message_of(*o, send_base, recv_base));
  return round;
}

}  // namespace

bool KnownRound::is_like(std::span<const Operation> operations) const {
  if (operations.empty() || operations.size() != messages.size()) return false;
  const std::byte* send_base = operations[lowest_send].src;
  const std::byte* recv_base = operations[lowest_recv].dst;
  for (size_t i = 0; i < messages.size(); ++i)
    if (message_of(operations[i], send_base, recv_base) != messages[i]) return false;
  return true;
}

}  // namespace weft::nccl

// Rounds keep the messages between two ranks in order, whatever else is in the group on either side.
Status ncclComm::exchange(const std::vector<const Operation*>& operations) {
  if (operations.empty()) return {};
  std::vector<std::vector<const Operation*>> sends(size_), recvs(size_);
  for (const Operation* o : operations)
    (o->function == Function::kSend ? sends : recvs)[o->peer].push_back(o);
  if (sends[rank_].size() != recvs[rank_].size())
    return Status::invalid("sends and receives to rank {} itself: got {} and {}, allowed: equally many",
                           rank_, sends[rank_].size(), recvs[rank_].size());
  const cudaStream_t stream = operations[0]->stream;
  for (size_t i = 0; i < sends[rank_].size(); ++i) {
    const Operation &out = *sends[rank_][i], &in = *recvs[rank_][i];
    if (out.count != in.count || out.type != in.type)
      return Status::invalid(
          "send and receive {} of rank {} to itself: got {} elements of type {} and {} of type {}, allowed: "
          "the same",
          i, rank_, out.count, static_cast<int>(out.type), in.count, static_cast<int>(in.type));
  }
  for (size_t i = 0; i < sends[rank_].size(); ++i)
    WEFT_TRY(copy(recvs[rank_][i]->dst, sends[rank_][i]->src,
                  sends[rank_][i]->count * weft::nccl::bytes_of(sends[rank_][i]->type), stream));
  const bool is_for_others = sends[rank_].empty();
  sends[rank_].clear();
  recvs[rank_].clear();
  size_t rounds = 0;
  for (int peer = 0; peer < size_; ++peer)
    rounds = std::max({rounds, sends[peer].size(), recvs[peer].size()});
  WEFT_TRY(enter_stream(stream));
  std::vector<const Operation*> out(size_), in(size_);
  for (size_t round = 0; round < rounds; ++round) {
    for (int peer = 0; peer < size_; ++peer) {
      out[peer] = weft::nccl::in_round(sends, peer, round);
      in[peer] = weft::nccl::in_round(recvs, peer, round);
    }
    WEFT_TRY_ASSIGN(const PlannedRun* planned, exchange_round(out, in, stream));
    if (rounds == 1 && is_for_others) last_round_ = weft::nccl::known_round(operations, planned);
  }
  return leave_stream(stream);
}

Status ncclComm::run_last_round(std::span<const Operation> operations) {
  for (const Operation& operation : operations) weft::nccl::count_served(operation.function);
  const cudaStream_t stream = operations[0].stream;
  WEFT_TRY(enter_stream(stream));
  WEFT_TRY(pairs_->run(*last_round_.planned, const_cast<std::byte*>(operations[last_round_.lowest_send].src),
                       operations[last_round_.lowest_recv].dst, stream));
  return leave_stream(stream);
}

Result<const weft::CollectiveRunner::PlannedRun*> ncclComm::exchange_round(
    const std::vector<const Operation*>& sends, const std::vector<const Operation*>& recvs,
    cudaStream_t stream) {
  weft::nccl::Table out = weft::nccl::table_of(sends, Function::kSend, size_);
  weft::nccl::Table in = weft::nccl::table_of(recvs, Function::kRecv, size_);
  std::byte *const src = out.base, *const dst = in.base;
  WEFT_TRY_ASSIGN(const weft::CollectiveRunner::PlannedRun* planned,
                  plan_round(std::move(out.entries), std::move(in.entries)));
  WEFT_TRY(pairs_->run(*planned, src, dst, stream));
  return planned;
}

// The plan of a round in which the same goes between the same ranks, from places as far from each other.
Result<const weft::CollectiveRunner::PlannedRun*> ncclComm::plan_round(std::vector<weft::ChunkSpan> out,
                                                                       std::vector<weft::ChunkSpan> in) {
  Round round{std::move(out), std::move(in)};
  const auto known = planned_rounds_.find(round);
  if (known != planned_rounds_.end()) return &known->second;
  const weft::BookChoice* choice = book_->choose(BookCollective::kExchange, 0);
  WEFT_TRY_ASSIGN(const uint32_t number, load(*pairs_, BookCollective::kExchange, choice->program, 0));
  const weft::BookProgram& program = book_->program(choice->program);
  WEFT_TRY_ASSIGN(weft::CollectiveRunner::PlannedRun planned,
                  pairs_->plan({number, Element::kUint8, Reduction::kSum, program.protocol, nullptr, nullptr,
                                0, program.per_part, false, round.first, round.second, 0, 0, nullptr}));
  if (planned_rounds_.size() >= kCachedPlans) {
    planned_rounds_.clear();
    last_round_ = {};
  }
  return &planned_rounds_.emplace(std::move(round), std::move(planned)).first->second;
}

// All rounds of a communicator have as many entries as it has ranks.
bool ncclComm::RoundOrder::operator()(const Round& a, const Round& b) const {
  const size_t bytes = a.first.size() * sizeof(weft::ChunkSpan);
  const int order = std::memcmp(a.first.data(), b.first.data(), bytes);
  return order ? order < 0 : std::memcmp(a.second.data(), b.second.data(), bytes) < 0;
}
