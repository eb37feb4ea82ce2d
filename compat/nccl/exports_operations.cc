// SPDX-License-Identifier: Apache-2.0
//
// The C functions that move data: operators, collectives, sends, receives, and groups of them.
#include <cstring>
#include <utility>

#include "compat/nccl/answer.h"
#include "compat/nccl/group.h"

using weft::Code;
using weft::Result;
using weft::Status;
using namespace weft::nccl;  // NOLINT: these are this folder's own names

namespace {

Operation operation(Function function, const void* src, void* dst, size_t count, ncclDataType_t type,
                    ncclRedOp_t op, int peer, ncclComm_t comm, cudaStream_t stream) {
  return {function,
          comm,
          static_cast<const std::byte*>(src),
          static_cast<std::byte*>(dst),
          count,
          type,
          op,
          peer,
          stream,
          nullptr};
}

}  // namespace

// ---- operators

WEFT_NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                                    ncclScalarResidence_t residence, ncclComm_t comm) {
  if (!op || !scalar || !comm) return answer(Status::invalid("op, scalar or comm: got null"), comm);
  if (type < 0 || type >= ncclNumTypes)
    return answer(
        Status::invalid("datatype: got {}, allowed: 0 to {}", static_cast<int>(type), ncclNumTypes - 1),
        comm);
  PreMulSum made{type, nullptr, 0, ncclSum, true};
  if (residence == ncclScalarHostImmediate)
    std::memcpy(&made.bits, scalar, bytes_of(type));
  else
    made.pointer = scalar;
  if (comm->real()) {
    const ncclResult_t result = pass_plain(ncclRedOpCreatePreMulSum, "ncclRedOpCreatePreMulSum", &made.real,
                                           scalar, type, residence, comm->real());
    if (result != ncclSuccess) return result;
  }
  const Result<ncclRedOp_t> added = comm->add_op(made);
  if (!added.ok()) return answer(added.status(), comm);
  *op = *added;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (!comm || !comm->find_op(op))
    return answer(
        Status::invalid("op: got {}, allowed: one of ncclRedOpCreatePreMulSum", static_cast<int>(op)), comm);
  return end_operator(comm, op);
}

// ---- collectives, sends and receives

WEFT_NCCL_API ncclResult_t ncclReduce(const void* src, void* dst, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kReduce, src, dst, count, type, op, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclBroadcast(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kBroadcast, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  return ncclBroadcast(buff, buff, count, type, root, comm, stream);
}
WEFT_NCCL_API ncclResult_t ncclAllReduce(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllReduce, src, dst, count, type, op, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclReduceScatter(const void* src, void* dst, size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kReduceScatter, src, dst, count, type, op, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAllGather(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllGather, src, dst, count, type, ncclSum, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAlltoAll(const void* src, void* dst, size_t count, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllToAll, src, dst, count, type, ncclSum, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAllToAll(const void* src, void* dst, size_t count, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
  return ncclAlltoAll(src, dst, count, type, comm, stream);
}
WEFT_NCCL_API ncclResult_t ncclAllToAllv(const void* src, const size_t src_counts[],
                                         const size_t src_places[], void* dst, const size_t dst_counts[],
                                         const size_t dst_places[], ncclDataType_t type, ncclComm_t comm,
                                         cudaStream_t stream) {
  if (!comm || !src_counts || !src_places || !dst_counts || !dst_places)
    return refuse(answer(Status::invalid("comm, counts or displacements: got null"), comm));
  Operation made = operation(Function::kAllToAllv, src, dst, 0, type, ncclSum, -1, comm, stream);
  const int ranks = comm->size();
  const auto by_rank = [&](const size_t* sizes) { return std::vector<size_t>(sizes, sizes + ranks); };
  made.sizes = std::make_shared<const MessageSizes>(
      MessageSizes{by_rank(src_counts), by_rank(src_places), by_rank(dst_counts), by_rank(dst_places)});
  return submit(std::move(made));
}
WEFT_NCCL_API ncclResult_t ncclGather(const void* src, void* dst, size_t count, ncclDataType_t type, int root,
                                      ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kGather, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclScatter(const void* src, void* dst, size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kScatter, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclSend(const void* src, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kSend, src, nullptr, count, type, ncclSum, peer, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclRecv(void* dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                    cudaStream_t stream) {
  return submit(operation(Function::kRecv, nullptr, dst, count, type, ncclSum, peer, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclPutSignal(const void* src, size_t count, ncclDataType_t type, int peer,
                                         ncclWindow_t win, size_t offset, int signal, int ctx,
                                         unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclPutSignal", comm);
  return pass_plain(ncclPutSignal, "ncclPutSignal", src, count, type, peer, win, offset, signal, ctx, flags,
                    comm->real(), stream);
}
WEFT_NCCL_API ncclResult_t ncclSignal(int peer, int signal, int ctx, unsigned int flags, ncclComm_t comm,
                                      cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclSignal", comm);
  return pass_plain(ncclSignal, "ncclSignal", peer, signal, ctx, flags, comm->real(), stream);
}
WEFT_NCCL_API ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t* signals, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclWaitSignal", comm);
  return pass_plain(ncclWaitSignal, "ncclWaitSignal", count, signals, comm->real(), stream);
}

// ---- groups

WEFT_NCCL_API ncclResult_t ncclGroupStart() {
  ++this_group().depth;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclGroupEnd() {
  if (this_group().depth == 0)
    return answer(Status(Code::kUnsupported, "ncclGroupEnd without ncclGroupStart"));
  return --this_group().depth ? ncclSuccess : finish_group();
}
// Nothing runs, and there is no estimate of its time.
WEFT_NCCL_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (this_group().depth == 0)
    return answer(Status(Code::kUnsupported, "ncclGroupSimulateEnd without ncclGroupStart"));
  if (--this_group().depth == 0) drop_group();
  if (info) info->estimatedTime = NCCL_UNDEF_FLOAT;
  return ncclSuccess;
}

// ---- the other names

WEFT_PROFILED(ncclRedOpCreatePreMulSum)
WEFT_PROFILED(ncclRedOpDestroy)
WEFT_PROFILED(ncclReduce)
WEFT_PROFILED(ncclBroadcast)
WEFT_PROFILED(ncclBcast)
WEFT_PROFILED(ncclAllReduce)
WEFT_PROFILED(ncclReduceScatter)
WEFT_PROFILED(ncclAllGather)
WEFT_PROFILED(ncclAlltoAll)
WEFT_PROFILED(ncclAllToAll)
WEFT_PROFILED(ncclAllToAllv)
WEFT_PROFILED(ncclGather)
WEFT_PROFILED(ncclScatter)
WEFT_PROFILED(ncclSend)
WEFT_PROFILED(ncclRecv)
WEFT_PROFILED(ncclPutSignal)
WEFT_PROFILED(ncclSignal)
WEFT_PROFILED(ncclWaitSignal)
WEFT_PROFILED(ncclGroupStart)
WEFT_PROFILED(ncclGroupEnd)
WEFT_PROFILED(ncclGroupSimulateEnd)
