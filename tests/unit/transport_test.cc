// SPDX-License-Identifier: Apache-2.0
#include "transports/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport_choice.h"
#include "memory/range.h"
#include "transports/mapped_peers.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Fake : public Transport {
 public:
  Fake(const char* name, bool is_local) : name_(name), is_local_(is_local) {}
  const char* name() const override { return name_; }
  const char* carried_by() const override { return ""; }
  Caps caps(Device) const override { return {}; }
  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    return !is_local_ || self.host == peer.host ? "" : "far away";
  }
  Result<std::unique_ptr<Link>> connect(const Group&) const override { return std::unique_ptr<Link>(); }

 private:
  const char* const name_;
  const bool is_local_;
};

const Fake kNear("near", true), kFar("far", false), kOdd("odd", false);

Candidate usable(const Transport& transport) {
  return {&transport, {}};
}
Candidate only_by_name(const Transport& transport) {
  Candidate candidate{&transport, {}};
  candidate.caps.only_by_name = true;
  return candidate;
}
Candidate unusable(const Transport& transport, std::string why) {
  Candidate candidate{&transport, {}};
  candidate.caps.unusable_because = std::move(why);
  return candidate;
}

std::vector<RankFacts> ranks_on(const std::vector<std::string>& hosts) {
  std::vector<RankFacts> facts;
  for (const std::string& host : hosts) {
    RankFacts rank;
    rank.rank = static_cast<int>(facts.size());
    rank.host = host;
    facts.push_back(rank);
  }
  return facts;
}

std::vector<int> nodes_of(std::vector<RankFacts> facts, int64_t ranks_per_node) {
  number_nodes(facts, ranks_per_node);
  std::vector<int> nodes;
  for (const RankFacts& rank : facts) nodes.push_back(rank.node);
  return nodes;
}

TEST(SelectTransport, TakesTheFirstThatReachesEachPeer) {
  const auto facts = ranks_on({"a", "a", "b"});
  const auto chosen = select_transports({usable(kNear), usable(kFar)}, facts, 0, "auto");
  ASSERT_TRUE(chosen.ok());
  EXPECT_THAT(*chosen, ElementsAre(nullptr, &kNear, &kFar));
}

TEST(SelectTransport, AnOverrideAppliesToEveryPeer) {
  const auto facts = ranks_on({"a", "a", "b"});
  EXPECT_THAT(*select_transports({usable(kNear), usable(kFar)}, facts, 1, "far"),
              ElementsAre(&kFar, nullptr, &kFar));
}

TEST(SelectTransport, SeveralNamesAreTheChoiceForEachPeer) {
  const auto facts = ranks_on({"a", "a", "b"});
  const std::vector<Candidate> all = {usable(kNear), usable(kFar), only_by_name(kOdd)};
  EXPECT_THAT(*select_transports(all, facts, 0, "near,odd"), ElementsAre(nullptr, &kNear, &kOdd));
  EXPECT_THAT(*select_transports(all, facts, 0, "far,near"), ElementsAre(nullptr, &kNear, &kFar));
  for (const char* wanted : {"near,pigeon", "near,", ",", "near odd", "auto,near", "near,near,pigeon"})
    EXPECT_EQ(select_transports(all, facts, 0, wanted).status().message(),
              text("transport: got '{}', allowed: auto, near, far, odd", wanted));
}

TEST(SelectTransport, AutoLeavesOutWhatIsTakenByNameAlone) {
  const auto facts = ranks_on({"a", "b"});
  const std::vector<Candidate> all = {usable(kNear), only_by_name(kOdd)};
  EXPECT_EQ(select_transports(all, facts, 0, "auto").status().message(),
            "transport 'auto': rank 0 cannot reach rank 1 (near: far away)");
  EXPECT_THAT(*select_transports(all, facts, 0, "odd"), ElementsAre(nullptr, &kOdd));
}

TEST(SelectTransport, AnImpossibleChoiceSaysWhoAndWhy) {
  const auto facts = ranks_on({"a", "b"});
  const Status insisted = select_transports({usable(kNear), usable(kFar)}, facts, 0, "near").status();
  EXPECT_EQ(insisted.code(), Code::kUnsupported);
  EXPECT_EQ(insisted.message(), "transport 'near': rank 0 cannot reach rank 1 (near: far away)");
  const Status none =
      select_transports({usable(kNear), unusable(kFar, "no cable")}, facts, 1, "auto").status();
  EXPECT_EQ(none.message(), "transport 'auto': rank 1 cannot reach rank 0 (near: far away; far: no cable)");
}

TEST(SelectTransport, AnUnknownNameListsTheKnownOnes) {
  const Status status =
      select_transports({usable(kNear), usable(kFar)}, ranks_on({"a"}), 0, "pigeon").status();
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(status.message(), "transport: got 'pigeon', allowed: auto, near, far");
}

TEST(SelectTransport, OneRankNeedsNone) {
  EXPECT_THAT(*select_transports({unusable(kNear, "x")}, ranks_on({"a"}), 0, "auto"), ElementsAre(nullptr));
}

TEST(Nodes, AreHosts) {
  EXPECT_THAT(nodes_of(ranks_on({"a", "b", "a", "b"}), 0), ElementsAre(0, 1, 0, 1));
}

TEST(Nodes, ArePartsOfAHostWhenToldSo) {
  EXPECT_THAT(nodes_of(ranks_on({"a", "a", "a", "a", "a"}), 2), ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(nodes_of(ranks_on({"a", "b", "a", "b", "a"}), 2), ElementsAre(0, 1, 0, 1, 2));
  EXPECT_THAT(nodes_of(ranks_on({"a", "a"}), 8), ElementsAre(0, 0));
}

TEST(Mapped, ReachesRanksOfItsNode) {
  auto facts = ranks_on({"a", "a", "b"});
  EXPECT_EQ(why_not_mapped(facts[0], facts[1]), "");
  EXPECT_THAT(why_not_mapped(facts[0], facts[2]), HasSubstr("different hosts"));
  number_nodes(facts, 1);
  EXPECT_THAT(why_not_mapped(facts[0], facts[1]), HasSubstr("WEFT_RANKS_PER_NODE"));
}

TEST(Mapped, NeedsDevicesThatReachEachOther) {
  auto facts = ranks_on({"a", "a"});
  facts[0].device = {Device::Kind::kCuda, 0};
  EXPECT_THAT(why_not_mapped(facts[0], facts[1]), HasSubstr("one rank uses cuda:0, the other cpu"));
  facts[1].device = {Device::Kind::kCuda, 1};
  facts[0].gpu = "0000:1b:00.0";
  facts[1].gpu = "0000:2b:00.0";
  EXPECT_EQ(why_not_mapped(facts[0], facts[1]), "");
  facts[0].gpus_beyond = "0000:3b:00.0,0000:2b:00.0,";
  EXPECT_EQ(why_not_mapped(facts[0], facts[1]), "GPU 0000:1b:00.0 has no peer access to GPU 0000:2b:00.0");
}

std::vector<RankFacts> gpu_ranks(std::initializer_list<std::pair<bool, bool>> vmm_and_ipc) {
  std::vector<RankFacts> facts;
  for (const auto& [vmm, ipc] : vmm_and_ipc) {
    RankFacts rank;
    rank.rank = static_cast<int>(facts.size());
    rank.device = {Device::Kind::kCuda, rank.rank};
    rank.gpu = text("gpu{}", rank.rank);
    rank.can_share_vmm = vmm;
    rank.can_share_ipc = ipc;
    facts.push_back(rank);
  }
  return facts;
}

TEST(Sharing, IsVmmWhereEveryGpuHasItElseIpc) {
  EXPECT_EQ(*choose_sharing(ranks_on({"a", "a"}), {0, 1}, "auto", false), Sharing::kHostMemory);
  EXPECT_EQ(*choose_sharing(gpu_ranks({{true, true}, {true, true}}), {0, 1}, "auto", false),
            Sharing::kCudaVmm);
  EXPECT_EQ(*choose_sharing(gpu_ranks({{true, true}, {false, true}}), {0, 1}, "auto", false),
            Sharing::kCudaIpc);
  EXPECT_EQ(*choose_sharing(gpu_ranks({{true, true}, {false, true}}), {0}, "auto", false), Sharing::kCudaVmm);
  EXPECT_EQ(*choose_sharing(gpu_ranks({{true, true}, {true, true}}), {0, 1}, "ipc", false),
            Sharing::kCudaIpc);
}

TEST(Sharing, IsPinnedWhereGpusHavePortPeers) {
  EXPECT_EQ(*choose_sharing(gpu_ranks({{true, true}, {true, true}}), {0}, "auto", true),
            Sharing::kCudaPinned);
  EXPECT_EQ(*choose_sharing(gpu_ranks({{false, false}}), {0}, "auto", true), Sharing::kCudaPinned);
  EXPECT_EQ(*choose_sharing(ranks_on({"a", "b"}), {0}, "auto", true), Sharing::kHostMemory);
}

TEST(PortWindows, LieInTheDeviceWhereEveryRanksIsReached) {
  const auto all = choose_port_windows({"", "", ""}, {"", "", ""}, false, "auto");
  ASSERT_TRUE(all.ok());
  EXPECT_TRUE(all->are_in_device);
  EXPECT_FALSE(all->have_host_part);
  const auto one_not = choose_port_windows({"", "no NIC", "no driver"}, {"", "", ""}, false, "auto");
  ASSERT_TRUE(one_not.ok());
  EXPECT_FALSE(one_not->are_in_device);
  EXPECT_EQ(one_not->why, "rank 1: no NIC");
  const auto forced = choose_port_windows({"", "no NIC"}, {"", ""}, false, "device");
  EXPECT_EQ(forced.status().code(), Code::kUnsupported);
  EXPECT_EQ(forced.status().message(), "WEFT_PORT_WINDOWS=device: rank 1: no NIC");
  EXPECT_TRUE(choose_port_windows({"", ""}, {"", ""}, false, "device")->are_in_device);
  EXPECT_FALSE(choose_port_windows({"", ""}, {"", ""}, false, "host")->are_in_device);
}

TEST(PortWindows, HaveAHostPartWhereHostsStoreWords) {
  const auto reached = choose_port_windows({"", ""}, {"", ""}, true, "auto");
  ASSERT_TRUE(reached.ok());
  EXPECT_TRUE(reached->are_in_device && reached->have_host_part);
  const auto unreached = choose_port_windows({"", "no NIC"}, {"", ""}, true, "auto");
  ASSERT_TRUE(unreached.ok());
  EXPECT_FALSE(unreached->are_in_device);
  EXPECT_TRUE(unreached->have_host_part);
  EXPECT_EQ(unreached->why, "rank 1: no NIC");
  const auto whole = choose_port_windows({"", ""}, {"no nodes", ""}, true, "auto");
  ASSERT_TRUE(whole.ok());
  EXPECT_FALSE(whole->are_in_device || whole->have_host_part);
  EXPECT_EQ(whole->why, "rank 0: no nodes");
  EXPECT_EQ(choose_port_windows({"", ""}, {"no nodes", ""}, true, "device").status().message(),
            "WEFT_PORT_WINDOWS=device: rank 0: no nodes");
  EXPECT_FALSE(choose_port_windows({"", ""}, {"", ""}, true, "host")->have_host_part);
}

TEST(Sharing, NamesTheRankThatCannot) {
  const auto facts = gpu_ranks({{true, false}, {false, true}});
  EXPECT_THAT(choose_sharing(facts, {0, 1}, "vmm", false).status().message(), HasSubstr("rank 1's GPU gpu1"));
  EXPECT_THAT(choose_sharing(facts, {0, 1}, "ipc", false).status().message(), HasSubstr("rank 0's GPU gpu0"));
  EXPECT_EQ(choose_sharing(facts, {0, 1}, "auto", false).status().code(), Code::kUnsupported);
  EXPECT_EQ(choose_sharing(facts, {0, 1}, "smoke", false).status().code(), Code::kInvalid);
}

TEST(HostId, IsTheSameOnEveryCall) {
  EXPECT_EQ(host_id(), host_id());
  EXPECT_GT(host_id().size(), 10u);
}

}  // namespace
}  // namespace weft
