// SPDX-License-Identifier: Apache-2.0
//
// A FifoBench is a proxy's FIFOs by themselves: kernels push commands into them, this takes them, and nothing is behind.
//   WEFT_TRY_ASSIGN(auto bench, FifoBench::create(device, 2048));
//   launch something on bench->mesh(); WEFT_TRY_ASSIGN(seconds, bench->take(4, 1 << 20));
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "transports/proxy/proxy.h"
#include "transports/transport.h"

namespace weft::proxy {

class FifoBench {
 public:
  static Result<std::unique_ptr<FifoBench>> create(Device device, uint64_t capacity);

  // One proxy, and as many peers as there can be.
  MeshPart mesh() const;
  // Takes what `producers` threads push: 0, 1, ... `count` - 1 each, to the peer that is their number. Seconds from
  // the first command to the last. Errors: kSystem when something else comes, or nothing.
  Result<double> take(uint32_t producers, uint64_t count);
  // Takes `count` flushes and answers each at once: when, in ns of now_ns(). Errors: the same.
  Result<std::vector<uint64_t>> answer(uint64_t count);

 private:
  explicit FifoBench(std::unique_ptr<FifoReader> reader) : reader_(std::move(reader)) {}
  Status pop(Command& command, uint64_t taken);
  std::unique_ptr<FifoReader> reader_;
  std::unique_ptr<LocalMemory> fifos_;    // as device code reads them
  std::unique_ptr<HostVisible> visible_;  // the answered flushes, a word of zeros, and the fault box
};

}  // namespace weft::proxy
