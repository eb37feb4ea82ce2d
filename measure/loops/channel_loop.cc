// SPDX-License-Identifier: Apache-2.0
#include "measure/loops/channel_loop.h"

#include <algorithm>

#include "base/log.h"
#include "jit/mesh_launch.h"

namespace weft {
namespace {

constexpr uint64_t kSignalAt = 0, kAddedAt = 128;  // words of the window

Status fault_status(const FaultBox& fault) {
  if (load_acquire(&fault.raised) == 0) return Status();
  return logged(
      Status::make(Code::kPeerLost, "rank {}, channel loop: waited {} ms for rank {}: expected {}, saw {}",
                   fault.self, fault.waited_ns / 1'000'000, fault.peer, fault.expected, fault.seen));
}

}  // namespace

Result<std::unique_ptr<ChannelLoop>> ChannelLoop::create(std::shared_ptr<Communicator> comm, uint64_t bytes) {
  if (comm->size() != 2) return Status::invalid("channel loop: got {} ranks, allowed: 2", comm->size());
  const Device device = comm->device();
  WEFT_TRY_ASSIGN(auto window, Window::create(std::move(comm), header_bytes() + 2 * bytes));
  std::unique_ptr<ChannelLoop> loop(new ChannelLoop(std::move(window)));
  WEFT_TRY_ASSIGN(loop->fault_, HostVisible::create(device, sizeof(FaultBox)));
  if (!device.is_host()) {
    WEFT_TRY_ASSIGN(loop->stream_, OwnStream::create(device.ordinal));
  }
  return loop;
}

uint64_t ChannelLoop::room() const {
  return (window_->bytes() - header_bytes()) / 2 / 16 * 16;
}

Result<uint64_t> ChannelLoop::added() const {
  const Communicator& comm = *window_->communicator();
  const std::byte* word = window_->local() + kAddedAt;
  if (comm.device().is_host() || comm.sharing() == Sharing::kCudaPinned)
    return load_acquire(reinterpret_cast<const uint64_t*>(word));
  uint64_t value = 0;
  WEFT_TRY(copy_from_device(comm.device().ordinal, &value, word, sizeof value));
  return value;
}

Result<std::vector<double>> ChannelLoop::run(const ChannelLoad& load) {
  if (load.bytes % 16 != 0 || load.bytes > room())
    return Status::invalid("bytes: got {}, allowed: multiples of 16 up to {}", load.bytes, room());
  const bool is_seen = load.call != ChannelCall::kPut && load.call != ChannelCall::kPutFlush;
  if (load.way == ChannelWay::kRoundTrip && !is_seen)
    return Status::invalid("call: got one that the peer does not see, allowed for round trips: signals");
  Communicator& comm = *window_->communicator();
  WEFT_TRY_ASSIGN(auto times,
                  HostVisible::create(comm.device(), std::max(1u, load.repeats) * sizeof(uint64_t)));
  auto* fault = fault_->at<FaultBox>(0);
  *fault = {};
  const auto rank = static_cast<uint32_t>(comm.rank());
  ChannelLoopArgs args{};
  args.wait = {static_cast<uint64_t>(comm.timeout_s() * 1e9), fault, rank, 0};
  args.nanoseconds = times->at<uint64_t>(0);
  args.signal_at = kSignalAt;
  args.added_at = kAddedAt;
  args.src_at = src_at();
  args.dst_at = dst_at();
  args.bytes = load.bytes;
  args.said = said_;
  args.added = added_;
  args.places = static_cast<uint32_t>(std::clamp<uint64_t>(load.bytes ? room() / load.bytes : 1, 1, 1 << 20));
  args.peer = 1 - rank;
  args.is_first = rank == 0;
  args.call = static_cast<uint32_t>(load.call);
  args.way = static_cast<uint32_t>(load.way);
  args.count = load.count;
  args.repeats = load.repeats;
  const ChannelLoopShape shape;
  KernelKey key{"measure/kernels/channel_loop.cuh", "channel_loop_run", "ChannelLoopArgs"};
  Launch how;
  how.threads_per_block = comm.device().is_host() ? 1 : 32;  // one warp
  if (stream_) how.stream = stream_->get();
  // Memory and code are there before any kernel waits: what a GPU's driver does for one rank can wait for the other's.
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(*window_, std::move(key), how));
  WEFT_TRY(comm.barrier());
  WEFT_TRY(launch_on_mesh(*window_, *kernel, how, &args, sizeof(args), &shape));
  if (stream_) WEFT_TRY(stream_->wait());
  WEFT_TRY(fault_status(*fault));
  // As the kernel counts; every repetition meets once, one-way ones meet twice.
  const bool is_round_trip = load.way == ChannelWay::kRoundTrip;
  const bool adds = load.call == ChannelCall::kAdd;
  said_ += uint64_t{load.repeats} * (is_round_trip ? 1 + (adds ? 0 : load.count) : 2);
  added_ += adds && (is_round_trip || rank != 0) ? uint64_t{load.repeats} * load.count : 0;
  std::vector<double> seconds(load.repeats);
  for (uint32_t i = 0; i < load.repeats; ++i) seconds[i] = static_cast<double>(args.nanoseconds[i]) * 1e-9;
  return seconds;
}

}  // namespace weft
