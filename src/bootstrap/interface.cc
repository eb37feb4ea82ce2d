// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <cerrno>
#include <cstring>

namespace weft {
namespace {

bool is_bridge(const std::string& name) {
  for (const char* prefix : {"docker", "virbr", "veth", "br-", "cni", "cali"})
    if (name.starts_with(prefix)) return true;
  return false;
}

// How much an interface's address is wanted; 0: not at all.
int preference(const ifaddrs& entry, const std::string& wanted) {
  if (!entry.ifa_addr || !(entry.ifa_flags & IFF_UP)) return 0;
  const int family = entry.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return 0;
  if (family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&v6)) return 0;
  }
  if (!wanted.empty() && wanted != entry.ifa_name) return 0;
  const int kind = entry.ifa_flags & IFF_LOOPBACK ? 1 : is_bridge(entry.ifa_name) ? 2 : 3;
  return 2 * kind + (family == AF_INET);
}

Interface from(const ifaddrs& entry) {
  Interface made;
  made.name = entry.ifa_name;
  made.is_ipv6 = entry.ifa_addr->sa_family == AF_INET6;
  if (made.is_ipv6)
    std::memcpy(made.bytes, &reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr, 16);
  else
    std::memcpy(made.bytes, &reinterpret_cast<const sockaddr_in*>(entry.ifa_addr)->sin_addr, 4);
  char words[INET6_ADDRSTRLEN] = {};
  inet_ntop(entry.ifa_addr->sa_family, made.bytes, words, sizeof words);
  made.address = words;
  return made;
}

std::string reason(int preference, const std::string& wanted, const std::string& others) {
  if (!wanted.empty()) return "it was asked for by name";
  if (preference < 4) return "no other interface is up and has an address";
  if (preference < 6) return "a bridge, but nothing better is up and has an address";
  return others.empty() ? "the only one that is up and leads to other machines"
                        : "the first that is up; also there: " + others;
}

}  // namespace

Result<Interface> choose_interface(const std::string& wanted) {
  ifaddrs* entries = nullptr;
  if (getifaddrs(&entries) != 0) return Status::from_errno(errno, "list the network interfaces");
  const ifaddrs* chosen = nullptr;
  int best = 0;
  for (const ifaddrs* entry = entries; entry; entry = entry->ifa_next) {
    const int liked = preference(*entry, wanted);
    if (liked <= best) continue;
    best = liked;
    chosen = entry;
  }
  Interface made;
  std::string others;
  for (const ifaddrs* entry = entries; chosen && entry; entry = entry->ifa_next)
    if (preference(*entry, wanted) >= 6 && std::strcmp(entry->ifa_name, chosen->ifa_name) != 0)
      others += text("{}{}@{}", others.empty() ? "" : ", ", entry->ifa_name, from(*entry).address);
  if (chosen) made = from(*chosen);
  freeifaddrs(entries);
  if (best == 0) return Status::invalid("interface: got '{}', allowed: one that has an address", wanted);
  made.why = reason(best, wanted, others);
  return made;
}

}  // namespace weft
