// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/nic.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "topology/rdma_devices.h"

namespace weft::provider {
namespace {

constexpr uint32_t kTxDepthMax = 1024;
constexpr uint64_t kCopiedPerPost = 1 << 20;

Caps caps_of(const fi_info& info, const std::string& kind) {
  Caps caps;
  const uint64_t order = info.tx_attr->msg_order & info.rx_attr->msg_order;
  caps.ordered_writes = (order & FI_ORDER_WAW) && (order & FI_ORDER_RMA_WAW) &&
                        info.ep_attr->max_order_waw_size >= info.ep_attr->max_msg_size;
  // cxi takes data with writes only when a variable of its own is set. Over verbs, connections share their receives, and a
  // shared receive that ends by such data libfabric takes for a message, since 1.16. Notices travel as messages there.
  caps.write_imm = info.domain_attr->cq_data_size >= 4 && kind != "cxi" && kind != "verbs";
  caps.imm_bits = info.domain_attr->cq_data_size >= 8 ? 64 : 32;
  // Its packets carry the Q_Key of the endpoint that they go to, a random number that is part of its address.
  if (kind == "efa") caps.source = Source::kAddress;
  caps.device_memory = (info.caps & FI_HMEM) != 0;
  caps.manual_progress = info.domain_attr->data_progress == FI_PROGRESS_MANUAL;
  caps.same_host = kind == "shm";
  caps.packs_small_pages = kind == "shm";
  caps.pages_apart = kind == "tcp";
  caps.takes_temporary = kind == "tcp";
  caps.write_bytes_max = std::min<uint64_t>(info.ep_attr->max_msg_size, uint64_t{1} << 40);
  // To processes of this host a write is a copy by this one, under way until the call returns.
  if (kind == "shm") caps.write_bytes_max = std::min(caps.write_bytes_max, kCopiedPerPost);
  caps.message_bytes_max = std::min<uint64_t>(info.ep_attr->max_msg_size, 8192);
  // shm copies what it can inject; the rest the peer fetches, perhaps after this process has let go of it.
  if (kind == "shm") caps.message_bytes_max = std::min(caps.message_bytes_max, info.tx_attr->inject_size);
  caps.tx_depth = static_cast<uint32_t>(std::min<size_t>(info.tx_attr->size, kTxDepthMax));
  caps.cq_depth = 2 * caps.tx_depth + static_cast<uint32_t>(std::min<size_t>(info.rx_attr->size, 4096));
  return caps;
}

// Without such an address libfabric offers the datagrams of a device alone, or connections that could not be made.
constexpr const char* kNoAddress = "its interface has no address of IP but a link-local one";

}  // namespace

std::string interface_address(const fi_info& info) {
  char text[INET_ADDRSTRLEN] = {};
  if (info.addr_format == FI_SOCKADDR_IN && info.src_addrlen >= sizeof(sockaddr_in))
    inet_ntop(AF_INET, &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr, text, sizeof text);
  return text;
}

std::string nic_name(const fi_info& info, const std::string& kind) {
  std::string name = info.domain_attr->name ? info.domain_attr->name : "?";
  if (kind == "verbs") return name.substr(0, name.find("-dgram"));
  const std::string address = interface_address(info);
  return address.empty() ? name : name + "@" + address;
}

std::string why_unfit(const fi_info& info, const std::string& kind) {
  if (kind == "tcp") return interface_address(info).empty() ? "it has no address of IPv4" : "";
  if (kind != "verbs") return "";
  if (std::string_view(info.domain_attr->name ? info.domain_attr->name : "").ends_with("-dgram"))
    return kNoAddress;
  if (!interface_address(info).empty()) return "";
  const bool is_v6 = info.addr_format == FI_SOCKADDR_IN6 && info.src_addrlen >= sizeof(sockaddr_in6);
  if (is_v6 && !IN6_IS_ADDR_LINKLOCAL(&static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr)) return "";
  return kNoAddress;
}

Nic describe(const fi_info& info, const std::string& kind) {
  Nic nic;
  nic.provider = "fabric:" + kind;
  nic.name = nic_name(info, kind);
  nic.caps = caps_of(info, kind);
  if (info.nic && info.nic->link_attr) nic.gbit_per_s = static_cast<double>(info.nic->link_attr->speed) / 1e9;
  if (info.nic && info.nic->bus_attr && info.nic->bus_attr->bus_type == FI_BUS_PCI) {
    const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
    char text[32];
    snprintf(text, sizeof text, "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id,
             pci.function_id);
    nic.pci = text;
    std::ifstream("/sys/bus/pci/devices/" + nic.pci + "/numa_node") >> nic.numa_node;
  }
  if (kind == "verbs") {
    const RdmaDevice device = rdma_device(nic.name, 1);
    nic.pci = device.place.pci;
    nic.numa_node = device.place.numa_node;
    nic.gbit_per_s = device.gbit_per_s;
  }
  nic.unusable_because = why_unfit(info, kind);
  return nic;
}

}  // namespace weft::provider
