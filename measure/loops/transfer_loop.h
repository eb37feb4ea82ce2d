// SPDX-License-Identifier: Apache-2.0
//
// The loops of `weft bench transfer`, in C++ so that they measure the engine and not Python.
// The client runs a Load; the server answers its "are you there" immediates in serve(), so that a repetition
// ends when everything it wrote is visible over there:
//   std::vector<double> seconds = *measure(engine, memory, remote, peer, load, until);
// Threads: one caller per engine while a loop runs.
#pragma once

#include <vector>

#include "transfer/engine.h"

namespace weft::transfer {

constexpr uint32_t kEchoImm = kImmIdMax;      // the server answers it with the same
constexpr uint32_t kStopImm = kImmIdMax - 1;  // the server leaves serve()

enum class LoadKind { kWrite, kRead, kPaged, kScatter, kLatency };

// One repetition is `count` operations of `bytes`, at most `window` under way, then one echo. kLatency:
// `count` round trips of a write of `bytes` with an immediate. kPaged: one operation of `count` pages, picked
// at random on both sides out of `pool` times as many. kScatter: `count` scatters of 8 targets of `bytes` / 8
// each.
struct Load {
  LoadKind kind = LoadKind::kWrite;
  uint64_t bytes = 0;
  uint32_t count = 1;
  uint32_t window = 64;
  uint32_t pool = 1;
  uint32_t repeats = 5;
  uint32_t rail = kAnyRail;  // pin the engine's operations to one
};

// Where operation i begins in a buffer of `room` bytes: one after another, then round again.
uint64_t place_of(uint64_t i, uint64_t bytes, uint64_t room);
// `count` different page numbers below pool * count, the same on every run; different for different seeds.
std::vector<uint32_t> random_pages(uint32_t count, uint32_t pool, uint32_t seed);

// Seconds of each repetition. Errors: those of the operations.
Result<std::vector<double>> measure(Engine& engine, const std::shared_ptr<Memory>& memory,
                                    const std::shared_ptr<Remote>& remote, const Load& load, Deadline until);
// The echoes that a server has answered on one connection so far: immediates are counted over all of its sessions.
struct Answered {
  uint64_t echoes = 0;
  uint64_t stops = 0;
};
// Answers echoes until the peer says stop; `memory` and `remote` carry the answers.
Status serve(Engine& engine, const std::shared_ptr<Peer>& peer, const std::shared_ptr<Memory>& memory,
             const std::shared_ptr<Remote>& remote, Answered& answered, Deadline until);
Status stop_serving(Engine& engine, const std::shared_ptr<Peer>& peer, Deadline until);

// The same loads as plain fi_writemsg() and fi_readmsg() on one endpoint, without an engine: the baseline.
class RawLoop {
 public:
  static Result<std::unique_ptr<RawLoop>> open(provider::Provider& provider, const provider::Nic& nic,
                                               void* data, uint64_t bytes);
  ~RawLoop();
  Status check_owner() const { return owner_.check("loop"); }
  std::string address() const;  // bytes for connect() of the other side
  Status connect(std::string_view address);
  // `beside`: the same other side as an engine knows it; the loop ends when that is lost.
  Result<std::vector<double>> measure(const Load& load, std::shared_ptr<Peer> beside, Deadline until);
  Status serve(Deadline until);
  Status stop_serving(Deadline until);

 private:
  struct Impl;
  explicit RawLoop(std::unique_ptr<Impl> impl);
  const OwnerProcess owner_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::transfer
