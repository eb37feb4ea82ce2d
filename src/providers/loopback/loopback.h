// SPDX-License-Identifier: Apache-2.0
//
// The loopback provider: rails of one process that reach each other through memory, with faults on request.
//   auto network = std::make_shared<Loopback>(Loopback::Options{.plan = {.seed = 7, .reorder = 0.3}});
//   auto a = network->open(network->probe()[0], {}), b = network->open(network->probe()[0], {});
// It is the provider of tests and of machines with nothing else. Deterministic: with one seed and the same
// sequence of calls, the same packets suffer the same faults. A packet is applied when its target polls, as
// on a NIC with manual progress; its completion then travels back.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "providers/provider.h"

namespace weft::provider {

// Probabilities are per packet, 0 to 1.
struct FaultPlan {
  uint64_t seed = 1;
  double drop = 0;       // lost: no effect, no completion
  double duplicate = 0;  // arrives twice
  double reorder = 0;    // overtaken by up to reorder_window later packets
  double fail = 0;       // not applied; the sender gets an error
  uint32_t reorder_window = 8;
  double delay = 0;  // held back for delay_polls polls of the target
  uint32_t delay_polls = 50;
  uint64_t dies_after = 0;      // a rail falls silent after sending so many packets; 0: never
  bool spare_messages = false;  // faults strike writes and reads only
  uint32_t most_writes = 0;     // of a rail under way; one more fails. 0: any number
};

// Of "seed=7,reorder=0.3,delay=0.2": names as above, with commas between; the rest keeps its default. Errors: kInvalid
// with the names.
Result<FaultPlan> parse_fault_plan(std::string_view words);

class LoopbackRail;

class Loopback : public Provider, public std::enable_shared_from_this<Loopback> {
 public:
  struct Options {
    FaultPlan plan;
    Caps caps = {.imm_bits = 64, .source = Source::kRoute};
    uint32_t nics = 4;
    uint32_t pages_per_post = 1;
  };
  Loopback() : Loopback(Options()) {}
  explicit Loopback(Options options);
  ~Loopback() override;

  std::string name() const override { return "loopback"; }
  std::vector<Nic> probe() override;
  Result<std::unique_ptr<Rail>> open(const Nic& nic, const RailOptions& options) override;

  // From now on, or from the next packet on, as the new plan says. Threads: any.
  void set_plan(const FaultPlan& plan);
  // Breaks the cable of a rail: operations to and from it fail at once, and those under way are lost.
  void unplug(std::string_view address);
  // The rail with this address neither sends nor receives any more: what a killed process looks like from
  // outside.
  void kill(std::string_view address);

 private:
  friend class LoopbackRail;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::provider
