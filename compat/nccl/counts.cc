// SPDX-License-Identifier: Apache-2.0
//
// How many calls Weft and the real library served, for weftNcclCounts() and for a line at the process's end; and
// what NCCL's types are.
#include <atomic>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl/answer.h"
#include "compat/nccl/operation.h"
#include "jit/host_launch.h"

namespace weft::nccl {
namespace {

struct Counts {
  std::atomic<uint64_t> served{0}, forwarded{0};
};
Counts counts[kFunctions];

__attribute__((destructor)) void report() {
  if (config().nccl_report == 0) return;
  std::string line = "nccl: calls served by Weft and by the real library:";
  for (int i = 0; i < kFunctions; ++i)
    if (counts[i].served || counts[i].forwarded)
      line += text(" {} {} + {};", kFunctionNames[i], counts[i].served.load(), counts[i].forwarded.load());
  log_line(LogLevel::kInfo, line);
}

}  // namespace

void count_served(Function function) {
  ++counts[static_cast<int>(function)].served;
}
void count_forwarded(Function function) {
  ++counts[static_cast<int>(function)].forwarded;
}

Element element_of(ncclDataType_t type) {
  constexpr Element kElements[] = {Element::kInt8,  Element::kUint8,  Element::kInt32, Element::kUint32,
                                   Element::kInt64, Element::kUint64, Element::kFp16,  Element::kFp32,
                                   Element::kFp64,  Element::kBf16,   Element::kE4m3,  Element::kE5m2};
  return kElements[type];
}

uint64_t bytes_of(ncclDataType_t type) {
  constexpr uint64_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[type];
}

}  // namespace weft::nccl

using namespace weft::nccl;  // NOLINT: these are this folder's own names

WEFT_NCCL_API int weftNcclCounts(weftNcclCount_t* rows, int capacity) {
  for (int i = 0; i < kFunctions && i < capacity; ++i)
    rows[i] = {kFunctionNames[i], counts[i].served, counts[i].forwarded};
  return kFunctions;
}

WEFT_NCCL_API unsigned long long weftNcclKernelNs() {
  return weft::host_kernel_ns();
}
