// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/network.h"

#include <algorithm>

#include "base/config.h"

namespace weft::proxy {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(',', at), names.size());
    if (end > at) parts.push_back(names.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

}  // namespace

// Broadcom's and Pensando's adapters answer more with lost packets and retries ("transport retry exceeded"),
// the first with a tenth of the bandwidth; the others take what their queues hold.
const std::vector<Pace>& paces() {
  static const std::vector<Pace> all = {
      {"bnxt_re", 3 * kMiB / 2, 1},  // Broadcom Thor-2
      {"ionic", 2 * kMiB, 1},        // AMD Pollara
      {"rdmap", 16 * kMiB, 256},     // EFA
      {"mlx5", 64 * kMiB, 256},      // ConnectX
      {"", 16 * kMiB, 256},
  };
  return all;
}

const Pace& pace_of(std::string_view nic_name) {
  return *std::ranges::find_if(paces(), [&](const Pace& pace) { return nic_name.starts_with(pace.family); });
}

Result<Network> choose_network(const std::string& wanted, const std::string& nics, Device device) {
  WEFT_TRY_ASSIGN(std::shared_ptr<provider::Provider> found, provider::find_provider(wanted));
  Network network{std::move(found), {}, paces().back(), {}, {}};
  std::vector<std::string> names = split(nics);
  const bool is_of_device = names.empty() && network.provider->name() == "cuda" && !device.is_host();
  if (is_of_device) names = {text("{}", device)};
  std::string known, others;
  for (const provider::Nic& nic : network.provider->probe()) {
    known += text("{}{}{}", known.empty() ? "" : ", ", nic.name,
                  nic.usable() ? "" : " (" + nic.unusable_because + ")");
    const bool is_wanted = names.empty() ? network.nics.empty() : std::ranges::count(names, nic.name) > 0;
    if (nic.usable() && is_wanted)
      network.nics.push_back(nic);
    else if (nic.usable())
      others += (others.empty() ? "" : ", ") + nic.name;
  }
  if (network.nics.size() < std::max<size_t>(names.size(), 1))
    return Status::make(Code::kUnsupported, "{}: got WEFT_PROXY_NICS='{}', allowed: {}",
                        network.provider->name(), nics, known);
  network.why_provider = wanted == "auto" ? "the first that is usable" : "WEFT_PROXY_PROVIDER";
  network.why_nics = is_of_device     ? "the rank's own"
                     : !names.empty() ? "WEFT_PROXY_NICS"
                     : others.empty() ? "the only one that is usable"
                                      : "the first that is usable; also there: " + others;
  network.pace = pace_of(network.nics[0].name);
  if (config().proxy_bytes_in_flight > 0)
    network.pace.bytes_in_flight =
        std::max<uint64_t>(16, static_cast<uint64_t>(config().proxy_bytes_in_flight) / 16 * 16);
  if (config().proxy_writes_in_flight > 0)
    network.pace.writes_in_flight = static_cast<uint32_t>(config().proxy_writes_in_flight);
  return network;
}

}  // namespace weft::proxy
