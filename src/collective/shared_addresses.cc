// SPDX-License-Identifier: Apache-2.0
#include "collective/shared_addresses.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/random.h"

namespace weft {
namespace {

// Tells this process from all others; a fork has another pid.
std::string process_mark() {
  static const uint64_t key = random_key();
  return text("{}.{}", getpid(), key);
}

CUcontext context_of(int ordinal) {
  const Result<CudaContext> entered = CudaContext::enter(ordinal);
  CUcontext context = nullptr;
  if (entered.ok()) (void)entered->driver().cuCtxGetCurrent(&context);
  return context;
}

// Whether kernels of one GPU reach all that cudaMalloc gives on another.
bool enable_access(int from, int to) {
  CUcontext const peer = context_of(to);
  const Result<CudaContext> own = CudaContext::enter(from);
  if (!peer || !own.ok()) return false;
  const CUresult result = own->driver().cuCtxEnablePeerAccess(peer, 0);
  return result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

bool enable_access(Device device, const std::vector<int>& ordinals) {
  return std::ranges::all_of(
      ordinals, [&](int peer) { return peer == device.ordinal || enable_access(device.ordinal, peer); });
}

// Whether memory of cuMemCreate was opened to a GPU.
bool has_access(const CudaDriver& driver, CUdeviceptr memory, int ordinal) {
  const CUmemLocation where{CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  unsigned long long flags = 0;
  return driver.cuMemGetAccess(&flags, &where, memory) == CUDA_SUCCESS &&
         flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

}  // namespace

Result<SharedAddresses> SharedAddresses::probe(Communicator& comm) {
  SharedAddresses addresses;
  const Device device = comm.device();
  WEFT_TRY_ASSIGN(const std::vector<std::string> marks,
                  comm.bootstrap().all_gather(process_mark(), comm.deadline()));
  const bool is_one_process =
      std::ranges::all_of(marks, [&](const std::string& mark) { return mark == marks[0]; });
  if (!is_one_process || comm.port_link()) return addresses;
  WEFT_TRY_ASSIGN(const std::vector<std::string> ordinals,
                  comm.bootstrap().all_gather(std::to_string(device.ordinal), comm.deadline()));
  for (const std::string& ordinal : ordinals) addresses.ordinals_.push_back(std::stoi(ordinal));
  const bool reaches_all =
      config().process_reads && (device.is_host() || enable_access(device, addresses.ordinals_));
  WEFT_TRY_ASSIGN(const std::vector<std::string> answers,
                  comm.bootstrap().all_gather(reaches_all ? "1" : "0", comm.deadline()));
  if (std::ranges::find(answers, "0") != answers.end()) return addresses;
  addresses.device_ = device;
  std::vector<uint64_t> bases;
  for (uint64_t piece = 0; piece < kPieces; ++piece)
    bases.insert(bases.end(), marks.size(), piece * kPieceBytes);
  WEFT_TRY_ASSIGN(addresses.bases_, LocalMemory::create(device, bases.size() * sizeof bases[0]));
  WEFT_TRY(addresses.bases_->write(0, bases.data(), bases.size() * sizeof bases[0]));
  return addresses;
}

Status SharedAddresses::write_tables(LocalMemory& tables, uint64_t windows_at) const {
  if (!bases_) return {};
  std::vector<std::byte* const*> rows;
  for (uint64_t piece = 0; piece < kPieces; ++piece)
    rows.push_back(table(kMaxWindows + static_cast<int>(piece)));
  return tables.write(windows_at + kMaxWindows * sizeof rows[0], rows.data(), rows.size() * sizeof rows[0]);
}

Communicator::WindowPlace SharedAddresses::find(const std::byte* memory) const {
  const auto address = reinterpret_cast<uint64_t>(memory);
  if (!bases_ || address / kPieceBytes >= kPieces || !is_reached(memory)) return {};
  return {kMaxWindows + static_cast<int>(address / kPieceBytes), address % kPieceBytes};
}

std::byte* const* SharedAddresses::table(int number) const {
  return bases_->at<std::byte*>(static_cast<uint64_t>(number - kMaxWindows) * ordinals_.size() *
                                sizeof(std::byte*));
}

bool SharedAddresses::is_reached(const std::byte* memory) const {
  if (!memory) return false;
  if (device_.is_host()) return true;
  const Result<const CudaDriver*> found = cuda_driver();
  if (!found.ok()) return false;
  const CudaDriver& driver = **found;
  const auto at = reinterpret_cast<CUdeviceptr>(memory);
  int ordinal = -1, is_of_malloc = 0;
  if (driver.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) != CUDA_SUCCESS ||
      ordinal != device_.ordinal)
    return false;
  // What may be shared by CUDA's older IPC comes from cudaMalloc.
  driver.cuPointerGetAttribute(&is_of_malloc, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at);
  return is_of_malloc != 0 ||
         std::ranges::all_of(ordinals_, [&](int peer) { return has_access(driver, at, peer); });
}

}  // namespace weft
