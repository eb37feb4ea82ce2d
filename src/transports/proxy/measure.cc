// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/measure.h"

#include "base/deadline.h"
#include "transports/proxy/channel.cuh"

namespace weft::proxy {
namespace {

constexpr double kTimeout_s = 60;
constexpr uint64_t kAnsweredAt = 0, kZerosAt = 128, kFaultAt = 256;
constexpr uint64_t kRoom = uint64_t{1} << 20;  // of a window that nobody writes to

}  // namespace

Result<std::unique_ptr<FifoBench>> FifoBench::create(Device device, uint64_t capacity) {
  WEFT_TRY_ASSIGN(std::unique_ptr<FifoReader> reader, FifoReader::create(device, capacity));
  std::unique_ptr<FifoBench> bench(new FifoBench(std::move(reader)));
  WEFT_TRY_ASSIGN(bench->fifos_, LocalMemory::create(device, kFifosPerProxy * sizeof(Fifo)));
  for (uint32_t i = 0; i < kFifosPerProxy; ++i)
    WEFT_TRY(bench->fifos_->write(i * sizeof(Fifo), &bench->reader_->fifo(i), sizeof(Fifo)));
  WEFT_TRY_ASSIGN(bench->visible_, HostVisible::create(device, kFaultAt + sizeof(FaultBox)));
  return bench;
}

MeshPart FifoBench::mesh() const {
  const ProxyMesh mesh{fifos_->at<Fifo>(0),
                       visible_->at<uint64_t>(kAnsweredAt),
                       visible_->at<std::byte>(kZerosAt),
                       0,
                       kRoom,
                       {},
                       static_cast<uint64_t>(kTimeout_s * 1e9),
                       visible_->at<FaultBox>(kFaultAt),
                       0,
                       kPeersMax,
                       1,
                       0};
  return mesh_part("ProxyMesh", mesh);
}

// The command after `taken` others. Who finds nothing looks away for about 100 ns, as a proxy does for longer: a line that is looked at
// after every store goes to and fro for each of its four commands.
Status FifoBench::pop(Command& command, uint64_t taken) {
  uint64_t position = 0;
  const auto comes = [&] {
    if (reader_->pop(command, position)) return true;
    for (int i = 0; i < 4; ++i) (void)now_ns();
    return false;
  };
  if (!comes() && !wait_until(Deadline::after_s(kTimeout_s), comes))
    return Status::make(Code::kSystem, "FIFO: expected command {}, saw none", taken);
  return Status();
}

Result<double> FifoBench::take(uint32_t producers, uint64_t count) {
  std::vector<uint64_t> next(producers, 0);
  Deadline::Clock::time_point start{};
  for (uint64_t taken = 0; taken < producers * count; ++taken) {
    Command command{};
    WEFT_TRY(pop(command, taken));
    if (taken == 0) start = Deadline::Clock::now();
    const uint32_t from = peer_of(command);
    if (op_of(command) != Op::kValue || from >= producers || command.a != next[from]++)
      return Status::make(Code::kSystem, "FIFO: command {} is not the one that was pushed", taken);
  }
  const double seconds = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  reader_->publish();
  return seconds;
}

Result<std::vector<uint64_t>> FifoBench::answer(uint64_t count) {
  std::vector<uint64_t> answered;
  for (uint64_t taken = 0; taken < count; ++taken) {
    Command command{};
    WEFT_TRY(pop(command, taken));
    answered.push_back(now_ns());
    if (op_of(command) != Op::kFlush)
      return Status::make(Code::kSystem, "FIFO: command {} is not a flush", taken);
    store_release(visible_->at<uint64_t>(kAnsweredAt), taken + 1);
  }
  reader_->publish();
  return answered;
}

}  // namespace weft::proxy
