// SPDX-License-Identifier: Apache-2.0
//
// The masks of a LowLatency: who is left out, who was silent, and what peers are told of it.
#include <cstring>

#include "base/cuda_driver.h"
#include "base/log.h"
#include "moe/low_latency.h"

namespace weft {

// What calls that have ended so far have masked: on a GPU, earlier ones. The peer is told, in case that it comes back.
void LowLatency::note_silent() {
  for (uint32_t peer = 0; peer < ranks(); ++peer) {
    if (load_relaxed(waits_.silent + peer) == 0 || known_masked_[peer]) continue;
    log_warn("rank {}: rank {} stayed silent for {} s in a low-latency call and is masked from now on",
             rank(), peer, waits_.timeout_s);
    comm_->peers().mask(static_cast<int>(peer), true);
    known_masked_[peer] = true;
  }
}

void LowLatency::forget_mask(uint32_t peer) {
  store_relaxed(waits_.silent + peer, 0u);
  known_masked_[peer] = false;
  comm_->peers().mask(static_cast<int>(peer), false);
}

// Others leave this rank out: alone, it would wait for each of them and compute without their rows.
Status LowLatency::own_mask() {
  const std::string maskers = comm_->peers().maskers();
  if (maskers.empty()) return {};
  return Status::make(
      Code::kPeerLost,
      "rank {} (this rank) was given up by {}: it stayed silent in a low-latency call past their "
      "deadline and is masked, allowed: a new buffer of all ranks (to unmask it helps only a rank that has "
      "missed no call)",
      rank(), maskers);
}

Status LowLatency::write_words(uint32_t* at, uint32_t value, uint64_t words, void* stream) {
  if (!limits_.is_cuda) {
    for (uint64_t i = 0; i < words; ++i) store_relaxed(at + i, value);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  return cuda_status(driver->cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(at), value, words,
                                              static_cast<CUstream>(stream)),
                     "set a mask");
}

Status LowLatency::set_mask(uint32_t rank, bool masked, void* stream) {
  if (rank >= ranks()) return Status::invalid("rank_to_mask: got {}, allowed: 0 to {}", rank, ranks() - 1);
  if (!masked) forget_mask(rank);
  known_masked_[rank] = masked;
  return write_words(masks() + rank, masked ? 1 : 0, 1, stream);
}

Status LowLatency::clear_masks(void* stream) {
  for (uint32_t peer = 0; peer < ranks(); ++peer) forget_mask(peer);
  return write_words(masks(), 0, ranks(), stream);
}

Status LowLatency::query_masks(int32_t* out, void* stream) {
  if (waits_.may_mask) note_silent();
  const uint64_t bytes = ranks() * sizeof(int32_t);
  if (!limits_.is_cuda) {
    std::memcpy(out, masks(), bytes);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  return cuda_status(
      driver->cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(out), reinterpret_cast<CUdeviceptr>(masks()), bytes,
                            static_cast<CUstream>(stream)),
      "read the masks");
}

}  // namespace weft
