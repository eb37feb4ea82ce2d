// SPDX-License-Identifier: Apache-2.0
#include "measure/loops/fifo_load.h"

#include <algorithm>
#include <thread>

#include "jit/jit.h"
#include "measure/kernels/fifo_load.cuh"
#include "measure/loops/fifo_bench.h"
#include "memory/device_memory.h"
#include "memory/host_visible.h"

namespace weft {
namespace {

constexpr uint32_t kWarpsPerBlock = 4, kMaxProducers = 512;

Status launch(Device device, const MeshPart& mesh, const FifoLoadArgs& args) {
  const FifoLoadShape shape;
  const uint32_t warps = std::min(args.producers, kWarpsPerBlock);
  Launch how;
  how.blocks = (args.producers + warps - 1) / warps;
  how.threads_per_block = device.is_host() ? warps : warps * 32;
  KernelKey key{"measure/kernels/fifo_load.cuh", "fifo_load_run", "FifoLoadArgs"};
  key.mesh_type = mesh.type;
  key.threads_per_block = how.threads_per_block;
  WEFT_TRY_ASSIGN(const Kernel* kernel, Jit::of(device).get(key));
  return Jit::of(device).launch(*kernel, how, &args, sizeof args, mesh.value.data(), mesh.value.size(),
                                &shape);
}

// Launches, while another thread takes what the kernel pushes; what that thread returns. A launch that fails leaves
// it to its deadline.
template <class Take>
auto launch_and_take(Device device, const MeshPart& mesh, const FifoLoadArgs& args, Take take)
    -> decltype(take()) {
  decltype(take()) taken = Status::make(Code::kSystem, "FIFO: nothing was taken");
  std::thread taker([&] { taken = take(); });
  const Status launched = launch(device, mesh, args);
  taker.join();
  WEFT_TRY(Status(launched));
  if (!device.is_host()) WEFT_TRY(wait_for_device(device.ordinal));
  return taken;
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

}  // namespace

Result<double> measure_fifo(Device device, uint32_t producers, uint64_t count, uint64_t capacity) {
  if (producers == 0 || producers > kMaxProducers)
    return Status::invalid("producers: got {}, allowed: 1 to {}", producers, kMaxProducers);
  if (count == 0) return Status::invalid("count: got 0, allowed: 1 or more");
  WEFT_TRY_ASSIGN(auto bench, proxy::FifoBench::create(device, capacity));
  FifoLoadArgs args{};
  args.count = count;
  args.producers = producers;
  args.kind = static_cast<uint32_t>(FifoLoadKind::kRate);
  return launch_and_take(device, bench->mesh(), args, [&] { return bench->take(producers, count); });
}

// A GPU's clock differs from the host's by what is not known. But no answer is seen sooner than the last half of a
// look takes to come back, so with the shortest way down taken for that, no way up comes out shorter than it was.
Result<FifoTrips> measure_fifo_trips(Device device, uint64_t count, uint64_t capacity) {
  if (count == 0) return Status::invalid("count: got 0, allowed: 1 or more");
  WEFT_TRY_ASSIGN(auto bench, proxy::FifoBench::create(device, capacity));
  WEFT_TRY_ASSIGN(auto times, HostVisible::create(device, 3 * count * sizeof(uint64_t)));
  FifoLoadArgs args{};
  args.count = count;
  args.asked_ns = times->at<uint64_t>(0);
  args.came_ns = args.asked_ns + count;
  args.looks_ns = args.came_ns + count;
  args.producers = 1;
  args.kind = static_cast<uint32_t>(FifoLoadKind::kTrips);
  WEFT_TRY_ASSIGN(const std::vector<uint64_t> popped,
                  launch_and_take(device, bench->mesh(), args, [&] { return bench->answer(count); }));
  std::vector<double> looks;
  double shortest_down = 1e300;
  for (uint64_t i = 0; i < count; ++i) {
    looks.push_back(static_cast<double>(args.looks_ns[i]));
    shortest_down =
        std::min(shortest_down, static_cast<double>(static_cast<int64_t>(args.came_ns[i] - popped[i])));
  }
  const double ahead = device.is_host() ? 0 : shortest_down - *std::ranges::min_element(looks) / 2;
  FifoTrips trips;
  for (uint64_t i = 0; i < count; ++i) {
    const auto up = static_cast<double>(static_cast<int64_t>(popped[i] - args.asked_ns[i]));
    trips.round_trip_us.push_back(static_cast<double>(args.came_ns[i] - args.asked_ns[i]) * 1e-3);
    trips.push_to_pop_us.push_back((up + ahead) * 1e-3);
  }
  trips.look_us = median(std::move(looks)) * 1e-3;
  return trips;
}

}  // namespace weft
