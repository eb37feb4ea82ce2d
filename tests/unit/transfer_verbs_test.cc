// SPDX-License-Identifier: Apache-2.0
//
// The verbs provider's choices, and providers/verbs/abi.h against libibverbs' headers where they are
// installed.
#include <gtest/gtest.h>

#include "base/config.h"
#include "providers/verbs/verbs.h"
#include "tests/conformance/fake_verbs.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace weft::provider::ib {

#define SAME_VALUE(mine, theirs) static_assert(uint64_t(mine) == uint64_t(theirs))
#define SAME_PLACE(mine, member, theirs, their_member) \
  static_assert(offsetof(mine, member) == offsetof(theirs, their_member))

static_assert(sizeof(SendWr) == sizeof(ibv_send_wr));
static_assert(sizeof(RecvWr) == sizeof(ibv_recv_wr));
static_assert(sizeof(Wc) == sizeof(ibv_wc));
static_assert(sizeof(Sge) == sizeof(ibv_sge));
static_assert(sizeof(AhAttr) == sizeof(ibv_ah_attr));
static_assert(sizeof(QpInitAttr) == sizeof(ibv_qp_init_attr));
static_assert(sizeof(QpAttr) == sizeof(ibv_qp_attr));
static_assert(sizeof(SrqInitAttr) == sizeof(ibv_srq_init_attr));
static_assert(sizeof(PortAttr) <=
              sizeof(ibv_port_attr));  // rdma-core 56 appended a field; the old symbol leaves it alone
static_assert(sizeof(DeviceAttr) == sizeof(ibv_device_attr));
SAME_PLACE(DeviceAttr, max_cqe, ibv_device_attr, max_cqe);
SAME_PLACE(DeviceAttr, max_qp_rd_atom, ibv_device_attr, max_qp_rd_atom);
SAME_PLACE(DeviceAttr, max_qp_init_rd_atom, ibv_device_attr, max_qp_init_rd_atom);
SAME_PLACE(DeviceAttr, phys_port_cnt, ibv_device_attr, phys_port_cnt);
SAME_PLACE(Context, ops.poll_cq, ibv_context, ops.poll_cq);
SAME_PLACE(Context, ops.post_srq_recv, ibv_context, ops.post_srq_recv);
SAME_PLACE(Context, ops.post_send, ibv_context, ops.post_send);
SAME_PLACE(Context, ops.post_recv, ibv_context, ops.post_recv);
static_assert(sizeof(Context::Ops) == sizeof(ibv_context_ops));
SAME_PLACE(SendWr, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendWr, imm_data, ibv_send_wr, imm_data);
SAME_PLACE(SendWr, wr.rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_PLACE(SendWr, wr.ud.remote_qkey, ibv_send_wr, wr.ud.remote_qkey);
SAME_PLACE(Wc, imm_data, ibv_wc, imm_data);
SAME_PLACE(Wc, qp_num, ibv_wc, qp_num);
SAME_PLACE(Qp, qp_num, ibv_qp, qp_num);
SAME_PLACE(Mr, rkey, ibv_mr, rkey);
SAME_PLACE(QpAttr, dest_qp_num, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QpAttr, ah_attr, ibv_qp_attr, ah_attr);
SAME_PLACE(QpAttr, rnr_retry, ibv_qp_attr, rnr_retry);
SAME_PLACE(QpAttr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(AhAttr, is_global, ibv_ah_attr, is_global);
SAME_PLACE(AhAttr, port_num, ibv_ah_attr, port_num);
SAME_PLACE(PortAttr, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttr, link_layer, ibv_port_attr, link_layer);
SAME_VALUE(kOpWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kOpWriteImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kOpSend, IBV_WR_SEND);
SAME_VALUE(kOpRead, IBV_WR_RDMA_READ);
SAME_VALUE(kSendSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kWcRecv, IBV_WC_RECV);
SAME_VALUE(kWcRecvWriteImm, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kWcLengthError, IBV_WC_LOC_LEN_ERR);
SAME_VALUE(kWcProtectionError, IBV_WC_LOC_PROT_ERR);
SAME_VALUE(kWcAccessError, IBV_WC_LOC_ACCESS_ERR);
SAME_VALUE(kWcRemoteAccessError, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kWcFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kWcRetryExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kWcRnrExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(kStateInit, IBV_QPS_INIT);
SAME_VALUE(kStateRtr, IBV_QPS_RTR);
SAME_VALUE(kStateRts, IBV_QPS_RTS);
SAME_VALUE(kStateError, IBV_QPS_ERR);
SAME_VALUE(kTypeRc, IBV_QPT_RC);
SAME_VALUE(kTypeUd, IBV_QPT_UD);
SAME_VALUE(kAccessRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(kMaskState, IBV_QP_STATE);
SAME_VALUE(kMaskAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kMaskPkey, IBV_QP_PKEY_INDEX);
SAME_VALUE(kMaskPort, IBV_QP_PORT);
SAME_VALUE(kMaskQkey, IBV_QP_QKEY);
SAME_VALUE(kMaskAv, IBV_QP_AV);
SAME_VALUE(kMaskMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kMaskTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kMaskRetry, IBV_QP_RETRY_CNT);
SAME_VALUE(kMaskRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kMaskRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kMaskRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kMaskRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kMaskSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kMaskDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kMaskDestQpn, IBV_QP_DEST_QPN);

TEST(VerbsAbi, AgreesWithTheHeaders) {
  SUCCEED() << "checked at compile time";
}

}  // namespace weft::provider::ib
#else
TEST(VerbsAbi, AgreesWithTheHeaders) {
  GTEST_SKIP() << "libibverbs' headers are not installed (package libibverbs-dev)";
}
#endif

namespace weft::provider::ib {
namespace {

GidEntry entry(int index, std::initializer_list<int> head, std::initializer_list<int> tail,
               const char* type) {
  GidEntry made{index, {}, type};
  int at = 0;
  for (int byte : head) made.gid.raw[at++] = static_cast<uint8_t>(byte);
  at = 16 - static_cast<int>(tail.size());
  for (int byte : tail) made.gid.raw[at++] = static_cast<uint8_t>(byte);
  return made;
}

TEST(VerbsGid, PrefersRoceV2OverV1AndIpv4OverIpv6) {
  const GidEntry local = entry(0, {0xfe, 0x80}, {1}, "RoCE v2");
  const GidEntry v1 = entry(1, {}, {0xff, 0xff, 10, 0, 0, 1}, "IB/RoCE v1");
  const GidEntry v6 = entry(2, {0x20, 1}, {1}, "RoCE v2");
  const GidEntry v4 = entry(3, {}, {0xff, 0xff, 10, 0, 0, 1}, "RoCE v2");
  EXPECT_EQ(choose_gid({local, v1, v6, v4}), 3);
  EXPECT_EQ(choose_gid({local, v1, v6}), 2);
  EXPECT_EQ(choose_gid({local, v1}), 1);
  EXPECT_EQ(choose_gid({local}), -1);
  EXPECT_EQ(choose_gid({}), -1);
}

// One setting of the environment while it lives.
class Setting {
 public:
  Setting(const char* variable, const char* value) : variable_(variable) {
    setenv(variable, value, 1);
    config_reload();
  }
  ~Setting() {
    unsetenv(variable_);
    config_reload();
  }

 private:
  const char* variable_;
};

TEST(VerbsProbe, PortAndGidCanBeGiven) {
  const auto fake = transfer::testing::make_fake_verbs();
  const auto whys = [&](const char* variable, const char* value) {
    const Setting setting(variable, value);
    return fake->probe()[0].unusable_because;
  };
  EXPECT_EQ(whys("WEFT_IB_PORT", "2"), "");
  EXPECT_EQ(whys("WEFT_IB_PORT", "1"), "port 1 (WEFT_IB_PORT) is not active");
  EXPECT_EQ(whys("WEFT_IB_PORT", "9"), "port 9 (WEFT_IB_PORT) is not active");
  EXPECT_EQ(whys("WEFT_GID_INDEX", "2"), "");
  EXPECT_EQ(whys("WEFT_GID_INDEX", "4"), "GID 4 (WEFT_GID_INDEX) is beyond its 4");
  EXPECT_EQ(whys("WEFT_PKEY", "0x8001"), "");
  EXPECT_EQ(whys("WEFT_PKEY", "0x1"), "") << "the top bit says how a port is a member, not of what";
  EXPECT_EQ(whys("WEFT_PKEY", "0x8002"), "port 2 is not in the partition of P_Key 0x8002 (WEFT_PKEY)");
}

TEST(VerbsProbe, SettingsThatDoNotFitAreRefused) {
  const Setting setting("WEFT_RC_RETRY", "8");
  const auto fake = transfer::testing::make_fake_verbs();
  const auto rail = fake->open(fake->probe()[0], {});
  EXPECT_EQ(rail.status().message(), "WEFT_RC_RETRY: got '8', allowed: whole number, 0 to 7");
}

TEST(VerbsProbe, SaysWhyNothingIsUsable) {
  const std::vector<Nic> nics = make_verbs()->probe();
  ASSERT_FALSE(nics.empty());
  for (const Nic& nic : nics) EXPECT_NE(nic.usable(), !nic.unusable_because.empty());
}

}  // namespace
}  // namespace weft::provider::ib
