// SPDX-License-Identifier: Apache-2.0
//
// Operations that Weft does not serve, as calls of the real library.
#include <optional>

#include "base/cuda_driver.h"
#include "compat/nccl/comm.h"
#include "compat/nccl/real.h"

using weft::Code;
using weft::Status;
using weft::nccl::Function;
using weft::nccl::Operation;
using weft::nccl::PreMulSum;

// What Weft does not serve: one group of the real library, in order.
Status ncclComm::forward(const std::vector<const Operation*>& operations) {
  if (operations.empty()) return {};
  const auto start = weft::nccl::real<decltype(&ncclGroupStart)>("ncclGroupStart");
  const auto end = weft::nccl::real<decltype(&ncclGroupEnd)>("ncclGroupEnd");
  if (!real_ || !start || !end)
    return Status::make(Code::kUnsupported, "{} needs the real NCCL, which this communicator lacks",
                        weft::nccl::kFunctionNames[static_cast<int>(operations[0]->function)]);
  // The real library connects to a peer at the first call to it. The driver refuses that to a thread that captures.
  std::optional<weft::RelaxedCapture> relaxed;
  if (!device_.is_host()) {
    WEFT_TRY_ASSIGN(const weft::CudaDriver* driver, weft::cuda_driver());
    relaxed.emplace(*driver);
  }
  start();
  Status status;
  for (const Operation* o : operations) {
    weft::nccl::count_forwarded(o->function);
    if (status.ok()) status = forward_one(*o);
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
