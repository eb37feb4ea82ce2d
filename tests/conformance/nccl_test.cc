// SPDX-License-Identifier: Apache-2.0
//
// What the nccl transport promises beyond the channel: which library it takes and refuses, the order of its calls, and
// what becomes of failures. With libraries that stand in for NCCL on CPUs; tests/gpu has the real one.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"
#include "support/places.h"
#include "support/stand_in_nccl.h"
#include "transports/nccl/library.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_process_ranks;
using testing::Settings;

constexpr uint64_t kBytes = 100'000;
const Device kGpu{Device::Kind::kCuda, 0};

std::string path_of(const char* version) {
  return text("{}/libnccl.so.{}", testing::kStandInsDir, version);
}

void use(const std::string& path) {
  Settings::set({{"WEFT_NCCL_LIBRARY", path.c_str()}});
}

// The library that the transport has opened, as its tests talk to it. Opened by the transport first, so that it is no
// copy of somebody else's.
template <class Function>
Function of_stand_in(const char* name) {
  use(path_of("2.30"));
  const auto opened = nccl_link::open_library();
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  void* handle = dlopen(path_of("2.30").c_str(), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(dlsym(handle, name));
}
void set_faults(const StandInFaults& faults) {
  of_stand_in<decltype(&standInNcclFaults)>("standInNcclFaults")(&faults);
}
std::string calls() {
  std::string all;
  of_stand_in<decltype(&standInNcclCalls)>("standInNcclCalls")(&all);
  return all;
}
size_t allocations() {
  return of_stand_in<decltype(&standInNcclAllocations)>("standInNcclAllocations")();
}

Result<std::shared_ptr<Communicator>> make_comm(std::shared_ptr<Bootstrap> boot, double timeout_s = 30,
                                                const char* transport = "nccl") {
  return Communicator::create(std::move(boot), Device{}, timeout_s, transport);
}

std::filesystem::path elsewhere() {
  return std::filesystem::temp_directory_path() / text("weft-nccl-{}", getpid());
}

// A copy of a library that nobody has opened yet, as this process loads it from elsewhere.
std::string load_elsewhere(const char* version) {
  const std::filesystem::path folder = elsewhere();
  std::filesystem::create_directories(folder);
  const std::filesystem::path copy = folder / text("libnccl.so.{}", version);
  std::filesystem::copy_file(path_of(version), copy, std::filesystem::copy_options::overwrite_existing);
  EXPECT_NE(dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  return copy;
}

// Runs a body in a process of its own, which may load what it likes.
void apart(const std::function<void()>& body) {
  run_process_ranks(1, [&](std::shared_ptr<Bootstrap>) {
    body();
    std::filesystem::remove_all(elsewhere());
  });
}

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override { use(path_of("2.30")); }
  void TearDown() override {
    Settings::clear({"WEFT_NCCL_LIBRARY", "WEFT_RANKS_PER_NODE", "WEFT_PROXY_PROVIDER"});
  }
};

std::string why_unusable(Device device) {
  return nccl_transport().caps(device).unusable_because;
}

TEST_F(Nccl, ALibraryThatIsTooOldIsRefusedByItsVersion) {
  use(path_of("2.27"));
  EXPECT_THAT(why_unusable(kGpu),
              AllOf(HasSubstr("libnccl.so.2.27"), HasSubstr("is NCCL 2.27.3"), HasSubstr("2.28.9 or newer")));
}

TEST_F(Nccl, AMissingLibraryIsNamed) {
  use("/nowhere/libnccl.so.2");
  EXPECT_THAT(why_unusable(kGpu), HasSubstr("/nowhere/libnccl.so.2"));
  use("none");
  EXPECT_EQ(why_unusable(kGpu), "WEFT_NCCL_LIBRARY is none");
}

TEST_F(Nccl, RanksOnTheCpuHaveNone) {
  Settings::clear({"WEFT_NCCL_LIBRARY"});
  EXPECT_THAT(why_unusable(Device{}), HasSubstr("this rank is on the CPU"));
}

TEST_F(Nccl, TwoCopiesInOneProcessAreNamedUnlessOneIsChosen) {
  apart([] {
    const std::string first = load_elsewhere("2.28"), second = load_elsewhere("2.30");
    Settings::clear({"WEFT_NCCL_LIBRARY"});
    EXPECT_THAT(why_unusable(kGpu),
                AllOf(HasSubstr("two copies of NCCL"), HasSubstr(first), HasSubstr(second)));
    use(first);
    const auto chosen = nccl_link::open_library();
    ASSERT_TRUE(chosen.ok()) << chosen.status().message();
    EXPECT_EQ((*chosen)->version, 22809);
    EXPECT_EQ((*chosen)->GetLsaDevicePointer, nullptr);
  });
}

TEST_F(Nccl, TheCopyThatIsLoadedIsTaken) {
  apart([] {
    const std::string copy = load_elsewhere("2.28");
    Settings::clear({"WEFT_NCCL_LIBRARY"});
    const auto found = nccl_link::open_library();
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ((*found)->path, copy);
    EXPECT_TRUE((*found)->was_loaded);
  });
}

TEST_F(Nccl, NeverTakenUnlessNamed) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = make_comm(boot, 30, "auto");
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    EXPECT_STREQ((*comm)->transport_to(1 - (*comm)->rank())->name(), "mapped");
  });
}

TEST_F(Nccl, CallsComeInNcclsOrderAndNothingIsLeft) {
  set_faults({});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const bool is_first = boot->rank() == 0;
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    EXPECT_EQ((*comm)->sharing(), Sharing::kByTransport);
    const std::string probed = "CommInitRankConfig MemAlloc CommWindowRegister CommWindowDeregister MemFree";
    EXPECT_EQ(calls(), (is_first ? "GetUniqueId " : "") + probed);
    set_faults({});
    {
      auto window = Window::create(*comm, kBytes);
      ASSERT_TRUE(window.ok()) << window.status().message();
      EXPECT_EQ((*window)->bytes(), uint64_t{2} << 20);
      EXPECT_EQ(calls(), "MemAlloc CommWindowRegister");
      ASSERT_TRUE((*comm)->barrier().ok());
    }
    (*comm).reset();
    EXPECT_EQ(calls(), "MemAlloc CommWindowRegister CommWindowDeregister MemFree CommAbort");
    EXPECT_EQ(allocations(), 0u);
  });
}

TEST_F(Nccl, ACallThatSaysSuccessWhileItGoesOnIsWaitedFor) {
  set_faults({.says_success_early = true});
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    for (int turn = 0; turn < 5; ++turn) EXPECT_TRUE(Window::create(*comm, kBytes).ok());
  });
  set_faults({});
}

TEST_F(Nccl, AWindowDoesNotGrowAndStays) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok());
    auto window = Window::create(*comm, kBytes);
    ASSERT_TRUE(window.ok());
    std::byte* const before = (*window)->base(1 - (*comm)->rank());
    const Status grown = (*window)->grow(uint64_t{5} << 20);
    EXPECT_EQ(grown.code(), Code::kUnsupported);
    EXPECT_THAT(grown.message(), HasSubstr("cannot grow beyond its 2097152 bytes"));
    EXPECT_EQ((*window)->base(1 - (*comm)->rank()), before);
    before[(*comm)->rank()] = std::byte{7};
    ASSERT_TRUE((*comm)->barrier().ok());
    EXPECT_EQ((*window)->local()[1 - (*comm)->rank()], std::byte{7});
    ASSERT_TRUE((*comm)->barrier().ok());
  });
}

TEST_F(Nccl, WithoutSymmetricMemoryNoCommunicatorIsMade) {
  set_faults({.is_symmetric = false});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = make_comm(boot);
    EXPECT_EQ(comm.status().code(), Code::kUnsupported);
    EXPECT_THAT(comm.status().message(),
                AllOf(HasSubstr("NCCL 2.30.7 does not support symmetric memory here"),
                      HasSubstr("NCCL_CUMEM_ENABLE")));
    EXPECT_EQ(allocations(), 0u);
  });
  set_faults({});
}

TEST_F(Nccl, RanksBeyondTheTeamAreRefused) {
  set_faults({.lsa_ranks = 2});
  run_process_ranks(4, [](std::shared_ptr<Bootstrap> boot) {
    EXPECT_THAT(make_comm(boot).status().message(), HasSubstr("joins 2 of 4 ranks by loads and stores"));
  });
  set_faults({});
}

TEST_F(Nccl, ARankWithoutMemoryFailsTheWindowOnAllOfThem) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const int rank = boot->rank();
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok());
    if (rank == 1) set_faults({.allocations = 0});
    const auto window = Window::create(*comm, kBytes);
    EXPECT_THAT(window.status().message(),
                AllOf(HasSubstr("window.create, on rank 1"), HasSubstr("ncclMemAlloc")));
    EXPECT_EQ(allocations(), 0u);
    if (rank == 1) set_faults({});
    EXPECT_TRUE(Window::create(*comm, kBytes).ok());  // nothing was lost by it
  });
}

TEST_F(Nccl, ARankThatStaysAwayIsAnErrorAtTheDeadline) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    if (boot->rank() == 1) set_faults({.stays_away_at_init = 1});
    const auto comm = make_comm(boot, 1.0);
    EXPECT_EQ(comm.status().code(), Code::kPeerLost);
    EXPECT_THAT(comm.status().message(),
                AllOf(HasSubstr("ncclCommInitRankConfig"), HasSubstr("waited 1 s for the other 1 ranks")));
  });
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    if (boot->rank() == 1) set_faults({.stays_away_at_register = 1, .registers_before = 1});
    auto comm = make_comm(boot, 1.0);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    const auto window = Window::create(*comm, kBytes);
    EXPECT_EQ(window.status().code(), Code::kPeerLost);
    EXPECT_THAT(window.status().message(), HasSubstr("ncclCommWindowRegister"));
    // The communicator of NCCL is gone: what follows is refused at once.
    EXPECT_EQ(Window::create(*comm, kBytes).status().code(), Code::kPeerLost);
    EXPECT_EQ(allocations(), 0u);
  });
}

TEST_F(Nccl, OtherVersionsOnOtherRanksAreRefused) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    if (boot->rank() == 1) use(path_of("2.28"));
    EXPECT_THAT(make_comm(boot).status().message(),
                AllOf(HasSubstr("NCCL 2.30.7"), HasSubstr("NCCL 2.28.9")));
  });
}

TEST_F(Nccl, PortsBesideItAreRefusedSinceTheySendFromOtherMemory) {
  Settings::set({{"WEFT_RANKS_PER_NODE", "2"}, {"WEFT_PROXY_PROVIDER", "fabric:tcp"}});
  run_process_ranks(4, [](std::shared_ptr<Bootstrap> boot) {
    use(path_of("2.28"));  // which has no ports of its own
    EXPECT_THAT(make_comm(boot, 30, "nccl,proxy").status().message(),
                HasSubstr("got nccl and proxy, allowed: nccl alone"));
  });
}

// ---- ports through its GIN ---------------------------------------------------------------------------------

class NcclGin : public Nccl {
 protected:
  void SetUp() override {
    Nccl::SetUp();
    Settings::set({{"WEFT_RANKS_PER_NODE", "1"}});
  }
  void TearDown() override {
    set_faults({});
    Nccl::TearDown();
    Settings::clear({"WEFT_NCCL_RECORDS"});
  }
};

TEST_F(NcclGin, CallsComeInNcclsOrderAndNothingIsLeft) {
  set_faults({});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const bool is_first = boot->rank() == 0;
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    EXPECT_THAT((*comm)->why_not_all_mapped(), HasSubstr("rank 0 reaches rank 1 through nccl"));
    EXPECT_EQ((*comm)->mapped_ranks().size(), 1u);
    EXPECT_EQ(calls(), std::string(is_first ? "GetUniqueId " : "") +
                           "CommInitRankConfig MemAlloc CommWindowRegister CommWindowDeregister MemFree "
                           "DevCommCreate MemAlloc CommWindowRegister");
    set_faults({});
    (*comm).reset();
    // All leave together, by a window that none needs.
    EXPECT_EQ(calls(),
              "MemAlloc CommWindowRegister CommWindowDeregister MemFree DevCommDestroy CommWindowDeregister "
              "MemFree "
              "CommAbort");
    EXPECT_EQ(allocations(), 0u);
  });
}

TEST_F(NcclGin, WithoutGinNoCommunicatorIsMade) {
  set_faults({.gin_type = 0});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = make_comm(boot);
    EXPECT_EQ(comm.status().code(), Code::kUnsupported);
    EXPECT_THAT(comm.status().message(),
                AllOf(HasSubstr("NCCL 2.30.7 has no GIN here"), HasSubstr("NCCL_RMA_PLUGIN")));
    EXPECT_EQ(allocations(), 0u);
  });
}

TEST_F(NcclGin, ABackEndWithoutStrongSignalsIsRefused) {
  set_faults({.gin_type = 5});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    EXPECT_THAT(make_comm(boot).status().message(), HasSubstr("GIN of type EFA_GDA has weak signals alone"));
  });
}

TEST_F(NcclGin, ALibraryThatIsTooOldForPortsReachesItsNodeAlone) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    use(path_of("2.28"));
    const auto comm = make_comm(boot);
    EXPECT_EQ(comm.status().code(), Code::kUnsupported);
    EXPECT_THAT(comm.status().message(),
                AllOf(HasSubstr("reaches its node alone"), HasSubstr("NCCL 2.28.9 is too old"),
                      HasSubstr("2.30.3 or newer")));
  });
}

TEST_F(NcclGin, AnOddRoomForRecordsIsRefused) {
  Settings::set({{"WEFT_NCCL_RECORDS", "12"}});
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    EXPECT_THAT(make_comm(boot).status().message(),
                HasSubstr("WEFT_NCCL_RECORDS: got 12, allowed: a power of two"));
  });
}

// One slot serves all these windows: what comes late for one that is gone stays away from the next.
TEST_F(NcclGin, SlotsOfWindowsAreUsedAgain) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    const auto peer = static_cast<uint32_t>(1 - (*comm)->rank());
    const WaitRule rule{30'000'000'000, nullptr, 0, 0};
    FaultBox fault{};
    WaitRule bounded = rule;
    bounded.fault = &fault;
    for (uint64_t turn = 1; turn <= 40; ++turn) {
      auto window = Window::create(*comm, 4096);
      ASSERT_TRUE(window.ok()) << window.status().message();
      const auto mesh = testing::mesh_of<NcclMesh>(**window);
      const auto* word = reinterpret_cast<const uint64_t*>((*window)->local() + 64);
      mesh.to(peer).put_value(64, turn);
      uint64_t seen = 0, waited_ns = 0;
      ASSERT_TRUE(poll_host_signal(word, turn, bounded, seen, waited_ns)) << turn;
      EXPECT_TRUE(seen == turn || seen == 1000 + turn) << seen;
      mesh.to(peer).put_value(64, 1000 + turn);  // nobody waits for it
    }
    ASSERT_TRUE((*comm)->barrier().ok());
    EXPECT_TRUE((*comm)->port_status().ok());
  });
}

TEST_F(NcclGin, ASignalThatHasNoRoomNamesWhoDoesNotTakeIt) {
  run_process_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = make_comm(boot, 1.0);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    auto window = Window::create(*comm, 4096);
    ASSERT_TRUE(window.ok());
    ASSERT_TRUE((*comm)->barrier().ok());
    if ((*comm)->rank() == 0) {
      auto mesh = testing::mesh_of<NcclMesh>(**window);
      mesh.outgoing[1].posted = mesh.outgoing[1].reserved = 1'000'000;  // as if so many had not been taken
      mesh.to(1).put_value(64, 1);
      const Status why = (*comm)->port_status();
      EXPECT_EQ(why.code(), Code::kPeerLost);
      EXPECT_THAT(why.message(),
                  AllOf(HasSubstr("rank 0, nccl, signal: waited 1"), HasSubstr("rank 1 to take in"),
                        HasSubstr("expected 998977 taken, saw 0")));
      mesh.to(1).put_value(64, 2);  // dropped at once
    }
    (void)(*comm)->barrier();
  });
}

}  // namespace
}  // namespace weft
