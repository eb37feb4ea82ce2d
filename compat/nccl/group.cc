// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/group.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <thread>
#include <utility>

#include "compat/nccl/answer.h"

namespace weft::nccl {
namespace {

Status init_one(PendingInit& init) {
  if (!init.parent) {
    WEFT_TRY(init.comm->init(init.id, init.rank, init.size, init.has_config ? &init.config : nullptr));
  } else {
    int rank = 0, size = 0;
    const int color = init.rank;
    WEFT_TRY_ASSIGN(const ncclUniqueId id, init.parent->split(color, init.size, rank, size));
    if (color == NCCL_SPLIT_NOCOLOR) {
      *init.target = nullptr;
      return {};
    }
    WEFT_TRY(init.comm->init(id, rank, size, init.has_config ? &init.config : nullptr));
  }
  *init.target = init.comm.release();
  return {};
}

using Share = std::span<const Operation>;

// Runs act(0) to act(count - 1), each in a thread of its own where there are several: they may wait for each
// other.
Status run_in_threads(size_t count, const std::function<Status(size_t)>& act) {
  if (count == 1) return act(0);
  std::vector<Status> results(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([&, i] { results[i] = act(i); });
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : results)
    if (!status.ok()) return status;
  return {};
}

// Whether one thread can start everything, one communicator after the other: GPUs of their own, and nothing to
// wait for. A thread that is made for it costs several times what a launch does.
bool starts_in_turn(const std::vector<Share>& shares) {
  for (size_t i = 0; i < shares.size(); ++i) {
    ncclComm& comm = *shares[i].front().comm;
    const auto is_of_gpu = [&](const Share& other) {
      return other.front().comm->device().ordinal == comm.device().ordinal;
    };
    const bool is_first = std::none_of(shares.begin(), shares.begin() + static_cast<ptrdiff_t>(i), is_of_gpu);
    if (comm.device().is_host() || !is_first || !comm.starts_at_once(shares[i])) return false;
  }
  return true;
}

// The operations of each communicator in a group, in the group's order. Sorts the group by communicators.
std::vector<Share> shares_of(std::vector<Operation>& operations) {
  std::ranges::stable_sort(operations, std::less<>(), &Operation::comm);
  std::vector<Share> shares;
  for (auto begin = operations.begin(); begin != operations.end();) {
    const auto is_other = [&](const Operation& operation) { return operation.comm != begin->comm; };
    const auto end = std::find_if(begin, operations.end(), is_other);
    shares.emplace_back(begin, end);
    begin = end;
  }
  return shares;
}

ncclResult_t run_shares(std::vector<Operation> operations) {
  const CaptureLooks looks;
  const std::vector<Share> shares = shares_of(operations);
  std::vector<Status> results(shares.size());
  const auto run = [&](size_t i) { return results[i] = shares[i].front().comm->run(shares[i]); };
  if (starts_in_turn(shares))
    for (size_t i = 0; i < shares.size(); ++i) (void)run(i);
  else
    (void)run_in_threads(shares.size(), run);
  ncclResult_t result = ncclSuccess;
  for (const Status& status : results)
    if (!status.ok()) result = answer(status);
  return result;
}

ncclResult_t run_operations(std::vector<Operation> operations) {
  if (operations.empty()) return ncclSuccess;
  const ncclComm_t comm = operations[0].comm;
  const auto is_of_one = [&](const Operation& operation) { return operation.comm == comm; };
  if (std::all_of(operations.begin(), operations.end(), is_of_one)) return answer(comm->run(operations));
  return run_shares(std::move(operations));
}

// Splits of one communicator follow one another, as on its other ranks; what else is made may wait for each other.
ncclResult_t init_pending(std::vector<PendingInit>& pending) {
  std::vector<std::vector<PendingInit*>> lines;
  for (PendingInit& init : pending) {
    const auto is_sibling = [&](const auto& line) { return init.parent && line[0]->parent == init.parent; };
    const auto line = std::find_if(lines.begin(), lines.end(), is_sibling);
    if (line == lines.end())
      lines.push_back({&init});
    else
      line->push_back(&init);
  }
  if (lines.empty()) return ncclSuccess;
  return answer(run_in_threads(lines.size(), [&](size_t i) {
    for (PendingInit* init : lines[i]) WEFT_TRY(init_one(*init));
    return Status();
  }));
}

ncclResult_t end_real_group(const Group& group) {
  const auto end = group.is_real_open ? real<decltype(&ncclGroupEnd)>("ncclGroupEnd") : nullptr;
  return end ? end() : ncclSuccess;
}

bool has_root(Function function) {
  return function == Function::kBroadcast || function == Function::kReduce || function == Function::kGather ||
         function == Function::kScatter || function == Function::kSend || function == Function::kRecv;
}

Status check(const Operation& o) {
  const char* name = kFunctionNames[static_cast<int>(o.function)];
  WEFT_TRY(check_comm(name, o.comm));
  if (o.type < 0 || o.type >= ncclNumTypes)
    return Status::invalid("{}: datatype: got {}, allowed: 0 to {}", name, static_cast<int>(o.type),
                           ncclNumTypes - 1);
  if (o.op < 0 || (o.op >= ncclNumOps && !o.comm->find_op(o.op)))
    return Status::invalid("{}: op: got {}, allowed: 0 to {}, or one of ncclRedOpCreatePreMulSum", name,
                           static_cast<int>(o.op), ncclNumOps - 1);
  if (o.op >= ncclNumOps && o.comm->find_op(o.op)->type != o.type)
    return Status::invalid("{}: datatype: got {}, allowed: {}, that of the operator's scalar", name,
                           static_cast<int>(o.type), static_cast<int>(o.comm->find_op(o.op)->type));
  if (has_root(o.function) && (o.peer < 0 || o.peer >= o.comm->size()))
    return Status::invalid("{}: root or peer: got {}, allowed: 0 to {}", name, o.peer, o.comm->size() - 1);
  const bool is_root = o.peer == o.comm->rank();
  const auto has = [&](std::vector<size_t> MessageSizes::* counts) {
    return o.count || (o.sizes && std::ranges::any_of((*o.sizes).*counts, [](size_t n) { return n != 0; }));
  };
  const bool needs_src =
      o.function != Function::kRecv &&
      (is_root || (o.function != Function::kBroadcast && o.function != Function::kScatter));
  const bool needs_dst = o.function != Function::kSend &&
                         (is_root || (o.function != Function::kReduce && o.function != Function::kGather));
  if ((needs_src && !o.src && has(&MessageSizes::src_counts)) ||
      (needs_dst && !o.dst && has(&MessageSizes::dst_counts)))
    return Status::invalid("{}: sendbuff or recvbuff: got null for {} elements", name, o.count);
  const bool is_transfer = o.function == Function::kSend || o.function == Function::kRecv;
  if (is_transfer && is_root && !this_group().depth)
    return Status(Code::kUnsupported,
                  text("{}: to rank {} itself, allowed only inside a group", name, o.peer));
  return {};
}

}  // namespace

Group& this_group() {
  thread_local Group group;
  return group;
}

void join_real_group() {
  Group& group = this_group();
  if (group.depth == 0 || group.is_real_open) return;
  const auto start = real<decltype(&ncclGroupStart)>("ncclGroupStart");
  group.is_real_open = start && start() == ncclSuccess;
}

void drop_group() {
  (void)end_real_group(std::exchange(this_group(), {}));
}

ncclResult_t finish_group() {
  Group group = std::exchange(this_group(), {});
  const ncclResult_t ended = end_real_group(group);
  ncclResult_t result = group.refused == ncclSuccess ? ended : group.refused;
  if (result == ncclSuccess) result = init_pending(group.pending);
  if (result == ncclSuccess) result = run_operations(std::move(group.operations));
  for (const OldOperator& old : group.old_operators) {
    const ncclResult_t ended = end_operator(old.comm, old.op);
    if (result == ncclSuccess) result = ended;
  }
  return result;
}

ncclResult_t end_operator(ncclComm_t comm, ncclRedOp_t op) {
  if (this_group().depth) {
    this_group().old_operators.push_back({comm, op});
    return ncclSuccess;
  }
  PreMulSum* made = comm->find_op(op);
  if (!made) return ncclSuccess;  // let go twice in one group
  made->is_alive = false;
  if (!comm->real()) return ncclSuccess;
  return pass_plain(ncclRedOpDestroy, "ncclRedOpDestroy", made->real, comm->real());
}

ncclResult_t refuse(ncclResult_t result) {
  Group& group = this_group();
  if (group.depth && group.refused == ncclSuccess) group.refused = result;
  return result;
}

ncclResult_t add_pending(PendingInit init) {
  this_group().pending.push_back(std::move(init));
  return this_group().depth ? ncclSuccess : finish_group();
}

ncclResult_t start_init(ncclComm_t* comm, int size, const ncclUniqueId* id, int rank,
                        const ncclConfig_t* config, Device device) {
  if (!comm || !id) return refuse(answer(Status::invalid("comm or commId: got null")));
  if (size < 1 || rank < 0 || rank >= size)
    return refuse(
        answer(Status::invalid("rank and nranks: got {} and {}, allowed: 0 <= rank < nranks", rank, size)));
  PendingInit init{comm, std::make_unique<ncclComm>(device), nullptr, *id, rank, size, config != nullptr, {}};
  if (config)
    std::memcpy(static_cast<void*>(&init.config), config, std::min(config->size, sizeof init.config));
  *comm = nullptr;
  return add_pending(std::move(init));
}

ncclResult_t submit(Operation operation) {
  const Status status = check(operation);
  if (!status.ok()) return refuse(answer(status, operation.comm));
  if (this_group().depth == 0) return answer(operation.comm->run({&operation, 1}));
  this_group().operations.push_back(std::move(operation));
  return ncclSuccess;
}

}  // namespace weft::nccl
