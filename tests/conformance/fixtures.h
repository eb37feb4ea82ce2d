// SPDX-License-Identifier: Apache-2.0
//
// What a transport brings to the conformance suite: its name, its mesh type, and the numbers of ranks to try.
// A new transport adds its fixture here and to Fixtures; EveryTransportIsTested fails until it does.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/config.h"
#include "comm/window.h"
#include "kernels/core/hybrid.cuh"
#include "providers/loopback/loopback.h"
#include "support/fake_mlx5.h"
#include "support/nic_model.h"
#include "support/places.h"
#include "support/ranks.h"
#include "transports/ibgda/mlx5_nic.h"
#include "transports/list.h"

namespace weft::testing {

// Sets environment variables while a test runs.
class Settings {
 public:
  static void set(std::initializer_list<std::pair<const char*, const char*>> wanted) {
    for (const auto& [name, value] : wanted) setenv(name, value, 1);
    config_reload();
  }
  static void clear(std::initializer_list<const char*> names) {
    for (const char* name : names) unsetenv(name);
    config_reload();
  }
};

struct MappedFixture {
  static constexpr const char* kName = "mapped";
  static constexpr const char* kTransport = kName;  // as Communicator::create() is asked for
  using Mesh = MappedMesh;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads, RanksAre::kProcesses}; }
  static std::vector<int> ranks() { return {1, 2, 3, 7, 17}; }
  static void set_up() {}
  static void tear_down() {}
};

// All peers through proxies, over one provider that joins processes.
template <const char* const& kProvider>
struct ProxyFixture {
  static constexpr const char* kName = "proxy";
  static constexpr const char* kTransport = kName;
  using Mesh = ProxyMesh;
#if defined(__SANITIZE_THREAD__)  // sees no order that processes make among themselves
  static std::vector<RanksAre> kinds() { return {}; }
#else
  static std::vector<RanksAre> kinds() { return {RanksAre::kProcesses}; }
#endif
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    // A small FIFO, so that laps wrap and it fills up.
    Settings::set({{"WEFT_PROXY_PROVIDER", kProvider}, {"WEFT_PROXY_FIFO", "8"}});
  }
  static void tear_down() { Settings::clear({"WEFT_PROXY_PROVIDER", "WEFT_PROXY_FIFO"}); }
};
inline constexpr const char* kTcp = "fabric:tcp";
inline constexpr const char* kShm = "fabric:shm";
inline constexpr const char* kVerbs = "verbs";
using TcpFixture = ProxyFixture<kTcp>;
using ShmFixture = ProxyFixture<kShm>;
using VerbsFixture = ProxyFixture<kVerbs>;

// Threads of one process, over a network that doubles packets or, with kReorders, delays and reorders them.
// Not both: the bytes of a copy may not land after newer ones (providers/provider.h), immediates may.
template <bool kReorders>
struct LoopbackFixture {
  static constexpr const char* kName = "proxy";
  static constexpr const char* kTransport = kName;
  using Mesh = ProxyMesh;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
  static std::vector<int> ranks() { return kReorders ? std::vector<int>{2, 7} : std::vector<int>{3}; }
  static void set_up() {
    Settings::set({{"WEFT_PROXY_PROVIDER", "loopback"}, {"WEFT_PROXY_FIFO", "8"}, {"WEFT_PROXIES", "2"}});
    if (kReorders)
      network().set_plan({.seed = 5, .reorder = 0.3, .delay = 0.1, .delay_polls = 20});
    else
      network().set_plan({.seed = 5, .duplicate = 0.2});
  }
  static void tear_down() {
    network().set_plan({});
    Settings::clear({"WEFT_PROXY_PROVIDER", "WEFT_PROXY_FIFO", "WEFT_PROXIES"});
  }
  static provider::Loopback& network() {
    return dynamic_cast<provider::Loopback&>(**provider::find_provider("loopback"));
  }
};
using ReorderingFixture = LoopbackFixture<true>;
using DoublingFixture = LoopbackFixture<false>;

// Two ranks to a node: mapped inside, proxies between.
struct HybridFixture {
  static constexpr const char* kName = "proxy";
  static constexpr const char* kTransport = "auto";
  using Mesh = HybridMesh<MappedMesh, ProxyMesh>;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
  static std::vector<int> ranks() { return {4, 6}; }
  static void set_up() { Settings::set({{"WEFT_PROXY_PROVIDER", "loopback"}, {"WEFT_RANKS_PER_NODE", "2"}}); }
  static void tear_down() { Settings::clear({"WEFT_PROXY_PROVIDER", "WEFT_RANKS_PER_NODE"}); }
};

// Threads that write the queues of a model of a NIC. Rings are tiny, so that they wrap and fill up; puts are cut; there
// are two queues to a peer; or all completions share one place, and a thread of the host rings.
template <bool kShares>
struct IbgdaFixture {
  static constexpr const char* kName = "ibgda";
  static constexpr const char* kTransport = kName;
  using Mesh = IbgdaMesh;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
  static std::vector<int> ranks() { return kShares ? std::vector<int>{2, 3} : std::vector<int>{2, 3, 7}; }
  static void set_up() {
    Settings::set({{"WEFT_IBGDA_DEPTH", kShares ? "16" : "4"}, {"WEFT_IBGDA_QUEUES", kShares ? "1" : "2"}});
    model() = std::make_unique<NicModel>(NicPlan{.seed = kShares ? 6u : 5u,
                                                 .shares_completion = kShares,
                                                 .is_rung_by_host = kShares,
                                                 .put_shift = 12});
    ibgda::set_nic_source(model().get());
  }
  static void tear_down() {
    EXPECT_EQ(model()->failures(), "");
    ibgda::set_nic_source(nullptr);
    model().reset();
    Settings::clear({"WEFT_IBGDA_DEPTH", "WEFT_IBGDA_QUEUES"});
  }
  static std::unique_ptr<NicModel>& model() {
    static std::unique_ptr<NicModel> one;
    return one;
  }
};
using QueueFixture = IbgdaFixture<false>;
using SharedCompletionFixture = IbgdaFixture<true>;

// The same through the set-up for mlx5 NICs, over fakes of libibverbs and libmlx5 with the model behind.
struct Mlx5Fixture {
  static constexpr const char* kName = "ibgda";
  static constexpr const char* kTransport = kName;
  using Mesh = IbgdaMesh;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    Settings::set({{"WEFT_IBGDA_DEPTH", "16"}});
    fake() = std::make_unique<FakeMlx5>(NicPlan{.seed = 7});
    nics() = std::make_unique<ibgda::Mlx5Nics>(fake()->verbs(), fake()->mlx5());
    ibgda::set_nic_source(nics().get());
  }
  static void tear_down() {
    EXPECT_EQ(fake()->failures(), "");
    EXPECT_EQ(fake()->model().failures(), "");
    EXPECT_EQ(fake()->left_over(), 0u);
    ibgda::set_nic_source(nullptr);
    nics().reset();
    fake().reset();
    Settings::clear({"WEFT_IBGDA_DEPTH"});
  }
  static std::unique_ptr<FakeMlx5>& fake() {
    static std::unique_ptr<FakeMlx5> one;
    return one;
  }
  static std::unique_ptr<ibgda::Mlx5Nics>& nics() {
    static std::unique_ptr<ibgda::Mlx5Nics> one;
    return one;
  }
};

// The same with queues in memory that the device exports to the NIC, by commands to it.
struct DeviceQueueFixture {
  static constexpr const char* kName = "ibgda";
  static constexpr const char* kTransport = kName;
  using Mesh = IbgdaMesh;
#if defined(__SANITIZE_THREAD__)  // sees two addresses of one memory as two
  static std::vector<RanksAre> kinds() { return {}; }
#else
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
#endif
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    set_up_with([](Device) { return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>()); });
  }
  static void set_up_with(ibgda::Mlx5Nics::MakeRooms rooms) {
    Settings::set({{"WEFT_IBGDA_DEPTH", "16"}});
    Mlx5Fixture::fake() = std::make_unique<FakeMlx5>(NicPlan{.seed = 8});
    FakeMlx5& fake = *Mlx5Fixture::fake();
    Mlx5Fixture::nics() = std::make_unique<ibgda::Mlx5Nics>(fake.verbs(), fake.mlx5(), std::move(rooms));
    ibgda::set_nic_source(Mlx5Fixture::nics().get());
  }
  static void tear_down() { Mlx5Fixture::tear_down(); }
};

// Ports for tests of kernels, in nodes of so many ranks: proxies over a network that reorders and delays, or queues of a
// model of a NIC. FIFOs and rings are small, so that they wrap and fill up.
struct PortsCase {
  const char* ranks_per_node;
  bool has_queues = false;
  const char* fan_out = "auto";  // of low-latency calls

  void set_up() const {
    Settings::set({{"WEFT_LOW_LATENCY_FANOUT", fan_out},
                   {"WEFT_PROXY_PROVIDER", "loopback"},
                   {"WEFT_PROXY_FIFO", "16"},
                   {"WEFT_PROXIES", "2"},
                   {"WEFT_RANKS_PER_NODE", ranks_per_node}});
    if (has_queues) {
      QueueFixture::set_up();
      Settings::set({{"WEFT_TRANSPORT", "mapped,ibgda"}});
    } else {
      ReorderingFixture::network().set_plan({.seed = 5, .reorder = 0.3, .delay = 0.1, .delay_polls = 20});
    }
  }
  void tear_down() const {
    if (has_queues) QueueFixture::tear_down();
    ReorderingFixture::network().set_plan({});
    Settings::clear({"WEFT_PROXY_PROVIDER", "WEFT_PROXY_FIFO", "WEFT_PROXIES", "WEFT_RANKS_PER_NODE",
                     "WEFT_TRANSPORT", "WEFT_LOW_LATENCY_FANOUT"});
  }
  friend void PrintTo(const PortsCase& ports, std::ostream* out) {
    *out << ports.ranks_per_node << (ports.has_queues ? " ibgda " : " proxy ") << ports.fan_out;
  }
};

// Random waits, before calls and between a put and its signal.
struct JitterFixture {
  static constexpr const char* kName = "jitter:proxy";
  static constexpr const char* kTransport = kName;
  using Mesh = JitterMesh<ProxyMesh>;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads}; }
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    ReorderingFixture::set_up();
    Settings::set({{"WEFT_JITTER_US", "300"}, {"WEFT_JITTER_SEED", "5"}});
  }
  static void tear_down() {
    Settings::clear({"WEFT_JITTER_US", "WEFT_JITTER_SEED"});
    ReorderingFixture::tear_down();
  }
};

// Windows of NCCL's and of NVSHMEM's own memory, of libraries that stand in for them on CPUs (tests/support).
template <const char* const& kVersion>
struct NcclFixture {
  static constexpr const char* kName = "nccl";
  static constexpr const char* kTransport = kName;
  using Mesh = MappedMesh;
#if defined(__SANITIZE_THREAD__)  // sees two addresses of one memory as two
  static std::vector<RanksAre> kinds() { return {}; }
#else
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads, RanksAre::kProcesses}; }
#endif
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    Settings::set({{"WEFT_NCCL_LIBRARY", text("{}/libnccl.so.{}", kStandInsDir, kVersion).c_str()}});
  }
  static void tear_down() { Settings::clear({"WEFT_NCCL_LIBRARY"}); }
};
inline constexpr const char* kNccl228 = "2.28";
inline constexpr const char* kNccl230 = "2.30";
using Nccl228Fixture = NcclFixture<kNccl228>;
using Nccl230Fixture = NcclFixture<kNccl230>;

// All ranks to themselves: ports through a fake of NCCL's GIN. Inboxes are small, so that they wrap and fill up.
struct GinFixture {
  static constexpr const char* kName = "nccl";
  static constexpr const char* kTransport = kName;
  using Mesh = NcclMesh;
  static std::vector<RanksAre> kinds() { return Nccl230Fixture::kinds(); }
  static std::vector<int> ranks() { return {2, 3, 11}; }
  static void set_up() {
    Nccl230Fixture::set_up();
    Settings::set({{"WEFT_RANKS_PER_NODE", "1"}, {"WEFT_NCCL_RECORDS", "8"}});
  }
  static void tear_down() {
    Nccl230Fixture::tear_down();
    Settings::clear({"WEFT_RANKS_PER_NODE", "WEFT_NCCL_RECORDS"});
  }
};

// Two ranks to a node, mapped by NCCL; GIN between nodes.
struct GinHybridFixture {
  static constexpr const char* kName = "nccl";
  static constexpr const char* kTransport = "mapped,nccl";
  using Mesh = HybridMesh<MappedMesh, NcclMesh>;
  static std::vector<RanksAre> kinds() { return Nccl230Fixture::kinds(); }
  static std::vector<int> ranks() { return {4, 6}; }
  static void set_up() {
    GinFixture::set_up();
    Settings::set({{"WEFT_RANKS_PER_NODE", "2"}});
  }
  static void tear_down() { GinFixture::tear_down(); }
};

struct NvshmemFixture {
  static constexpr const char* kName = "nvshmem";
  static constexpr const char* kTransport = kName;
  using Mesh = MappedMesh;
#if defined(__SANITIZE_THREAD__)
  static std::vector<RanksAre> kinds() { return {}; }
#else
  static std::vector<RanksAre> kinds() { return {RanksAre::kProcesses}; }
#endif
  static std::vector<int> ranks() { return {3}; }
  static void set_up() {
    Settings::set({{"WEFT_NVSHMEM_LIBRARY", text("{}/libnvshmem_host.so.3", kStandInsDir).c_str()}});
  }
  static void tear_down() { Settings::clear({"WEFT_NVSHMEM_LIBRARY"}); }
};

// All ranks to themselves: ports through a fake of NVSHMEM's device calls.
struct NvshmemPortsFixture {
  static constexpr const char* kName = "nvshmem";
  static constexpr const char* kTransport = kName;
  using Mesh = NvshmemMesh;
  static std::vector<RanksAre> kinds() { return NvshmemFixture::kinds(); }
  static std::vector<int> ranks() { return {2, 5}; }
  static void set_up() {
    NvshmemFixture::set_up();
    Settings::set({{"WEFT_RANKS_PER_NODE", "1"}});
  }
  static void tear_down() {
    NvshmemFixture::tear_down();
    Settings::clear({"WEFT_RANKS_PER_NODE"});
  }
};

// Two ranks to a node, mapped by NVSHMEM; its device calls between nodes.
struct NvshmemHybridFixture {
  static constexpr const char* kName = "nvshmem";
  static constexpr const char* kTransport = "mapped,nvshmem";
  using Mesh = HybridMesh<MappedMesh, NvshmemMesh>;
  static std::vector<RanksAre> kinds() { return NvshmemFixture::kinds(); }
  static std::vector<int> ranks() { return {4}; }
  static void set_up() {
    NvshmemPortsFixture::set_up();
    Settings::set({{"WEFT_RANKS_PER_NODE", "2"}});
  }
  static void tear_down() { NvshmemPortsFixture::tear_down(); }
};

using Fixtures =
    ::testing::Types<MappedFixture, ReorderingFixture, DoublingFixture, TcpFixture, ShmFixture, HybridFixture,
                     JitterFixture, Nccl228Fixture, Nccl230Fixture, GinFixture, GinHybridFixture,
                     NvshmemFixture, NvshmemPortsFixture, NvshmemHybridFixture, QueueFixture,
                     SharedCompletionFixture, Mlx5Fixture, DeviceQueueFixture, VerbsFixture>;
inline constexpr const char* kTestedTransports[] = {MappedFixture::kName,  TcpFixture::kName,
                                                    JitterFixture::kName,  Nccl228Fixture::kName,
                                                    NvshmemFixture::kName, QueueFixture::kName};

// The mesh of a window, if it is of the type that the fixture expects.
template <class Mesh>
Mesh mesh_of(const Window& window) {
  Mesh mesh{};
  EXPECT_EQ(window.mesh().value.size(), sizeof mesh) << window.mesh().type;
  if (window.mesh().value.size() == sizeof mesh) std::memcpy(&mesh, window.mesh().value.data(), sizeof mesh);
  return mesh;
}

}  // namespace weft::testing
