// SPDX-License-Identifier: Apache-2.0
//
// The binary interface of libfabric that the fabric provider uses, for symbol versions FABRIC_1.3
// (fi_getinfo, fi_dupinfo, fi_freeinfo) and FABRIC_1.1 (fi_fabric): the layouts that releases 1.14 to 2.x
// keep. Objects are structs whose first member is a Fid and whose functions hang in tables; a member that
// Weft does not call is a `Slot`. tests/unit/transfer_fabric_abi_test.cc compares every size, offset and
// value with libfabric's own headers where they are installed. Why this exists:
// docs/decisions/0008-providers-open-their-libraries-at-run-time.md.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace weft::provider::fi {

constexpr uint32_t version(uint32_t major, uint32_t minor) {
  return major << 16 | minor;
}

// Capabilities and operation flags
constexpr uint64_t kMsg = 1ull << 1;
constexpr uint64_t kRma = 1ull << 2;
constexpr uint64_t kRead = 1ull << 8;
constexpr uint64_t kWrite = 1ull << 9;
constexpr uint64_t kRecv = 1ull << 10;
constexpr uint64_t kSend = 1ull << 11;
constexpr uint64_t kRemoteRead = 1ull << 12;
constexpr uint64_t kRemoteWrite = 1ull << 13;
constexpr uint64_t kRemoteCqData = 1ull << 17;
constexpr uint64_t kCompletion = 1ull << 24;
constexpr uint64_t kInject = 1ull << 25;
constexpr uint64_t kDeliveryComplete = 1ull << 28;
constexpr uint64_t kHmem = 1ull << 47;
constexpr uint64_t kSource = 1ull << 57;  // of fi_getinfo(): node names the local side

// Modes
constexpr uint64_t kContext = 1ull << 59;
constexpr uint64_t kRxCqData = 1ull << 56;
constexpr uint64_t kContext2 = 1ull << 52;

// Memory registration
constexpr int kMrLocal = 1 << 2;
constexpr int kMrVirtAddr = 1 << 4;
constexpr int kMrAllocated = 1 << 5;
constexpr int kMrProvKey = 1 << 6;
constexpr int kMrEndpoint = 1 << 9;
constexpr int kMrHmem = 1 << 10;

// Message order: what a rail may promise
constexpr uint64_t kOrderWaw = 1ull << 4;
constexpr uint64_t kOrderRmaWaw = 1ull << 35;

constexpr int kFormatSockaddrIn = 2, kFormatSockaddrIn6 = 3;
constexpr int kFormatStr = 9;
constexpr int kAvTable = 2;
constexpr int kProgressManual = 2;
constexpr int kThreadDomain = 3;
constexpr int kEpRdm = 3;
constexpr int kCqFormatData = 3;
constexpr uint32_t kTrafficLowLatency = 0x201;
constexpr int kControlEnable = 6;
constexpr int kHmemSystem = 0;
constexpr int kHmemCuda = 1;
constexpr uint64_t kAddressUnspecified = ~0ull;

// Error numbers beyond errno, as libfabric gives them (negative)
constexpr int kErrAvail = 259;

struct Fid;
struct Domain;
struct Endpoint;
using Slot = void (*)();

struct TxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t tclass;
};
struct RxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t total_buffered_recv, size, iov_limit;
};
struct EpAttr {
  int type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
  uint64_t mem_tag_format;
  size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
  uint8_t* auth_key;
};
struct DomainAttr {
  Domain* domain;
  char* name;
  int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
  size_t mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt;
  size_t max_ep_tx_ctx, max_ep_rx_ctx, max_ep_stx_ctx, max_ep_srx_ctx, cntr_cnt, mr_iov_limit;
  uint64_t caps, mode;
  uint8_t* auth_key;
  size_t auth_key_size, max_err_data, mr_cnt;
  uint32_t tclass;
};
struct FabricAttr {
  void* fabric;
  char *name, *prov_name;
  uint32_t prov_version, api_version;
};
struct PciAttr {
  uint16_t domain_id;
  uint8_t bus_id, device_id, function_id;
};
struct BusAttr {
  int bus_type;  // 1: PCI
  PciAttr pci;
};
struct LinkAttr {
  char* address;
  size_t mtu, speed;  // bits per second
  int state;          // 1: down, 2: up
  char* network_type;
};
struct NicAttr;
struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void *src_addr, *dest_addr;
  Fid* handle;
  TxAttr* tx_attr;
  RxAttr* rx_attr;
  EpAttr* ep_attr;
  DomainAttr* domain_attr;
  FabricAttr* fabric_attr;
  NicAttr* nic;
};

struct FidOps {
  size_t size;
  int (*close)(Fid*);
  int (*bind)(Fid*, Fid*, uint64_t flags);
  int (*control)(Fid*, int command, void* arg);
  Slot ops_open, tostr, ops_set;
};
struct Fid {
  size_t fclass;
  void* context;
  FidOps* ops;
};
struct NicAttr {
  Fid fid;
  void* device_attr;
  BusAttr* bus_attr;
  LinkAttr* link_attr;
  void* prov_attr;
};

struct Fabric {
  Fid fid;
  struct Ops {
    size_t size;
    int (*domain)(Fabric*, Info*, Domain**, void* context);
    Slot passive_ep, eq_open, wait_open, trywait, domain2;
  }* ops;
  uint32_t api_version;
};

struct CqAttr {
  size_t size;
  uint64_t flags;
  int format, wait_obj, signaling_vector, wait_cond;
  void* wait_set;
};
struct CqDataEntry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
};
struct CqErrEntry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
  uint64_t room[4];  // later releases append a source address
};
struct Cq {
  Fid fid;
  struct Ops {
    size_t size;
    ssize_t (*read)(Cq*, void* entries, size_t count);
    Slot readfrom;
    ssize_t (*readerr)(Cq*, CqErrEntry*, uint64_t flags);
    Slot sread, sreadfrom, signal;
    const char* (*strerror)(Cq*, int prov_errno, const void* err_data, char* text, size_t bytes);
  }* ops;
};

struct AvAttr {
  int type, rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};
struct Av {
  Fid fid;
  struct Ops {
    size_t size;
    int (*insert)(Av*, const void* addresses, size_t count, uint64_t* out, uint64_t flags, void* context);
    Slot insertsvc, insertsym;
    int (*remove)(Av*, uint64_t* addresses, size_t count, uint64_t flags);
    Slot lookup, straddr;
  }* ops;
};

struct Mr {
  Fid fid;
  void* mem_desc;
  uint64_t key;
};
struct MrAttr {
  const iovec* mr_iov;
  size_t iov_count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int iface;
  union {
    uint64_t reserved;
    int cuda;
  } device;
  uint64_t room[4];  // later releases append fields that are read only with flags Weft does not set
};
struct Domain {
  Fid fid;
  struct Ops {
    size_t size;
    int (*av_open)(Domain*, AvAttr*, Av**, void* context);
    int (*cq_open)(Domain*, CqAttr*, Cq**, void* context);
    int (*endpoint)(Domain*, Info*, Endpoint**, void* context);
    Slot rest[8];
  }* ops;
  struct MrOps {
    size_t size;
    int (*reg)(Fid*, const void*, size_t, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags,
               Mr**, void*);
    Slot regv;
    int (*regattr)(Fid*, const MrAttr*, uint64_t flags, Mr**);
  }* mr;
};

struct RmaIov {
  uint64_t addr;
  size_t len;
  uint64_t key;
};
struct MsgRma {
  const iovec* msg_iov;
  void** desc;
  size_t iov_count;
  uint64_t addr;
  const RmaIov* rma_iov;
  size_t rma_iov_count;
  void* context;
  uint64_t data;
};
constexpr int kOptEndpoint = 0;  // level
constexpr int kOptCudaApiPermitted = 10, kOptSharedMemoryPermitted = 11;

struct Endpoint {
  Fid fid;
  struct Ops {
    size_t size;
    Slot cancel, getopt;
    int (*setopt)(Fid*, int level, int option, const void* value, size_t bytes);
  }* ops;
  struct CmOps {
    size_t size;
    Slot setname;
    int (*getname)(Fid*, void* address, size_t* bytes);
  }* cm;
  struct MsgOps {
    size_t size;
    ssize_t (*recv)(Endpoint*, void*, size_t, void* desc, uint64_t from, void* context);
    Slot recvv, recvmsg;
    ssize_t (*send)(Endpoint*, const void*, size_t, void* desc, uint64_t to, void* context);
  }* msg;
  struct RmaOps {
    size_t size;
    ssize_t (*read)(Endpoint*, void*, size_t, void* desc, uint64_t from, uint64_t addr, uint64_t key,
                    void* context);
    Slot readv;
    ssize_t (*readmsg)(Endpoint*, const MsgRma*, uint64_t flags);
    ssize_t (*write)(Endpoint*, const void*, size_t, void* desc, uint64_t to, uint64_t addr, uint64_t key,
                     void* context);
    Slot writev;
    ssize_t (*writemsg)(Endpoint*, const MsgRma*, uint64_t flags);
    ssize_t (*inject)(Endpoint*, const void*, size_t, uint64_t to, uint64_t addr, uint64_t key);
    ssize_t (*writedata)(Endpoint*, const void*, size_t, void* desc, uint64_t data, uint64_t to,
                         uint64_t addr, uint64_t key, void* context);
    ssize_t (*injectdata)(Endpoint*, const void*, size_t, uint64_t data, uint64_t to, uint64_t addr,
                          uint64_t key);
  }* rma;
};

}  // namespace weft::provider::fi
