// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/pinned_pages.h"

#include <fstream>
#include <sstream>

#include "base/cuda_driver.h"

namespace weft::ibgda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned kIoMemory = 4;  // CU_MEMHOSTREGISTER_IOMEMORY

uint64_t page_of(const void* at) {
  return reinterpret_cast<uintptr_t>(at) / kPage;
}

}  // namespace

Result<std::unique_ptr<PinnedPages>> PinnedPages::create(Device device) {
  WEFT_TRY(Status(cuda_driver().status()));
  return std::unique_ptr<PinnedPages>(new PinnedPages(device));
}

PinnedPages::~PinnedPages() {
  for (const auto& [page, uses] : uses_) unpin_page(page);
}

Status PinnedPages::pin_page(uint64_t page, Kind kind) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device_.ordinal));
  const CudaDriver& driver = current.driver();
  void* at = reinterpret_cast<void*>(page * kPage);
  const unsigned flags =
      CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | (kind == kRegister ? kIoMemory : 0);
  const char* what =
      kind == kRegister ? "map the doorbell register of a NIC for cuda:{}" : "pin a queue for cuda:{}";
  WEFT_TRY(cuda_status(driver.cuMemHostRegister(at, kPage, flags), what, device_.ordinal));
  CUdeviceptr seen = 0;
  Status found = cuda_status(driver.cuMemHostGetDevicePointer(&seen, at, 0), what, device_.ordinal);
  if (found.ok() && seen != page * kPage)
    found = Status::make(Code::kUnsupported, "cuda:{} sees memory of the host at other addresses",
                         device_.ordinal);
  if (!found.ok()) driver.cuMemHostUnregister(at);
  return found;
}

void PinnedPages::unpin_page(uint64_t page) {
  auto current = CudaContext::enter(device_.ordinal);
  if (current.ok()) current->driver().cuMemHostUnregister(reinterpret_cast<void*>(page * kPage));
}

Status PinnedPages::pin(const void* at, uint64_t bytes, Kind kind) {
  const uint64_t first = page_of(at), end = page_of(static_cast<const std::byte*>(at) + bytes - 1) + 1;
  for (uint64_t page = first; page < end; ++page) {
    const Status pinned = uses_.contains(page) ? Status() : pin_page(page, kind);
    if (!pinned.ok()) {
      if (page > first) unpin(at, (page - first) * kPage - reinterpret_cast<uintptr_t>(at) % kPage);
      return pinned;
    }
    ++uses_[page];
  }
  return {};
}

void PinnedPages::unpin(const void* at, uint64_t bytes) {
  const uint64_t first = page_of(at), end = page_of(static_cast<const std::byte*>(at) + bytes - 1) + 1;
  for (uint64_t page = first; page < end; ++page) {
    const auto found = uses_.find(page);
    if (found == uses_.end() || --found->second > 0) continue;
    unpin_page(page);
    uses_.erase(found);
  }
}

std::string doorbell_expectation() {
  std::ifstream file("/proc/driver/nvidia/params");
  std::stringstream params;
  params << file.rdbuf();
  if (params.str().find("PeerMappingOverride=1") != std::string::npos) return "kernels ring its doorbells";
  return "a thread of the host rings its doorbells unless the driver maps them (NVreg_RegistryDwords="
         "\"PeerMappingOverride=1;\" is not set)";
}

}  // namespace weft::ibgda
