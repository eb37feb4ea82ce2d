// SPDX-License-Identifier: Apache-2.0
//
// providers/fabric/abi.h against libfabric's own headers, where they are installed. All checks are at compile
// time.
#include "providers/fabric/abi.h"

#include <gtest/gtest.h>

#if __has_include(<rdma/fi_rma.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

namespace weft::provider::fi {

#define SAME_VALUE(mine, theirs) static_assert(uint64_t(mine) == uint64_t(theirs))
#define SAME_PLACE(mine, member, theirs, their_member) \
  static_assert(offsetof(mine, member) == offsetof(theirs, their_member))
#define SAME_SIZE(mine, theirs) static_assert(sizeof(mine) == sizeof(theirs))

SAME_VALUE(kMsg, FI_MSG);
SAME_VALUE(kRma, FI_RMA);
SAME_VALUE(kRead, FI_READ);
SAME_VALUE(kWrite, FI_WRITE);
SAME_VALUE(kRecv, FI_RECV);
SAME_VALUE(kSend, FI_SEND);
SAME_VALUE(kRemoteRead, FI_REMOTE_READ);
SAME_VALUE(kRemoteWrite, FI_REMOTE_WRITE);
SAME_VALUE(kRemoteCqData, FI_REMOTE_CQ_DATA);
SAME_VALUE(kCompletion, FI_COMPLETION);
SAME_VALUE(kInject, FI_INJECT);
SAME_VALUE(kDeliveryComplete, FI_DELIVERY_COMPLETE);
SAME_VALUE(kHmem, FI_HMEM);
SAME_VALUE(kSource, FI_SOURCE);
SAME_VALUE(kContext, FI_CONTEXT);
SAME_VALUE(kRxCqData, FI_RX_CQ_DATA);
SAME_VALUE(kContext2, FI_CONTEXT2);
SAME_VALUE(kMrLocal, FI_MR_LOCAL);
SAME_VALUE(kMrVirtAddr, FI_MR_VIRT_ADDR);
SAME_VALUE(kMrAllocated, FI_MR_ALLOCATED);
SAME_VALUE(kMrProvKey, FI_MR_PROV_KEY);
SAME_VALUE(kMrEndpoint, FI_MR_ENDPOINT);
SAME_VALUE(kMrHmem, FI_MR_HMEM);
SAME_VALUE(kOrderWaw, FI_ORDER_WAW);
SAME_VALUE(kOrderRmaWaw, FI_ORDER_RMA_WAW);
SAME_VALUE(kFormatSockaddrIn, FI_SOCKADDR_IN);
SAME_VALUE(kFormatSockaddrIn6, FI_SOCKADDR_IN6);
SAME_VALUE(kFormatStr, FI_ADDR_STR);
SAME_VALUE(kAvTable, FI_AV_TABLE);
SAME_VALUE(kProgressManual, FI_PROGRESS_MANUAL);
SAME_VALUE(kThreadDomain, FI_THREAD_DOMAIN);
SAME_VALUE(kEpRdm, FI_EP_RDM);
SAME_VALUE(kCqFormatData, FI_CQ_FORMAT_DATA);
SAME_VALUE(kTrafficLowLatency, FI_TC_LOW_LATENCY);
SAME_VALUE(kControlEnable, FI_ENABLE);
SAME_VALUE(kHmemCuda, FI_HMEM_CUDA);
SAME_VALUE(kErrAvail, FI_EAVAIL);

SAME_SIZE(TxAttr, fi_tx_attr);
SAME_SIZE(RxAttr, fi_rx_attr);
SAME_SIZE(EpAttr, fi_ep_attr);
SAME_SIZE(DomainAttr, fi_domain_attr);
SAME_SIZE(FabricAttr, fi_fabric_attr);
SAME_SIZE(Info, fi_info);
SAME_SIZE(Fid, fid);
SAME_SIZE(CqAttr, fi_cq_attr);
SAME_SIZE(CqDataEntry, fi_cq_data_entry);
SAME_SIZE(AvAttr, fi_av_attr);
SAME_SIZE(RmaIov, fi_rma_iov);
SAME_SIZE(MsgRma, fi_msg_rma);
SAME_SIZE(Mr, fid_mr);
static_assert(sizeof(CqErrEntry) >= sizeof(fi_cq_err_entry));
static_assert(sizeof(MrAttr) >= sizeof(fi_mr_attr));

SAME_PLACE(TxAttr, size, fi_tx_attr, size);
SAME_PLACE(RxAttr, size, fi_rx_attr, size);
SAME_PLACE(EpAttr, max_msg_size, fi_ep_attr, max_msg_size);
SAME_PLACE(EpAttr, max_order_waw_size, fi_ep_attr, max_order_waw_size);
SAME_PLACE(DomainAttr, mr_mode, fi_domain_attr, mr_mode);
SAME_PLACE(DomainAttr, cq_data_size, fi_domain_attr, cq_data_size);
SAME_PLACE(DomainAttr, mr_key_size, fi_domain_attr, mr_key_size);
SAME_PLACE(FabricAttr, prov_name, fi_fabric_attr, prov_name);
SAME_PLACE(Info, src_addr, fi_info, src_addr);
SAME_PLACE(Info, domain_attr, fi_info, domain_attr);
SAME_PLACE(Info, nic, fi_info, nic);
SAME_PLACE(NicAttr, link_attr, fid_nic, link_attr);
SAME_PLACE(LinkAttr, speed, fi_link_attr, speed);
SAME_PLACE(BusAttr, pci, fi_bus_attr, attr);
SAME_PLACE(FidOps, control, fi_ops, control);
SAME_PLACE(Fabric, ops, fid_fabric, ops);
SAME_PLACE(Fabric::Ops, domain, fi_ops_fabric, domain);
SAME_PLACE(Domain, mr, fid_domain, mr);
SAME_PLACE(Domain::Ops, endpoint, fi_ops_domain, endpoint);
SAME_PLACE(Domain::MrOps, regattr, fi_ops_mr, regattr);
SAME_PLACE(Cq::Ops, readerr, fi_ops_cq, readerr);
SAME_PLACE(Cq::Ops, strerror, fi_ops_cq, strerror);
SAME_PLACE(CqErrEntry, err, fi_cq_err_entry, err);
SAME_PLACE(CqErrEntry, err_data_size, fi_cq_err_entry, err_data_size);
SAME_PLACE(Av::Ops, insert, fi_ops_av, insert);
SAME_PLACE(Av::Ops, remove, fi_ops_av, remove);
SAME_PLACE(MrAttr, requested_key, fi_mr_attr, requested_key);
SAME_PLACE(MrAttr, device, fi_mr_attr, device);
SAME_PLACE(Endpoint, ops, fid_ep, ops);
SAME_PLACE(Endpoint::Ops, setopt, fi_ops_ep, setopt);
static_assert(kOptEndpoint == FI_OPT_ENDPOINT && kOptCudaApiPermitted == FI_OPT_XPU_TRIGGER + 1);
SAME_PLACE(Endpoint, cm, fid_ep, cm);
SAME_PLACE(Endpoint, msg, fid_ep, msg);
SAME_PLACE(Endpoint, rma, fid_ep, rma);
SAME_PLACE(Endpoint::CmOps, getname, fi_ops_cm, getname);
SAME_PLACE(Endpoint::MsgOps, recv, fi_ops_msg, recv);
SAME_PLACE(Endpoint::MsgOps, send, fi_ops_msg, send);
SAME_PLACE(Endpoint::RmaOps, read, fi_ops_rma, read);
SAME_PLACE(Endpoint::RmaOps, readmsg, fi_ops_rma, readmsg);
SAME_PLACE(Endpoint::RmaOps, write, fi_ops_rma, write);
SAME_PLACE(Endpoint::RmaOps, writemsg, fi_ops_rma, writemsg);
SAME_PLACE(Endpoint::RmaOps, writedata, fi_ops_rma, writedata);
SAME_PLACE(MsgRma, context, fi_msg_rma, context);

TEST(FabricAbi, AgreesWithTheHeaders) {
  SUCCEED() << "checked at compile time";
}

}  // namespace weft::provider::fi
#else
TEST(FabricAbi, AgreesWithTheHeaders) {
  GTEST_SKIP() << "libfabric's headers are not installed (package libfabric-dev)";
}
#endif
