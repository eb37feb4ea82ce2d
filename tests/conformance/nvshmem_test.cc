// SPDX-License-Identifier: Apache-2.0
//
// What the nvshmem transport promises beyond the channel: which library it takes and refuses, memory that is used again, and
// what becomes of calls that NVSHMEM holds. With a library that stands in for NVSHMEM on CPUs; tests/gpu has the real one.
#include <gmock/gmock.h>

#include "conformance/fixtures.h"
#include "support/places.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_process_ranks;
using testing::Settings;

constexpr uint64_t kBytes = 100'000;
const Device kGpu{Device::Kind::kCuda, 0};

Result<std::shared_ptr<Communicator>> make_comm(std::shared_ptr<Bootstrap> boot, double timeout_s = 30) {
  return Communicator::create(std::move(boot), Device{}, timeout_s, "nvshmem");
}

class Nvshmem : public ::testing::Test {
 protected:
  void SetUp() override { testing::NvshmemFixture::set_up(); }
  void TearDown() override { testing::NvshmemFixture::tear_down(); }
};

TEST_F(Nvshmem, ALibraryThatIsTooOldIsRefusedByItsVersion) {
  Settings::set({{"WEFT_NVSHMEM_LIBRARY", text("{}/libnvshmem_host.so.2", testing::kStandInsDir).c_str()}});
  EXPECT_THAT(nvshmem_transport().caps(kGpu).unusable_because,
              AllOf(HasSubstr("is NVSHMEM 2.7.2"), HasSubstr("3.0 or newer")));
}

TEST_F(Nvshmem, ThreadsOfOneProcessAreRefused) {
  testing::run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    EXPECT_THAT(make_comm(boot).status().message(), HasSubstr("one rank for each process"));
  });
}

// Windows come and go in another order on every rank; their memory is used again all the same.
TEST_F(Nvshmem, MemoryIsUsedAgainWhenEveryRankHasGivenItBack) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    auto first = Window::create(*comm, kBytes);
    ASSERT_TRUE(first.ok()) << first.status().message();
    std::byte* const at = (*first)->local();
    std::memset(at, 0x33, kBytes);
    if ((*comm)->rank() != 0) first->reset();
    auto second = Window::create(*comm, kBytes);  // rank 0 still has the first
    ASSERT_TRUE(second.ok());
    EXPECT_NE((*second)->local(), at);
    if ((*comm)->rank() == 0) first->reset();
    auto third = Window::create(*comm, kBytes);
    ASSERT_TRUE(third.ok());
    EXPECT_EQ((*third)->local(), at);
    EXPECT_EQ(at[17], std::byte{0});
    ASSERT_TRUE((*comm)->barrier().ok());
  });
}

TEST_F(Nvshmem, AnotherCommunicatorOfTheSameRanksSharesIt) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    ASSERT_TRUE(make_comm(boot).ok());
    ASSERT_TRUE(make_comm(boot).ok());
  });
}

// ---- ports -------------------------------------------------------------------------------------------------

class NvshmemPorts : public ::testing::Test {
 protected:
  void SetUp() override { testing::NvshmemPortsFixture::set_up(); }
  void TearDown() override {
    testing::NvshmemPortsFixture::tear_down();
    Settings::clear({"STAND_IN_QUIET_MS"});
  }
};

// A signal changes its word behind earlier puts of the channel, also where other calls stand between.
TEST_F(NvshmemPorts, WordsChangeBehindEveryEarlierPut) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    constexpr uint64_t kPart = 4096, kPuts = 8, kTurns = 200;
    auto window = Window::create(*comm, 2 * kPuts * kPart + 64);
    ASSERT_TRUE(window.ok()) << window.status().message();
    const auto mesh = testing::mesh_of<NvshmemMesh>(**window);
    const auto next = static_cast<uint32_t>(((*comm)->rank() + 1) % 3);
    std::byte* const own = (*window)->local();
    auto* const word = reinterpret_cast<uint64_t*>(own + 2 * kPuts * kPart);
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
      mesh.to(next).flush();  // what the last turn has put has been read
      std::memset(own, static_cast<int>(turn & 0xff), kPuts * kPart);
      for (uint64_t i = 0; i < kPuts; ++i)
        mesh.to(next).put(OneThread{}, (kPuts + i) * kPart, i * kPart, kPart);
      if (turn % 2 == 0)
        mesh.to(next).put_value(2 * kPuts * kPart, turn);
      else
        mesh.to(next).signal_add(2 * kPuts * kPart, 1);
      while (load_acquire(word) < turn) std::this_thread::yield();
      for (uint64_t at = kPuts * kPart; at < 2 * kPuts * kPart; at += 509)
        ASSERT_EQ(static_cast<uint64_t>(own[at]), turn & 0xff) << turn << " at " << at;
      ASSERT_TRUE((*comm)->barrier().ok());
    }
  });
}

TEST_F(NvshmemPorts, ACallThatNvshmemHoldsNamesThePeer) {
  Settings::set({{"STAND_IN_QUIET_MS", "1500"}});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot, 1.0);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    auto window = Window::create(*comm, 4096);
    ASSERT_TRUE(window.ok());
    const auto mesh = testing::mesh_of<NvshmemMesh>(**window);
    const auto peer = static_cast<uint32_t>(1 - (*comm)->rank());
    mesh.to(peer).put_value(64, 1);
    ASSERT_TRUE((*comm)->barrier().ok());
    EXPECT_TRUE((*comm)->port_status().ok());
    mesh.to(peer).flush();
    const Status why = (*comm)->port_link()->status();
    EXPECT_EQ(why.code(), Code::kPeerLost);
    EXPECT_THAT(why.message(),
                AllOf(HasSubstr(text("rank {}, nvshmem: NVSHMEM has held a kernel for 1", 1 - peer)),
                      HasSubstr(text("in a call for rank {}: expected 2 calls done, saw 1", peer))));
    EXPECT_TRUE((*comm)->port_link()->fault().ok());
  });
}

}  // namespace
}  // namespace weft
