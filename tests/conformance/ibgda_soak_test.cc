// SPDX-License-Identifier: Apache-2.0
//
// Random operations of many warps over queues of a model of a NIC that does its worst: every byte and every counter is
// looked at as soon as its signal is there. A signal that comes early or never, an entry that is lost, done twice or
// written over: all show as wrong bytes, wrong counts, or a wait that ends.
//   weft_tests --gtest_also_run_disabled_tests --gtest_filter='IbgdaSoak.DISABLED_TenMillionOperations'
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"

namespace weft {
namespace {

using testing::mesh_of;
using testing::NicModel;
using testing::NicPlan;
using testing::run_thread_ranks;
using testing::Settings;

constexpr double kTimeout_s = 120;
constexpr uint32_t kRanks = 3, kWarps = 2, kPuts = 6;
constexpr uint64_t kPutBytes = 512, kWindow = 256 << 10;

// Where what goes from a warp of one rank to the same warp of another stands, on both sides; a round of two.
struct Places {
  static uint64_t pair(uint32_t rank, uint32_t warp) { return rank * kWarps + warp; }
  static uint64_t signal(uint64_t pair) { return 64 * pair; }     // the round that is there
  static uint64_t added(uint64_t pair) { return 64 * pair + 8; }  // counter
  static uint64_t data(uint64_t pair, uint64_t round) {
    return 8192 + (pair * 2 + round % 2) * kPuts * kPutBytes;
  }
  static uint64_t source(uint64_t pair, uint64_t round) { return kWindow / 2 + data(pair, round); }
};
static_assert(8192 + 2 * kRanks * kWarps * kPuts * kPutBytes <= kWindow / 2);

// What both sides draw alike: how a round between two warps goes.
struct Round {
  uint32_t puts;
  uint64_t bytes[kPuts];
  uint64_t adds;
  bool flushes;

  static Round draw(uint64_t seed, uint32_t from, uint32_t to, uint32_t warp, uint64_t round) {
    std::minstd_rand random(
        static_cast<uint32_t>(seed * 7919 + from * 131 + to * 17 + warp + round * 104729));
    random.discard(3);
    Round made{1 + static_cast<uint32_t>(random() % kPuts), {}, random() % 16, random() % 4 == 0};
    for (uint64_t& bytes : made.bytes) bytes = 16 * (1 + random() % (kPutBytes / 16));
    return made;
  }
  // Calls of a channel.
  uint64_t operations() const { return puts + adds + flushes; }
};

uint64_t pattern(uint32_t from, uint32_t to, uint64_t round, uint32_t put, uint64_t word) {
  return round * 0x9e3779b97f4a7c15u + (uint64_t{from} << 56) + (uint64_t{to} << 48) + (put << 16) + word;
}

class Warps {
 public:
  Warps(const IbgdaMesh& mesh, uint32_t warp, uint64_t seed) : mesh_(mesh), warp_(warp), seed_(seed) {}

  // Returns what went wrong, or nothing.
  std::string run(uint64_t rounds) {
    host_thread.block = warp_;
    uint64_t added[kRanks] = {};
    for (uint64_t round = 1; round <= rounds; ++round) {
      for (uint32_t peer = 0; peer < kRanks; ++peer)
        if (peer != mesh_.rank()) send(peer, round);
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        if (peer == mesh_.rank()) continue;
        const std::string wrong = receive(peer, round, added[peer]);
        if (!wrong.empty()) return text("rank {}, warp {}, round {}: {}", mesh_.rank(), warp_, round, wrong);
      }
    }
    return "";
  }
  uint64_t operations() const { return operations_; }

 private:
  uint64_t* word(uint64_t at) const { return reinterpret_cast<uint64_t*>(mesh_.local() + at); }

  // The source of two rounds ago is free: the peer has told of a round that it began after it had read that.
  void send(uint32_t peer, uint64_t round) {
    const uint64_t theirs = Places::pair(mesh_.rank(), warp_), mine = Places::pair(peer, warp_);
    const Round plan = Round::draw(seed_, mesh_.rank(), peer, warp_, round);
    auto channel = mesh_.to(peer);
    for (uint64_t i = 0; i < plan.adds; ++i) channel.signal_add(Places::added(theirs), i + 1);
    for (uint32_t put = 0; put < plan.puts; ++put) {
      const uint64_t src = Places::source(mine, round) + put * kPutBytes;
      const uint64_t dst = Places::data(theirs, round) + put * kPutBytes;
      for (uint64_t i = 0; i < plan.bytes[put] / 8; ++i)
        word(src)[i] = pattern(mesh_.rank(), peer, round, put, i);
      if (put + 1 < plan.puts)
        channel.put(Warp{}, dst, src, plan.bytes[put]);
      else
        channel.put_with_signal(Warp{}, dst, src, plan.bytes[put], Places::signal(theirs), round);
    }
    if (plan.flushes) {  // nothing may be read from there any more
      channel.flush();
      std::memset(mesh_.local() + Places::source(mine, round), 0xEE, kPuts * kPutBytes);
    }
    operations_ += plan.operations();
  }

  std::string receive(uint32_t peer, uint64_t round, uint64_t& added) {
    const uint64_t pair = Places::pair(peer, warp_);
    const Round plan = Round::draw(seed_, peer, mesh_.rank(), warp_, round);
    uint64_t signalled = 0;
    const auto is_there = [&] { return (signalled = load_acquire(word(Places::signal(pair)))) >= round; };
    if (!wait_until(Deadline::after_s(kTimeout_s), is_there))
      return text("rank {} signalled round {}", peer, signalled);
    if (signalled > round + 1) return text("rank {} signalled round {}", peer, signalled);
    for (uint32_t put = 0; put < plan.puts; ++put)
      for (uint64_t i = 0; i < plan.bytes[put] / 8; ++i) {
        const uint64_t at = Places::data(pair, round) + put * kPutBytes;
        if (word(at)[i] != pattern(peer, mesh_.rank(), round, put, i))
          return text("put {} of rank {}: word {} of {} is wrong", put, peer, i, plan.bytes[put] / 8);
      }
    added += plan.adds * (plan.adds + 1) / 2;
    const Round next = Round::draw(seed_, peer, mesh_.rank(), warp_, round + 1);
    const uint64_t seen = load_acquire(word(Places::added(pair)));
    if (seen < added || seen > added + next.adds * (next.adds + 1) / 2)
      return text("rank {} has added {}, expected {}", peer, seen, added);
    return "";
  }

  const IbgdaMesh& mesh_;
  const uint32_t warp_;
  const uint64_t seed_;
  uint64_t operations_ = 0;
};

// A round is some 135 calls of channels, of all ranks and warps together.
void soak(NicPlan plan, const char* depth, const char* queues, uint64_t rounds) {
  Settings::set({{"WEFT_IBGDA_DEPTH", depth}, {"WEFT_IBGDA_QUEUES", queues}});
  auto model = std::make_unique<NicModel>(plan);
  ibgda::set_nic_source(model.get());
  std::atomic<uint64_t> done{0}, wrapped{0};
  run_thread_ranks(kRanks, [&](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, kTimeout_s, "ibgda");
    ASSERT_EQ(comm.status().message(), "");
    auto window = Window::create(*comm, kWindow);
    ASSERT_EQ(window.status().message(), "");
    const auto mesh = mesh_of<IbgdaMesh>(**window);
    ASSERT_TRUE((*comm)->barrier().ok());
    std::vector<std::thread> warps;
    for (uint32_t warp = 0; warp < kWarps; ++warp)
      warps.emplace_back([&, warp] {
        Warps one(mesh, warp, plan.seed);
        EXPECT_EQ(one.run(rounds), "") << "seed " << plan.seed;
        done += one.operations();
      });
    for (std::thread& warp : warps) warp.join();
    for (uint32_t peer = 0; peer < kRanks; ++peer)
      if (peer != mesh.rank()) wrapped += mesh.queues[peer * mesh.queues_per_peer].state->published >> 16;
    EXPECT_EQ((*comm)->port_link()->status().message(), "");
    EXPECT_TRUE((*comm)->barrier().ok());
  });
  EXPECT_EQ(model->failures(), "");
  ::testing::Test::RecordProperty("operations", std::to_string(done));
  std::printf(
      "seed %llu, %s entries, %s queues to a peer: %llu operations, %llu entries, indices wrapped %llu "
      "times\n",
      static_cast<unsigned long long>(plan.seed), depth, queues, static_cast<unsigned long long>(done),
      static_cast<unsigned long long>(model->entries()), static_cast<unsigned long long>(wrapped));
  ibgda::set_nic_source(nullptr);
  Settings::clear({"WEFT_IBGDA_DEPTH", "WEFT_IBGDA_QUEUES"});
}

TEST(IbgdaSoak, RandomOperations) {
  soak({.seed = 51, .passes = 0.3}, "4", "1", 150);
  soak({.seed = 52, .passes = 0.5, .shares_completion = true}, "16", "1", 150);
  soak({.seed = 53, .passes = 0.1, .stalls = 1e-3, .stall_s = 0.01, .is_rung_by_host = true, .put_shift = 7},
       "8", "2", 150);
}

// Minutes. Stalls of a second, merged doorbells, tiny rings, many wraps of 16 bits.
TEST(IbgdaSoak, DISABLED_TenMillionOperations) {
  soak({.seed = 61, .passes = 0.05, .stalls = 2e-8, .stall_s = 1.5}, "4", "1", 25'500);
  soak({.seed = 62, .passes = 0.1, .stalls = 2e-8, .stall_s = 1.5, .shares_completion = true}, "16", "1",
       25'500);
  soak({.seed = 63, .passes = 0.05, .stalls = 2e-8, .stall_s = 1.5, .put_shift = 7}, "64", "2", 25'500);
}

}  // namespace
}  // namespace weft
