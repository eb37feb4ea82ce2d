// SPDX-License-Identifier: Apache-2.0
//
// Pages of the host that a GPU's kernels may use: memory of a NIC's queues, and registers of the NIC. Ranges may share
// pages. Not run on hardware.
//   WEFT_TRY_ASSIGN(auto pages, PinnedPages::create(device));
//   WEFT_TRY(pages->pin(ring, bytes, PinnedPages::kMemory)); ... pages->unpin(ring, bytes);
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/device.h"
#include "base/status.h"

namespace weft::ibgda {

class PinnedPages {
 public:
  enum Kind { kMemory, kRegister };
  static Result<std::unique_ptr<PinnedPages>> create(Device device);
  ~PinnedPages();
  PinnedPages(const PinnedPages&) = delete;

  // Kernels find the range at its own address afterwards. Errors: kUnsupported, kSystem with the driver's words.
  Status pin(const void* at, uint64_t bytes, Kind kind);
  void unpin(const void* at, uint64_t bytes);

 private:
  explicit PinnedPages(Device device) : device_(device) {}
  Status pin_page(uint64_t page, Kind kind);
  void unpin_page(uint64_t page);

  const Device device_;
  std::map<uint64_t, int> uses_;  // by page
};

// A sentence for people: who will ring a NIC's doorbells, the GPU or a host thread, by the driver's attributes.
std::string doorbell_expectation();

}  // namespace weft::ibgda
