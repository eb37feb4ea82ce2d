// SPDX-License-Identifier: Apache-2.0
//
// Copies by a GPU's copy engines, on a few streams of their own, and words that the GPU stores behind them.
//   WEFT_TRY_ASSIGN(auto copies, Copies::open(device));
//   WEFT_TRY(copies->copy(stream, to, from, bytes));
//   WEFT_TRY(copies->store(stream, word, value));        // once the copies before it have arrived
//   WEFT_TRY_ASSIGN(uint64_t mark, copies->mark(stream)); ... if (copies->has_passed(stream, mark)) ...
// Nothing here waits for a stream, allocates or frees once it is open, so that a kernel which waits for a copy cannot keep
// the copy from being made; and everything may be called while another thread captures a graph. Threads: one at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/cuda_driver.h"
#include "providers/cuda/control_page.h"
#include "providers/cuda/cuda.h"

namespace weft::provider::cuda {

class Copies {
 public:
  static Result<std::unique_ptr<Copies>> open(int device);
  ~Copies();
  Copies(const Copies&) = delete;

  int device() const { return device_; }
  Result<CudaContext> enter() const;

  // All stretches, kRequests at most: by a kernel if there is one and `for_kernel`, that is if this GPU's kernels reach all
  // of them. False: too many lists are still to be read; ask again later.
  Result<bool> copy_all(uint32_t stream, const std::vector<Stretch>& stretches, bool for_kernel);
  Status copy(uint32_t stream, void* to, const void* from, uint64_t bytes);
  Status store(uint32_t stream, CUdeviceptr word, uint64_t value);
  // A mark behind everything that the stream got so far, for has_passed().
  Result<uint64_t> mark(uint32_t stream);
  bool has_passed(uint32_t stream, uint64_t mark) const {
    return passed_[stream].load(std::memory_order_acquire) >= mark;
  }
  // A fault of the GPU, after which no mark passes any more.
  Status health() const;
  // Waits until all marks have passed: at most `seconds`; whether they have.
  bool drain(double seconds) const;

 private:
  Copies(const CudaDriver& driver, int device) : driver_(driver), device_(device) {}
  Status make_streams();
  Status prepare_kernel();

  const CudaDriver& driver_;
  const int device_;
  std::array<CUstream, kStreams> streams_{};
  std::array<uint64_t, kStreams> marks_{};
  std::atomic<uint64_t>* passed_ = nullptr;  // pinned, one a stream: the GPU stores them
  // Lists for the kernel: the GPU's copy of one for each stream, and a few of the host's, each until its mark has passed.
  static constexpr uint32_t kLists = 4;
  CopyStretches kernel_ = nullptr;
  Stretch* host_lists_ = nullptr;
  CUdeviceptr gpu_lists_ = 0;
  std::array<std::array<uint64_t, kLists>, kStreams> list_marks_{};
  std::array<uint32_t, kStreams> next_list_{};
};

// Host memory as the GPU's copies and stores reach it, while this lives.
class Pinned {
 public:
  Pinned() = default;
  Pinned(Pinned&& other) noexcept { *this = std::move(other); }
  Pinned& operator=(Pinned&& other) noexcept;
  ~Pinned() { release(); }

  static Result<Pinned> make(const Copies& copies, void* data, uint64_t bytes);
  CUdeviceptr at(const void* host) const {
    return device_ + static_cast<CUdeviceptr>(static_cast<const char*>(host) - static_cast<char*>(data_));
  }
  bool is_held() const { return data_ != nullptr; }
  void release();

 private:
  const Copies* copies_ = nullptr;
  void* data_ = nullptr;
  CUdeviceptr device_ = 0;
};

}  // namespace weft::provider::cuda
