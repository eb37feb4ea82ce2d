// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/mlx5_opened.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "kernels/target/target.h"

namespace weft::ibgda {

Status failed(const char* what, const std::string& nic) {
  return logged(Status::from_errno(errno, "ibgda: {} on {}", what, nic));
}

std::string address_of(const Opened& nic, uint32_t number, uint32_t psn) {
  QueueAddress own;
  own.number = number;
  own.psn = psn;
  own.gid = nic.gid;
  own.lid = nic.port.attr.lid;
  own.mtu = static_cast<uint8_t>(nic.port.attr.active_mtu);
  own.is_ethernet = nic.port.attr.link_layer == IBV_LINK_LAYER_ETHERNET;
  return {reinterpret_cast<const char*>(&own), sizeof own};
}

Result<QueueAddress> read_address(std::string_view bytes) {
  QueueAddress peer;
  if (bytes.size() != sizeof peer || bytes.substr(0, 4) != "mlx5")
    return Status::invalid("address: got {} bytes that no mlx5 queue made, allowed: {}", bytes.size(),
                           sizeof peer);
  std::memcpy(static_cast<void*>(&peer), bytes.data(), sizeof peer);
  return peer;
}

Route route_to(const Opened& nic, const QueueAddress& peer) {
  const auto own_mtu = static_cast<uint8_t>(nic.port.attr.active_mtu);
  return {
      ib::route_to(nic.port.port, nic.port.gid_index, {peer.gid, peer.lid, peer.mtu, peer.is_ethernet != 0}),
      std::min(own_mtu, peer.mtu)};
}

// A GPU's driver may refuse to map the register; then the host rings.
Status Doorbell::open(Opened& nic, void* reg) {
  nic_ = &nic;
  register_ = at_ = static_cast<uint64_t*>(reg);
  if (!nic.pages) return {};
  const Status mapped = nic.pages->pin(register_, sizeof(uint64_t), PinnedPages::kRegister);
  is_pinned_ = mapped.ok();
  if (is_pinned_) return {};
  WEFT_TRY_ASSIGN(word_, HostVisible::create(nic.device, sizeof(uint64_t)));
  at_ = word_->at<uint64_t>(0);
  log_info("ibgda: a thread of the host rings {}'s doorbells: {}", nic.name, mapped.message());
  return {};
}

void Doorbell::close() {
  if (is_pinned_) nic_->pages->unpin(register_, sizeof(uint64_t));
  is_pinned_ = false;
  word_.reset();
}

void Doorbell::ring(uint64_t doorbell) const {
  store_register(register_, doorbell);
}

}  // namespace weft::ibgda
