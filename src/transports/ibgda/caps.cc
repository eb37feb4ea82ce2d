// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/caps.h"

#include <sstream>

#include "transports/ibgda/nic.h"
#include "transports/ibgda/wire.h"
#include "transports/port_fault.h"

namespace weft::ibgda {
namespace {

// Estimate: a put with signal through GPU-written queues, half of the 16.7 us of a round trip (arXiv 2511.15076).
constexpr double kLatencyUs = 8.4;

std::string hex(uint32_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << value;
  return out.str();
}

// Not a remote access error: ranges are checked before they are posted, so the peer's memory is no longer registered.
bool is_own_fault(uint32_t syndrome) {
  switch (static_cast<Syndrome>(syndrome)) {
    case Syndrome::kLocalLength:
    case Syndrome::kLocalQueue:
    case Syndrome::kLocalProtection:
    case Syndrome::kWindowBind:
    case Syndrome::kLocalAccess:
    case Syndrome::kRemoteInvalid:
      return true;
    default:
      return false;
  }
}

}  // namespace

const char* to_string(uint32_t syndrome) {
  switch (static_cast<Syndrome>(syndrome)) {
    case Syndrome::kLocalLength:
      return "local length error";
    case Syndrome::kLocalQueue:
      return "local queue operation error";
    case Syndrome::kLocalProtection:
      return "local protection error";
    case Syndrome::kFlushed:
      return "flushed after an earlier error";
    case Syndrome::kWindowBind:
      return "memory window bind error";
    case Syndrome::kBadResponse:
      return "bad response";
    case Syndrome::kLocalAccess:
      return "local access error";
    case Syndrome::kRemoteInvalid:
      return "remote invalid request";
    case Syndrome::kRemoteAccess:
      return "remote access error";
    case Syndrome::kRemoteOperation:
      return "remote operation error";
    case Syndrome::kRetryExceeded:
      return "transport retry counter exceeded";
    case Syndrome::kReceiverNotReady:
      return "receiver-not-ready retry counter exceeded";
    case Syndrome::kAborted:
      return "aborted by the remote side";
  }
  return "unknown syndrome";
}

Caps ibgda_caps(Device device) {
  const NicFinding found = nic_source().find(device);
  Caps caps;
  caps.reach = Reach::kPort;
  caps.needs_registration = true;
  caps.has_atomics = true;
  caps.reaches_gpus = true;
  caps.only_by_name = true;  // until somebody has run it on a NIC
  caps.ordering = Ordering::kSignals;
  caps.max_put_bytes = UINT64_MAX;  // cut into entries
  caps.latency_us = kLatencyUs;
  caps.bandwidth_gb_s = found.gbit_per_s > 0 ? found.gbit_per_s / 8 : 0;
  caps.details =
      found.details + (found.details.empty() ? "" : "; ") + "not run on hardware: taken by name alone";
  if (!found.unusable_because.empty())
    caps.unusable_because = found.unusable_because + "; what it would have reached goes through proxy";
  return caps;
}

std::string ibgda_refuses(const RankFacts& self, const RankFacts& peer, const char* transport) {
  const auto descriptor_of = [&](const RankFacts& rank) {
    const auto found = rank.descriptors.find(transport);
    return found == rank.descriptors.end() ? std::string() : found->second;
  };
  const std::string mine = descriptor_of(self), theirs = descriptor_of(peer);
  if (mine.empty()) return text("rank {} has no NIC whose queues kernels can write", self.rank);
  if (theirs.empty()) return text("rank {} has no NIC whose queues kernels can write", peer.rank);
  if (mine != theirs) return text("one rank's network is {}, the other's {}", mine, theirs);
  if (mine.starts_with("process:") && self.process != peer.process)
    return text("{} joins threads of one process", mine.substr(mine.find(':') + 1));
  return "";
}

Status status_of(const FaultBox& fault) {
  const auto who = text("rank {}, ibgda", fault.self);
  const double waited_s = static_cast<double>(fault.waited_ns) / 1e9;
  const uint32_t syndrome = fault.detail & 255;
  switch (fault.site) {
    case Site::kPortRange:
      return outside_window("ibgda", fault);
    case Site::kQueueRefused:
      return Status::make(
          is_own_fault(syndrome) ? Code::kSystem : Code::kPeerLost,
          "{}: the NIC refused entry {} to rank {}: {} (syndrome {}, vendor {}); {} entries were done", who,
          fault.expected, fault.peer, to_string(syndrome), hex(syndrome), hex(fault.detail >> 8 & 255),
          fault.seen);
    case Site::kQueueOrder:
      return Status::make(
          Code::kPeerLost,
          "{}, post: waited {} s for other warps to publish what they post to rank {}: expected {} "
          "entries, saw {}",
          who, waited_s, fault.peer, fault.expected, fault.seen);
    default:
      return Status::make(
          Code::kPeerLost,
          "{}, {}: waited {} s for the NIC to be done with what goes to rank {}: expected {} entries, "
          "saw {}",
          who, fault.site == Site::kQueueRoom ? "post" : "flush", waited_s, fault.peer, fault.expected,
          fault.seen);
  }
}

}  // namespace weft::ibgda
