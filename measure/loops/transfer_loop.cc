// SPDX-License-Identifier: Apache-2.0
#include "measure/loops/transfer_loop.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "transfer/core.h"

namespace weft::transfer {
namespace {

constexpr uint32_t kScatterWays = 8;

double now_s() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Status timed_out(const char* what) {
  return Status::make(Code::kPeerLost, "measure: {} took too long", what);
}

// One repetition after another over one engine.
class Runner {
 public:
  Runner(Engine& engine, const std::shared_ptr<Memory>& memory, const std::shared_ptr<Remote>& remote,
         const Load& load, Deadline until)
      : engine_(engine), memory_(memory), remote_(remote), load_(load), until_(until) {
    room_ = std::min(memory->bytes(), remote->bytes());
  }

  Result<std::vector<double>> run() {
    WEFT_TRY_ASSIGN(echoes_, engine_.imm_counter(remote_->peer(), kEchoImm));
    WEFT_TRY(echo());
    std::vector<double> seconds;
    for (uint32_t i = 0; i < load_.repeats; ++i) {
      const double start = now_s();
      WEFT_TRY(repeat());
      seconds.push_back(now_s() - start);
    }
    return seconds;
  }

 private:
  Status repeat() {
    if (load_.kind == LoadKind::kLatency) return round_trips();
    auto done = std::make_shared<Counter>();
    const uint32_t operations = load_.kind == LoadKind::kPaged ? 1 : load_.count;
    for (uint32_t i = 0; i < operations; ++i) {
      if (i >= load_.window && done->finished() + load_.window <= i)
        WEFT_TRY(engine_.wait(*done, i - load_.window + 1, until_));
      WEFT_TRY(submit(i, done));
    }
    WEFT_TRY(engine_.wait(*done, operations, until_));
    return echo();
  }

  Status submit(uint32_t i, const std::shared_ptr<Counter>& done) {
    How how;
    how.counter = done;
    how.rail = load_.rail;
    const uint64_t at = place_of(i, load_.bytes, room_);
    switch (load_.kind) {
      case LoadKind::kRead:
        return engine_.read({memory_, at, remote_, at, load_.bytes, std::move(how)}).status();
      case LoadKind::kPaged:
        return submit_pages(std::move(how));
      case LoadKind::kScatter:
        return submit_scatter(at, std::move(how));
      default:
        return engine_.write({memory_, at, remote_, at, load_.bytes, std::move(how)}).status();
    }
  }

  Status submit_pages(How how) {
    if (pages_here_.indices.empty()) {
      pages_here_ = {0, load_.bytes, random_pages(load_.count, load_.pool, 1), 0};
      pages_there_ = {0, load_.bytes, random_pages(load_.count, load_.pool, 2), 0};
    }
    return engine_.write_pages({memory_, pages_here_, remote_, pages_there_, load_.bytes, std::move(how)})
        .status();
  }

  Status submit_scatter(uint64_t at, How how) {
    ScatterRequest request{memory_, {}, std::move(how)};
    const uint64_t each = load_.bytes / kScatterWays;
    for (uint32_t k = 0; k < kScatterWays; ++k)
      request.targets.push_back({remote_, at + k * each, at + (kScatterWays - 1 - k) * each, each});
    return engine_.scatter(std::move(request)).status();
  }

  Status round_trips() {
    for (uint32_t i = 0; i < load_.count; ++i) {
      How how;
      how.imm = kEchoImm;
      WEFT_TRY(engine_.write({memory_, 0, remote_, 0, load_.bytes, std::move(how)}).status());
      WEFT_TRY(engine_.wait_imm(echoes_, ++sent_, until_));
    }
    return {};
  }

  // One round trip of an immediate: afterwards the server has seen all that came before.
  Status echo() {
    How how;
    how.imm = kEchoImm;
    if (sent_ == 0) sent_ = echoes_->value();
    WEFT_TRY(engine_.notify(remote_->peer(), std::move(how)).status());
    return engine_.wait_imm(echoes_, ++sent_, until_);
  }

  Engine& engine_;
  const std::shared_ptr<Memory>& memory_;
  const std::shared_ptr<Remote>& remote_;
  const Load& load_;
  Deadline until_;
  uint64_t room_ = 0;
  uint64_t sent_ = 0;
  std::shared_ptr<ImmCounter> echoes_;
  Pages pages_here_, pages_there_;
};

}  // namespace

uint64_t place_of(uint64_t i, uint64_t bytes, uint64_t room) {
  const uint64_t step = std::max<uint64_t>(bytes, 64);
  const uint64_t places = std::max<uint64_t>(room / step, 1);
  return bytes > room ? 0 : std::min(i % places * step, room - bytes);
}

std::vector<uint32_t> random_pages(uint32_t count, uint32_t pool, uint32_t seed) {
  std::vector<uint32_t> indices(uint64_t{count} * pool);
  std::iota(indices.begin(), indices.end(), 0u);
  std::mt19937 random(seed);
  std::shuffle(indices.begin(), indices.end(), random);
  indices.resize(count);
  return indices;
}

Result<std::vector<double>> measure(Engine& engine, const std::shared_ptr<Memory>& memory,
                                    const std::shared_ptr<Remote>& remote, const Load& load, Deadline until) {
  const uint64_t needs = load.kind == LoadKind::kPaged ? load.bytes * load.count * load.pool : load.bytes;
  if (needs > std::min(memory->bytes(), remote->bytes()))
    return Status::invalid("bytes: got {}, allowed: up to the {} bytes of the buffers", needs,
                           memory->bytes());
  return Runner(engine, memory, remote, load, until).run();
}

Status serve(Engine& engine, const std::shared_ptr<Peer>& peer, const std::shared_ptr<Memory>& memory,
             const std::shared_ptr<Remote>& remote, Answered& answered, Deadline until) {
  WEFT_TRY_ASSIGN(const std::shared_ptr<ImmCounter> echoes, engine.imm_counter(peer, kEchoImm));
  WEFT_TRY_ASSIGN(const std::shared_ptr<ImmCounter> stop, engine.imm_counter(peer, kStopImm));
  while (true) {
    const bool came = engine.core().wait(until, [&] {
      return echoes->value() > answered.echoes || stop->value() > answered.stops || !peer->is_alive();
    });
    if (!came) return timed_out("waiting for an echo");
    if (!peer->is_alive()) return peer->why();
    if (echoes->value() == answered.echoes) {
      ++answered.stops;
      return {};
    }
    ++answered.echoes;
    How how;
    how.imm = kEchoImm;
    WEFT_TRY(engine.write({memory, 0, remote, 0, 8, std::move(how)}).status());
  }
}

Status stop_serving(Engine& engine, const std::shared_ptr<Peer>& peer, Deadline until) {
  How how;
  how.imm = kStopImm;
  WEFT_TRY_ASSIGN(const std::shared_ptr<Transfer> transfer, engine.notify(peer, std::move(how)));
  return engine.wait(transfer, until);
}

}  // namespace weft::transfer
