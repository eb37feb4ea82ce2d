// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/measure.h"

#include <atomic>
#include <thread>

#include "base/deadline.h"
#include "transports/proxy/channel.cuh"
#include "transports/proxy/proxy.h"

namespace weft::proxy {
namespace {

constexpr double kTimeout_s = 60;
constexpr uint64_t kNoWindow = uint64_t{1} << 20;  // nobody writes to it

// What device code is given, with one FIFO and no peer behind it.
struct Bench {
  std::unique_ptr<FifoReader> reader;
  FaultBox fault{};

  ProxyMesh mesh() {
    return {&reader->fifo(), nullptr, nullptr,   kNoWindow, static_cast<uint64_t>(kTimeout_s * 1e9),
            &fault,          0,       kPeersMax, 1,         0};
  }
};

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// Takes `count` commands; take(command) is false for one that should not have come.
template <class Take>
Status take_all(FifoReader& reader, uint64_t count, Take take) {
  const Deadline until = Deadline::after_s(kTimeout_s);
  Command command;
  uint64_t position = 0;
  for (uint64_t taken = 0; taken < count; ++taken) {
    if (!reader.pop(command, position) && !wait_until(until, [&] { return reader.pop(command, position); }))
      return Status::make(Code::kSystem, "FIFO: expected {} commands, saw {}", count, taken);
    if (position != taken || !take(command))
      return Status::make(Code::kSystem, "FIFO: command {} is not the one that was pushed", taken);
  }
  reader.publish();
  return Status();
}

}  // namespace

Result<FifoRun> measure_fifo(uint32_t producers, uint64_t count, uint64_t capacity) {
  if (producers == 0 || producers > kPeersMax)
    return Status::invalid("producers: got {}, allowed: 1 to {}", producers, kPeersMax);
  Bench bench;
  WEFT_TRY_ASSIGN(bench.reader, FifoReader::create(Device{}, capacity));
  const ProxyMesh mesh = bench.mesh();
  std::atomic<uint32_t> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (uint32_t producer = 0; producer < producers; ++producer)
    threads.emplace_back([&, producer] {
      ready.fetch_add(1);
      for (unsigned polls = 0; !go.load(std::memory_order_acquire); ++polls) back_off(polls);
      auto peer = mesh.to(producer);  // told apart by it
      for (uint64_t i = 0; i < count; ++i) peer.put_value(0, i);
    });
  while (ready.load() < producers) sched_yield();
  const auto start = Deadline::Clock::now();
  go.store(true, std::memory_order_release);
  std::vector<uint64_t> next(producers, 0);
  const Status taken = take_all(*bench.reader, producers * count, [&](Command command) {
    const uint32_t from = peer_of(command);
    return from < producers && command.a == next[from]++;
  });
  const FifoRun run{seconds_since(start), {}};
  for (std::thread& thread : threads) thread.join();
  WEFT_TRY(Status(taken));
  return run;
}

Result<FifoRun> measure_push_to_pop(uint64_t count, uint64_t capacity) {
  Bench bench;
  WEFT_TRY_ASSIGN(bench.reader, FifoReader::create(Device{}, capacity));
  const ProxyMesh mesh = bench.mesh();
  std::atomic<uint64_t> taken{0};
  std::thread producer([&] {
    for (uint64_t i = 0; i < count; ++i) {
      for (unsigned polls = 0; taken.load(std::memory_order_acquire) < i; ++polls) back_off(polls);
      mesh.to(0).put_value(0, now_ns());
    }
  });
  const auto start = Deadline::Clock::now();
  FifoRun run;
  const Status status = take_all(*bench.reader, count, [&](Command command) {
    run.push_to_pop_us.push_back(static_cast<double>(now_ns() - command.a) * 1e-3);
    taken.fetch_add(1, std::memory_order_release);
    return true;
  });
  run.seconds = seconds_since(start);
  taken.store(count, std::memory_order_release);
  producer.join();
  WEFT_TRY(Status(status));
  return run;
}

}  // namespace weft::proxy
