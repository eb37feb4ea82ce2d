// SPDX-License-Identifier: Apache-2.0
//
// One call of a collective, send or receive that waits in a group; and counts of the calls that Weft and the real
// library served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compat/nccl/nccl.h"
#include "kernels/collective/program_args.h"

namespace weft::nccl {

// The functions that are served or forwarded, in the order of kFunctionNames.
enum class Function {
  kAllReduce = 0,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllToAllv,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kSend,
  kRecv,
};
inline constexpr const char* kFunctionNames[] = {
    "ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclAllToAllv", "ncclBroadcast",
    "ncclReduce",    "ncclGather",    "ncclScatter",       "ncclSend",     "ncclRecv"};
inline constexpr int kFunctions = sizeof(kFunctionNames) / sizeof(kFunctionNames[0]);

// Of kAllToAllv: elements, by rank.
struct MessageSizes {
  std::vector<size_t> src_counts, src_places, dst_counts, dst_places;
};

struct Operation {
  Function function;
  ncclComm_t comm;
  const std::byte* src;
  std::byte* dst;
  size_t count;  // elements
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;  // or root
  cudaStream_t stream;
  std::shared_ptr<const MessageSizes> sizes;  // of kAllToAllv; else null
};

Element element_of(ncclDataType_t type);
uint64_t bytes_of(ncclDataType_t type);

// Counts an operation for weftNcclCounts().
void count_served(Function function);
void count_forwarded(Function function);

}  // namespace weft::nccl
