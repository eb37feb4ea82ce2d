// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "providers/fabric/region_name.h"
#include "providers/fabric/signal_guard.h"

namespace weft::provider::fi {
namespace {

template <class Function>
bool find(void* library, const char* symbol, const char* version, Function& function) {
  function = reinterpret_cast<Function>(dlvsym(library, symbol, version));
  return function != nullptr;
}

std::string& offered_path() {
  static std::string path;
  return path;
}

uint32_t (*queue_limit)() = nullptr;

// A connection's share of a completion queue that ofi_rxm makes for FI_UNIVERSE_SIZE connections, and how many these are
// where nobody says.
constexpr uint32_t kEntriesPerConnection = 256, kUniverse = 256;

std::string file_of(const void* function, const std::string& otherwise) {
  Dl_info found{};
  return dladdr(function, &found) && found.dli_fname ? found.dli_fname : otherwise;
}

Result<Library> open_at(const std::string& path) {
  const SignalGuard guard;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return Status::make(Code::kUnsupported,
                        "libfabric: {} (Debian's package libfabric1 or PyPI's mpich brings one)", dlerror());
  Library library;
  // Unversioned look-ups would find whatever layout the library likes best.
  const bool is_complete = find(handle, "fi_getinfo", "FABRIC_1.3", library.getinfo) &&
                           find(handle, "fi_freeinfo", "FABRIC_1.3", library.freeinfo) &&
                           find(handle, "fi_dupinfo", "FABRIC_1.3", library.dupinfo) &&
                           find(handle, "fi_fabric", "FABRIC_1.1", library.fabric) &&
                           find(handle, "fi_strerror", "FABRIC_1.0", library.strerror) &&
                           find(handle, "fi_version", "FABRIC_1.0", library.version);
  if (!is_complete)
    return Status::make(
        Code::kUnsupported,
        "libfabric: {} lacks FABRIC_1.3, allowed: release 1.14 or newer (PyPI's mpich brings 2)", path);
  if (library.version() < kApiVersion)
    return Status::make(Code::kUnsupported,
                        "libfabric: {} is release {}, allowed: 1.14 or newer (PyPI's mpich brings 2)", path,
                        version_text(library));
  read_settings(library, queue_limit ? queue_limit() : 0);
  library.handle = handle;
  library.path = file_of(reinterpret_cast<const void*>(library.version), path);
  return library;
}

// The one that the user names; else the system's, which knows the machine's NICs; else, or where that is one that does
// not outlive the death of a peer, a package's.
Result<Library> open_once() {
  if (!config().libfabric.empty()) return open_at(config().libfabric);
  Result<Library> system = open_at("libfabric.so.1");
  if (offered_path().empty() || (system.ok() && is_sound(*system))) return system;
  Result<Library> packaged = open_at(offered_path());
  if (!packaged.ok() || !is_sound(*packaged)) return system.ok() ? system : packaged;
  log_info("fabric: takes libfabric {} of {}; the system has {}", version_text(*packaged), packaged->path,
           system.ok() ? version_text(*system) : "none");
  if (system.ok()) dlclose(system->handle);
  return packaged;
}

bool is_sockets(const std::string& kind) {
  return kind == "tcp";
}

fi_info* make_hints(const Library& library, const std::string& kind, bool device_memory) {
  fi_info* hints = library.dupinfo(nullptr);
  if (!hints) return nullptr;
  hints->caps = FI_MSG | FI_RMA | (device_memory ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                FI_MR_ENDPOINT | (device_memory ? FI_MR_HMEM : 0);
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->fabric_attr->prov_name = strdup(kind.c_str());
  if (is_sockets(kind)) hints->addr_format = FI_SOCKADDR_IN;
  if (kind == "efa") hints->tx_attr->tclass = FI_TC_LOW_LATENCY;
  return hints;
}

}  // namespace

void offer_library(std::string path) {
  offered_path() = std::move(path);
}

void read_settings(const Library& library, uint32_t limit) {
  std::optional<VariableWhile> cache, efa_cache, universe;
  if (limit > 0) {
    cache.emplace("FI_MR_CACHE_MAX_COUNT", "0");
    efa_cache.emplace("FI_EFA_MR_CACHE_ENABLE", "0");
    setenv("FI_OFI_RXM_USE_SRX", "1", 0);
    if (limit / kEntriesPerConnection < kUniverse)
      universe.emplace("FI_UNIVERSE_SIZE", text("{}", std::max(limit / kEntriesPerConnection, 1u)));
  }
  fi_info* hints = library.dupinfo(nullptr);
  if (!hints) return;
  hints->fabric_attr->prov_name = strdup("none");  // every provider reads, and none answers
  fi_info* found = nullptr;
  if (library.getinfo(kApiVersion, nullptr, nullptr, 0, hints, &found) == 0) library.freeinfo(found);
  library.freeinfo(hints);
}

void ask_for_queue_limit(uint32_t (*limit)()) {
  queue_limit = limit;
}

bool is_sound(const Library& library) {
  return library.version() >= kSoundVersion;
}

Result<const Library*> open_library() {
  static const Result<Library> once = open_once();
  if (!once.ok()) return once.status();
  return &*once;
}

std::string version_text(const Library& library) {
  return text("{}.{}", library.version() >> 16, library.version() & 0xffff);
}

Status failure(const Library& library, ssize_t code, const std::string& what) {
  return Status::make(Code::kSystem, "{}: {} ({})", what, library.strerror(static_cast<int>(-code)), code);
}

bool means_peer_gone(int error) {
  switch (error) {
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case ECANCELED:  // what was under way when tcp's connection broke
    case ENOTCONN:
    case ESHUTDOWN:
    case EPIPE:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

Result<InfoList> find_networks(const Library& library, const std::string& kind) {
  const SignalGuard guard;
  int code = 0;
  const bool is_shm = kind == "shm";
  const bool may_reach_devices = !is_sockets(kind) && !is_shm;
  const std::string name = is_shm ? fresh_region_name() : "";
  const char* const node = is_shm ? name.c_str() : nullptr;
  for (bool device_memory : {true, false}) {
    if (device_memory && !may_reach_devices) continue;
    fi_info* hints = make_hints(library, kind, device_memory);
    if (!hints) return Status(Code::kSystem, "libfabric: no memory for hints");
    fi_info* found = nullptr;
    code = library.getinfo(kApiVersion, node, nullptr, node ? FI_SOURCE : 0, hints, &found);
    library.freeinfo(hints);
    if (code == 0) return InfoList(library, found);
  }
  return Status::make(Code::kUnsupported, "libfabric {}: no {} network: {}", version_text(library), kind,
                      library.strerror(-code));
}

}  // namespace weft::provider::fi
