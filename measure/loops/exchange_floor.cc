// SPDX-License-Identifier: Apache-2.0
#include "measure/loops/exchange_floor.h"

#include <algorithm>

#include "base/log.h"
#include "jit/mesh_launch.h"
#include "kernels/core/carver.h"

namespace weft {
namespace {

constexpr uint32_t kGpuThreads = 512;
constexpr uint64_t kMostLineBytes = 1 << 20;

uint64_t line_bytes(uint64_t bytes) {
  return uint64_t{lines_of(static_cast<uint32_t>(bytes / sizeof(Vec16)))} * kLineBytes;
}

}  // namespace

Result<std::unique_ptr<ExchangeFloor>> ExchangeFloor::create(std::shared_ptr<Communicator> comm,
                                                             uint64_t bytes) {
  const auto ranks = static_cast<uint64_t>(comm->size());
  if (ranks < 2) return Status::invalid("exchange floor: got {} ranks, allowed: 2 and more", ranks);
  if (bytes == 0 || bytes > uint64_t{1} << 35)
    return Status::invalid("bytes: got {}, allowed: 1 to {}", bytes, uint64_t{1} << 35);
  WEFT_TRY_ASSIGN(const ComputeLimits limits, compute_limits(*comm));
  const Device device = comm->device();
  const uint64_t stride = (bytes + 127) / 128 * 128;
  ExchangeFloorArgs at{};
  Carver carver;
  at.launches_at = carver.take(kFloorBlocks * 8);
  at.stamps_at = carver.take(uint64_t{kFloorKept} * kFloorBlocks * sizeof(FloorStamp));
  at.flags_at = carver.take(ranks * kFloorBlocks * kFloorPipes * 8);
  at.stride = stride;
  at.line_stride = line_bytes(std::min(stride, kMostLineBytes));
  at.lines_at = carver.take(2 * ranks * at.line_stride, 128);
  at.src_at = carver.take((ranks - 1) * stride, 128);
  at.dst_at = carver.take(ranks * stride, 128);
  const uint64_t all = carver.end();
  WEFT_TRY_ASSIGN(auto window, Window::create(std::move(comm), all));
  for (uint64_t rank = 0; rank < ranks; ++rank)
    if (!window->base(static_cast<int>(rank)))
      return Status::make(Code::kUnsupported, "exchange floor: rank {} is not mapped", rank);
  std::unique_ptr<ExchangeFloor> floor(new ExchangeFloor(std::move(window)));
  WEFT_TRY_ASSIGN(floor->fault_, HostVisible::create(device, sizeof(FaultBox)));
  floor->args_ = at;
  floor->most_bytes_ = stride;
  // On the host all threads run at once, however many there are.
  floor->most_blocks_ = limits.is_cuda ? std::min(limits.max_blocks, kFloorBlocks) : kFloorBlocks;
  return floor;
}

uint64_t ExchangeFloor::most_line_bytes() const {
  return std::min(most_bytes_, kMostLineBytes);
}

Status ExchangeFloor::check_load(const FloorLoad& load) const {
  const bool is_lines = load.way == FloorWay::kLines;
  const uint64_t most = is_lines ? most_line_bytes() : most_bytes_;
  const auto others = static_cast<uint32_t>(window_->communicator()->size() - 1);
  if (load.bytes == 0 || load.bytes % 16 != 0 || load.bytes > most)
    return Status::invalid("bytes: got {}, allowed: multiples of 16 from 16 to {}", load.bytes, most);
  const uint32_t least = is_lines ? others : 1;
  if (load.peers < least || load.peers > others)
    return Status::invalid("peers: got {}, allowed: {} to {}", load.peers, least, others);
  if (load.blocks == 0 || load.blocks > most_blocks_)
    return Status::invalid("blocks: got {}, allowed: 1 to {}", load.blocks, most_blocks_);
  return Status();
}

Status ExchangeFloor::run(const FloorLoad& load, void* stream) {
  WEFT_TRY(check_load(load));
  const Communicator& comm = *window_->communicator();
  const bool is_host = comm.device().is_host();
  const bool is_bulk = load.way == FloorWay::kBulk;
  ExchangeFloorArgs args = args_;
  args.wait = {static_cast<uint64_t>(comm.timeout_s() * 1e9), fault_->at<FaultBox>(0),
               static_cast<uint32_t>(comm.rank()), 0};
  args.bytes = load.bytes;
  args.peers = load.peers;
  args.waits = load.waits ? 1 : 0;
  const auto vecs = static_cast<uint32_t>(load.bytes / sizeof(Vec16));
  const uint32_t items = load.way == FloorWay::kLines ? lines_of(vecs) : vecs;
  args.share = items / load.blocks;
  args.longer = items % load.blocks;
  const ExchangeFloorShape shape{static_cast<int64_t>(load.way)};
  KernelKey key{"measure/kernels/exchange_floor.cuh", "exchange_floor_run", "ExchangeFloorArgs"};
  key.shape = {{"way", shape.way}};
  Launch how;
  how.blocks = load.blocks;
  how.threads_per_block = is_host ? 1 : is_bulk ? kFloorPipes * 32 : kGpuThreads;
  how.shared_bytes = !is_host && is_bulk ? kFloorPipes * (128 + kFloorStages * kFloorPieceBytes) : 0;
  how.stream = stream;
  return launch_on_mesh(*window_, std::move(key), how, &args, sizeof(args), &shape);
}

Status ExchangeFloor::check() const {
  const auto& fault = *fault_->at<FaultBox>(0);
  if (load_acquire(&fault.raised) == 0) return Status();
  return logged(
      Status::make(Code::kPeerLost, "rank {}, exchange floor: waited {} ms for rank {}: expected {}, saw {}",
                   fault.self, fault.waited_ns / 1'000'000, fault.peer, fault.expected, fault.seen));
}

}  // namespace weft
