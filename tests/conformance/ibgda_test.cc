// SPDX-License-Identifier: Apache-2.0
//
// What the ibgda transport promises beyond the channel suite, over a model of the NIC: how often it rings, that many
// warps may share a queue, and what becomes of a queue that breaks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"
#include "transports/ibgda/caps.h"
#include "transports/ibgda/queues.h"

namespace weft {
namespace {

using ibgda::Syndrome;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::mesh_of;
using testing::NicModel;
using testing::NicPlan;
using testing::run_thread_ranks;
using testing::Settings;

constexpr double kTimeout_s = 30;
constexpr uint64_t kWindow = 256 << 10;

// Whether a queue's fault box may be read; the host may have raised it as well as a channel.
bool is_raised(const ibgda::Queue& queue) {
  return load_acquire(&queue.fault->raised) != 0;
}

// Ranks as threads, each with a window, over NICs with `plan`.
class Ibgda : public ::testing::Test {
 protected:
  struct Rank {
    std::shared_ptr<Communicator> comm;
    std::unique_ptr<Window> window;
    IbgdaMesh mesh;
    uint64_t* word(uint64_t offset) const { return reinterpret_cast<uint64_t*>(mesh.local() + offset); }
    bool wait(uint64_t offset, uint64_t want) const {
      return wait_until(Deadline::after_s(kTimeout_s), [&] { return load_acquire(word(offset)) >= want; });
    }
    const ibgda::Queue& queue(int peer) const {
      return mesh.queues[static_cast<uint32_t>(peer) * mesh.queues_per_peer];
    }
    Status meet() const { return comm->barrier(); }
  };

  void use(NicPlan plan, const char* depth = "16", const char* queues = "1") {
    Settings::set({{"WEFT_IBGDA_DEPTH", depth}, {"WEFT_IBGDA_QUEUES", queues}});
    model_ = std::make_unique<NicModel>(plan);
    ibgda::set_nic_source(model_.get());
  }
  void TearDown() override {
    EXPECT_EQ(model_->failures(), "");
    ibgda::set_nic_source(nullptr);
    Settings::clear({"WEFT_IBGDA_DEPTH", "WEFT_IBGDA_QUEUES"});
  }

  template <class Body>
  void on_ranks(int ranks, Body body, double timeout_s = kTimeout_s, const char* transport = "ibgda") {
    run_thread_ranks(ranks, [&](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, Device{}, timeout_s, transport);
      ASSERT_EQ(comm.status().message(), "");
      auto window = Window::create(*comm, kWindow);
      ASSERT_EQ(window.status().message(), "");
      Rank rank{*comm, std::move(*window), {}};
      rank.mesh = mesh_of<IbgdaMesh>(*rank.window);
      body(rank);
    });
  }

  // Three warps of rank 0 post so many puts and signals each to the queue to rank 1, which sees all of them.
  void share_a_queue(uint64_t times) {
    on_ranks(2, [=](Rank& rank) {
      constexpr uint32_t kWarps = 3;
      std::vector<std::thread> warps;
      for (uint32_t warp = 0; warp < kWarps && rank.mesh.rank() == 0; ++warp)
        warps.emplace_back([&, warp] {
          const uint64_t src = 65536 + warp * 64, dst = 8192 + warp * 64;
          auto channel = rank.mesh.to(1);
          for (uint64_t i = 1; i <= times; ++i) {
            channel.put_with_signal(Warp{}, dst, src, 64, 64 + 8 * warp, i);
            channel.signal_add(8, 1);
          }
        });
      if (rank.mesh.rank() == 1) {
        EXPECT_TRUE(rank.wait(8, kWarps * times));
        for (uint32_t warp = 0; warp < kWarps; ++warp)
          EXPECT_EQ(load_acquire(rank.word(64 + 8 * warp)), times);
      }
      for (std::thread& warp : warps) warp.join();
      ASSERT_TRUE(rank.meet().ok());
      EXPECT_EQ(load_acquire(rank.word(8)), rank.mesh.rank() * kWarps * times);
      EXPECT_EQ(rank.comm->port_link()->status().message(), "");
    });
  }

  std::unique_ptr<NicModel> model_;
};

TEST_F(Ibgda, ACallRingsOnce) {
  use({.put_shift = 12});
  on_ranks(2, [](Rank& rank) {
    auto channel = rank.mesh.to(rank.mesh.rank() ^ 1);
    const ibgda::QueueState& state = *rank.queue(1 - rank.comm->rank()).state;
    uint64_t entries = 0, calls = 0;
    const auto count = [&](uint64_t more) {
      entries += more;
      ++calls;
      EXPECT_EQ(load_acquire(&state.published), entries);
      EXPECT_EQ(state.rung, calls);
    };
    channel.put(Warp{}, 4096, 65536, 64);
    count(1);
    channel.put_with_signal(Warp{}, 4096, 65536, 64, 8, 1);
    count(2);
    channel.put_with_signal(Warp{}, 4096, 65536, 6 * 4096 + 16, 8,
                            2);  // 7 parts and a signal: half of the ring
    count(8);
    channel.put_value(8, 3);
    count(1);
    channel.signal_add(16, 1);
    count(1);
    channel.put_with_signal(Warp{}, 4096, 65536, 0, 8, 4);
    count(1);
    EXPECT_TRUE(rank.wait(8, 4));
    ASSERT_TRUE(rank.meet().ok());
  });
}

// Warps that post to one queue: of 4 entries, so that they wait for room at nearly every call, and far beyond 16 bits of
// entries. Not both at once: a wait for room is a turn of the scheduler, which on a busy machine takes 10 ms.
TEST_F(Ibgda, WarpsShareAQueueBeyondSixteenBits) {
#if defined(__SANITIZE_THREAD__)
  constexpr uint64_t kMany = 1500;  // slow there; the channel suite goes beyond 16 bits, too
#else
  constexpr uint64_t kMany = 8000;  // of 3 entries for each warp
#endif
  struct Case {
    const char* depth;
    uint64_t times;
  };
  for (const Case& given : {Case{"4", 200}, Case{"1024", kMany}})
    for (const bool shares : {false, true}) {
      SCOPED_TRACE(given.depth);
      use({.seed = 21, .passes = 0.05, .shares_completion = shares}, given.depth);
      share_a_queue(given.times);
      EXPECT_EQ(model_->failures(), "");
    }
}

// Blocks put through different queues to one peer; whoever has synchronised with them signals through any.
TEST_F(Ibgda, SignalsStayBehindPutsOfOtherQueues) {
  use({.seed = 22, .passes = 0.7}, "8", "3");
  on_ranks(2, [](Rank& rank) {
    constexpr uint32_t kBlocks = 5, kRounds = 60;
    constexpr uint64_t kShare = 1024;
    auto* data = rank.mesh.local();
    const uint32_t peer = rank.mesh.rank() ^ 1;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      rank.mesh.to(peer).flush();
      std::memset(data + 65536, static_cast<int>(round), kBlocks * kShare);
      std::vector<std::thread> blocks;
      for (uint32_t block = 0; block < kBlocks; ++block)
        blocks.emplace_back([&, block] {
          host_thread.block = block;
          host_thread.blocks = kBlocks;
          rank.mesh.to(peer).put(Warp{}, 4096 + block * kShare, 65536 + block * kShare, kShare);
        });
      for (std::thread& block : blocks) block.join();
      rank.mesh.to(peer).put_value(8, round);
      ASSERT_TRUE(rank.wait(8, round));
      for (uint64_t i = 0; i < kBlocks * kShare; ++i)
        ASSERT_EQ(data[4096 + i], static_cast<std::byte>(round)) << "round " << round << ", byte " << i;
      rank.mesh.to(peer).put_value(16, round);  // read
      ASSERT_TRUE(rank.wait(16, round));
    }
    for (uint32_t which = 0; which < 3; ++which)
      EXPECT_GT(rank.mesh.queues[peer * 3 + which].state->published, 0u);
    ASSERT_TRUE(rank.meet().ok());
  });
}

// Every refusal that a NIC knows: rank 0's queue to rank 1 breaks, by name; rank 2 goes on with both; afterwards a new
// communicator works.
class IbgdaRefused : public Ibgda, public ::testing::WithParamInterface<Syndrome> {};

TEST_P(IbgdaRefused, BreaksOneQueueByNameAndOthersGoOn) {
  use({.seed = 33, .retry_s = 0.02});
  const auto syndrome = static_cast<uint32_t>(GetParam());
  on_ranks(3, [&](Rank& rank) {
    const int self = rank.comm->rank();
    ASSERT_TRUE(rank.meet().ok());
    if (self == 0) {
      auto channel = rank.mesh.to(1);
      channel.put_value(8, 1);
      channel.flush();
      EXPECT_EQ(rank.comm->port_link()->status().message(), "");
      model_->refuse_next(rank.queue(1).number, GetParam());
      const uint64_t start = now_ns();
      channel.put_with_signal(Warp{}, 4096, 65536, 256, 8, 2);
      channel.flush();
      channel.put_value(8, 3);  // dropped
      EXPECT_LT(now_ns() - start, 10'000'000'000u);
      ASSERT_TRUE(is_raised(rank.queue(1)));
      EXPECT_EQ(rank.queue(1).fault->peer, 1u);
      EXPECT_EQ(rank.queue(1).fault->detail & 255, syndrome);
      EXPECT_EQ(rank.queue(1).fault->expected, 1u);
      Status status;
      EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] {
        status = rank.comm->port_link()->status();
        return !status.ok();
      }));
      EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 0, ibgda"), HasSubstr("to rank 1"),
                                          HasSubstr(ibgda::to_string(syndrome))));
      EXPECT_EQ(rank.comm->port_link()->fault().message(), "");
      EXPECT_EQ(rank.queue(2).state->is_broken, 0u);
    }
    for (uint64_t i = 1; i <= 50; ++i)
      for (uint32_t peer = 0; peer < 3; ++peer)
        if (self == 2 || peer == 2) rank.mesh.to(peer).put_value(64 + 8 * rank.mesh.rank(), i);
    for (uint32_t peer = 0; peer < 3; ++peer)
      EXPECT_TRUE((self != 2 && peer != 2) || rank.wait(64 + 8 * peer, 50))
          << "rank " << self << " from " << peer;
    if (self == 1) EXPECT_TRUE(rank.wait(8, 1));  // rank 0 may be later than all others
    EXPECT_EQ(load_acquire(rank.word(8)), self == 1 ? 1u : 0u);
  });
  on_ranks(3, [&](Rank& rank) {
    rank.mesh.to((rank.mesh.rank() + 1) % 3).put_value(8, 9);
    EXPECT_TRUE(rank.wait(8, 9));
    EXPECT_TRUE(rank.meet().ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Syndromes, IbgdaRefused,
                         ::testing::Values(Syndrome::kLocalLength, Syndrome::kLocalQueue,
                                           Syndrome::kLocalProtection, Syndrome::kFlushed,
                                           Syndrome::kWindowBind, Syndrome::kBadResponse,
                                           Syndrome::kLocalAccess, Syndrome::kRemoteInvalid,
                                           Syndrome::kRemoteAccess, Syndrome::kRemoteOperation,
                                           Syndrome::kRetryExceeded, Syndrome::kReceiverNotReady,
                                           Syndrome::kAborted));

// The peer's NIC dies. Whoever waits is told, also where the kernel that put has long ended.
TEST_F(Ibgda, ADeadNicIsFoundThoughNobodyWaits) {
  use({.seed = 34, .retry_s = 0.05});
  on_ranks(3, [&](Rank& rank) {
    std::atomic<int> reported{-1};
    rank.comm->port_link()->on_lost([&](int peer, const std::string& how) {
      EXPECT_THAT(how, HasSubstr("transport retry counter exceeded"));
      reported = peer;
    });
    if (rank.comm->rank() == 0) model_->kill_nic_of(rank.queue(0).number);
    ASSERT_TRUE(rank.meet().ok());
    if (rank.comm->rank() != 0) {
      rank.mesh.to(0).put_value(8, 1);
      EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return reported == 0; }));
      EXPECT_EQ(rank.comm->port_link()->status().code(), Code::kPeerLost);
      const int other = 3 - rank.comm->rank();
      rank.mesh.to(static_cast<uint32_t>(other)).put_value(16, 5);
      EXPECT_TRUE(rank.wait(16, 5));
    }
    (void)rank.meet();
    rank.comm->port_link()->on_lost([](int, const std::string&) {});
    for (int peer = 0; peer < 3 && rank.comm->rank() == 0; ++peer)  // whose farewells no longer arrive here
      rank.comm->port_link()->lose(peer, "");
  });
}

// A NIC that stands still: full queues and flushes end at the deadline, and say how far it got.
TEST_F(Ibgda, DeadlinesNamePeerAndCounts) {
  use({.seed = 35, .stalls = 1, .stall_s = 30});
  on_ranks(
      2,
      [&](Rank& rank) {
        if (rank.comm->rank() != 0) return;
        auto to_self = rank.mesh.to(0), to_peer = rank.mesh.to(1);
        to_self.put_value(8, 1);
        to_self.flush();
        const Status flush = ibgda::status_of(*rank.queue(0).fault);
        EXPECT_THAT(flush.message(), AllOf(HasSubstr("rank 0, ibgda, flush: waited"),
                                           HasSubstr("rank 0: expected 1"), HasSubstr("saw 0")));
        for (int i = 0; i < 17; ++i) to_peer.put_value(8, 1);
        const Status post = ibgda::status_of(*rank.queue(1).fault);
        EXPECT_THAT(post.message(), AllOf(HasSubstr("rank 0, ibgda, post: waited"),
                                          HasSubstr("rank 1: expected 1"), HasSubstr("saw 0")));
        EXPECT_EQ(post.code(), Code::kPeerLost);
      },
      0.3);
}

TEST_F(Ibgda, PlacesOutsideTheWindowAreRefused) {
  use({.seed = 36});
  const std::function<void(IbgdaChannel)> wrong[] = {
      [](IbgdaChannel to) { to.put(Warp{}, kWindow, 0, 16); },
      [](IbgdaChannel to) { to.put(Warp{}, 0, kWindow - 16, 32); },
      [](IbgdaChannel to) { to.put(Warp{}, 8, 0, 16); },
      [](IbgdaChannel to) { to.put(Warp{}, 0, 0, UINT64_MAX - 15); },
      [](IbgdaChannel to) { to.put_value(kWindow, 1); },
      [](IbgdaChannel to) { to.put_value(4, 1); },
      [](IbgdaChannel to) { to.signal_add(kWindow - 4, 1); }};
  for (const auto& call : wrong)
    on_ranks(2, [&](Rank& rank) {
      if (rank.comm->rank() == 0) {
        call(rank.mesh.to(1));
        EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return !rank.comm->port_link()->fault().ok(); }));
        EXPECT_EQ(rank.comm->port_link()->fault().code(), Code::kInvalid);
        EXPECT_THAT(rank.comm->port_link()->fault().message(), HasSubstr("outside the window"));
      }
      ASSERT_TRUE(rank.meet().ok());
      EXPECT_EQ(load_acquire(rank.word(8)), 0u);
    });
}

// Both ends of a broken queue begin anew and go on; indices and completions are as fresh as at first.
TEST_F(Ibgda, ABrokenQueueBeginsAnew) {
  use({.seed = 37});
  constexpr uint64_t kBytes = 4096;
  std::vector<std::byte> memory[2];
  std::unique_ptr<ibgda::Nic> nics[2];
  std::unique_ptr<ibgda::Queues> queues[2];
  std::unique_ptr<LocalMemory> parts[2];
  ibgda::Enrolled enrolled[2];
  const auto join = [&] {
    const std::string from[2] = {queues[0]->addresses(1), queues[1]->addresses(0)};
    EXPECT_EQ(queues[0]->connect({"", from[1]}).message(), "");
    EXPECT_EQ(queues[1]->connect({from[0], ""}).message(), "");
  };
  std::atomic<int> broke{0};
  for (int rank : {0, 1}) {
    memory[rank].resize(kBytes);
    nics[rank] = std::move(*model_->open(Device{}));
    enrolled[rank] = *nics[rank]->enroll(memory[rank].data(), kBytes, Device{});
    queues[rank] = std::move(*ibgda::Queues::create(*nics[rank], Device{}, {1 - rank}, {rank, 2, 1, 16}));
  }
  join();
  for (int rank : {0, 1}) {
    parts[rank] = std::move(*LocalMemory::create(Device{}, 2 * sizeof(ibgda::RemotePart)));
    const ibgda::RemotePart part{enrolled[1 - rank].base, big_endian(enrolled[1 - rank].remote_key), 0};
    ASSERT_TRUE(parts[rank]->write((1 - rank) * sizeof part, &part, sizeof part).ok());
    queues[rank]->start([&](const FaultBox&) { ++broke; });
  }
  const IbgdaMesh mesh{queues[0]->table(),
                       queues[0]->states(),
                       parts[0]->at<ibgda::RemotePart>(0),
                       memory[0].data(),
                       kBytes,
                       enrolled[0].base,
                       5'000'000'000u,
                       0,
                       2,
                       1,
                       big_endian(enrolled[0].local_key),
                       30,
                       queues[0]->batch(),
                       0,
                       0};
  auto* word = reinterpret_cast<uint64_t*>(memory[1].data());
  for (int round = 1; round <= 3; ++round) {
    for (int i = 0; i < 100; ++i) mesh.to(1).signal_add(0, 1);
    mesh.to(1).flush();
    EXPECT_EQ(load_acquire(word), 100u * static_cast<uint64_t>(round));
    model_->refuse_next(mesh.queues[1].number, Syndrome::kRemoteOperation);
    for (int i = 0; i < 5; ++i) mesh.to(1).signal_add(0, 1000);
    mesh.to(1).flush();
    ASSERT_TRUE(is_raised(mesh.queues[1]));
    EXPECT_EQ(mesh.queues[1].fault->expected, 100u);
    EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return broke == round; }));
    for (int rank : {0, 1}) ASSERT_TRUE(queues[rank]->reset(1 - rank).ok());
    join();
    EXPECT_EQ(load_acquire(&mesh.queues[1].state->published), 0u);
  }
  for (int rank : {0, 1}) queues[rank].reset();
  for (int rank : {0, 1}) nics[rank]->release(enrolled[rank]);
}

// Mapped inside of nodes, queues between them.
TEST_F(Ibgda, ServesNodesBesideMappedMemory) {
  use({.seed = 38});
  Settings::set({{"WEFT_RANKS_PER_NODE", "2"}});
  run_thread_ranks(4, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, kTimeout_s, "mapped,ibgda");
    ASSERT_EQ(comm.status().message(), "");
    auto window = Window::create(*comm, 4096);
    ASSERT_EQ(window.status().message(), "");
    const auto mesh = mesh_of<HybridMesh<MappedMesh, IbgdaMesh>>(**window);
    EXPECT_EQ(mesh.mapped_window(mesh.rank() ^ 1), (*window)->base(static_cast<int>(mesh.rank() ^ 1)));
    EXPECT_EQ(mesh.mapped_window(mesh.rank() ^ 2), nullptr);
    for (uint32_t peer = 0; peer < 4; ++peer) mesh.to(peer).put_value(8 * mesh.rank(), 1 + mesh.rank());
    const auto* words = reinterpret_cast<const uint64_t*>(mesh.local());
    for (uint64_t from = 0; from < 4; ++from)
      EXPECT_TRUE(wait_until(Deadline::after_s(30), [&] { return load_acquire(words + from) == from + 1; }));
    EXPECT_TRUE((*comm)->barrier().ok());
  });
  Settings::clear({"WEFT_RANKS_PER_NODE"});
}

TEST_F(Ibgda, IsTakenByNameAloneAndSaysWhatIsMissing) {
  use({.seed = 39});
  model_->set_missing("no mlx5 device");
  for (const Candidate& candidate : candidates(Device{}))
    if (std::string_view(candidate.transport->name()) == "ibgda") {
      EXPECT_TRUE(candidate.caps.only_by_name);
      EXPECT_THAT(candidate.caps.unusable_because, AllOf(HasSubstr("no mlx5 device"), HasSubstr("proxy")));
      EXPECT_THAT(candidate.caps.details, HasSubstr("not run on hardware"));
    }
  run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, kTimeout_s, "ibgda");
    EXPECT_EQ(comm.status().code(), Code::kUnsupported);
    EXPECT_THAT(comm.status().message(), HasSubstr("no mlx5 device"));
  });
}

}  // namespace
}  // namespace weft
