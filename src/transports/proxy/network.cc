// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/network.h"

#include <algorithm>
#include <utility>

#include "base/config.h"

namespace weft::proxy {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::vector<std::string> split(const std::string& names, char mark) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(mark, at), names.size());
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
      {"bnxt_re", "bnxt_en", 3 * kMiB / 2, 1},  // Broadcom Thor-2
      {"ionic", "ionic", 2 * kMiB, 1},          // AMD Pollara
      {"rdmap", "efa", 16 * kMiB, 256},         // EFA
      {"mlx5", "mlx5_core", 64 * kMiB, 256},    // ConnectX
      {"", "", 16 * kMiB, 256},
  };
  return all;
}

const Pace& pace_of(std::string_view nic_name, std::string_view driver) {
  const auto has_driver = [&](const Pace& pace) { return !driver.empty() && driver == pace.driver; };
  const auto by_driver = std::ranges::find_if(paces(), has_driver);
  if (by_driver != paces().end()) return *by_driver;
  return *std::ranges::find_if(paces(), [&](const Pace& pace) { return nic_name.starts_with(pace.family); });
}

const provider::Nic& nearest_nic(const std::vector<provider::Nic>& usable, const RankPlace& rank,
                                 const std::string& sysfs) {
  const auto own = std::ranges::find_if(
      usable, [&](const auto& nic) { return !nic.pci.empty() && nic.pci == rank.place.pci; });
  if (own != usable.end()) return *own;
  std::vector<const provider::Nic*> best;
  std::pair<Nearness, double> grade_of_best{Nearness::kFar, 0};
  for (const provider::Nic& nic : usable) {
    if (usable[0].pci.empty()) return usable[0];
    if (nic.pci.empty()) continue;
    Nearness near = nearness(rank.place, {nic.pci, nic.numa_node}, sysfs);
    if (rank.place.pci.empty() && rank.place.numa_node >= 0 && rank.place.numa_node == nic.numa_node)
      near = Nearness::kSameNode;
    const std::pair<Nearness, double> grade{near, -nic.gbit_per_s};
    if (best.empty() || grade < grade_of_best) best.clear(), grade_of_best = grade;
    if (grade == grade_of_best) best.push_back(&nic);
  }
  return *best[rank.index % best.size()];
}

Result<Network> choose_network(const std::string& wanted, const std::string& nics, const RankPlace& rank) {
  WEFT_TRY_ASSIGN(std::shared_ptr<provider::Provider> found, provider::find_provider(wanted));
  Network network{std::move(found), {}, paces().back(), {}, {}};
  const std::vector<std::string> lists = split(nics, ';');
  const std::vector<std::string> names = lists.empty() ? lists : split(lists[rank.index % lists.size()], ',');
  std::vector<provider::Nic> usable;
  std::string known;
  for (const provider::Nic& nic : network.provider->probe()) {
    known += text("{}{}{}", known.empty() ? "" : ", ", nic.name,
                  nic.usable() ? "" : " (" + nic.unusable_because + ")");
    if (nic.usable()) usable.push_back(nic);
    if (nic.usable() && std::ranges::count(names, nic.name) > 0) network.nics.push_back(nic);
  }
  if (usable.empty() || network.nics.size() < names.size())
    return Status::make(Code::kUnsupported, "{}: got WEFT_PROXY_NICS='{}', allowed: {}",
                        network.provider->name(), nics, known);
  network.why_provider = wanted == "auto" ? "the first that is usable" : "WEFT_PROXY_PROVIDER";
  network.why_nics = !names.empty() ? "WEFT_PROXY_NICS" : "the only one that is usable";
  if (names.empty()) network.nics.push_back(nearest_nic(usable, rank));
  if (names.empty() && usable.size() > 1) {
    network.why_nics = network.nics[0].pci.empty() ? "the first that is usable; also there:"
                                                   : "the nearest that is usable, by turns; also there:";
    for (const provider::Nic& nic : usable)
      if (nic.name != network.nics[0].name) network.why_nics += " " + nic.name;
    network.if_unreached = text(
        "; this rank took {} ({}): where networks of NICs are not joined, WEFT_PROXY_NICS says which to take",
        network.nics[0].name, network.why_nics);
  }
  network.pace = pace_of(network.nics[0].name, kernel_driver(network.nics[0].name));
  if (config().proxy_bytes_in_flight > 0)
    network.pace.bytes_in_flight =
        std::max<uint64_t>(16, static_cast<uint64_t>(config().proxy_bytes_in_flight) / 16 * 16);
  if (config().proxy_writes_in_flight > 0)
    network.pace.writes_in_flight = static_cast<uint32_t>(config().proxy_writes_in_flight);
  return network;
}

}  // namespace weft::proxy
