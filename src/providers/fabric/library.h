// SPDX-License-Identifier: Apache-2.0
//
// libfabric, opened at run time and kept open.
//   Result<const Library*> fi = open_library();   // kUnsupported with the loader's words where there is none
//   (*fi)->getinfo(version(1, 14), ...);
// Threads: any. The answer does not change within a process.
#pragma once

#include "base/status.h"
#include "providers/fabric/abi.h"

namespace weft::provider::fi {

// Symbol versions FABRIC_1.3 (fi_getinfo, fi_dupinfo, fi_freeinfo), FABRIC_1.1 (fi_fabric) and FABRIC_1.0: their layouts
// stay as they are, and newer ones are these with more at their ends.
struct Library {
  decltype(&fi_getinfo) getinfo = nullptr;
  decltype(&fi_freeinfo) freeinfo = nullptr;
  decltype(&fi_dupinfo) dupinfo = nullptr;
  decltype(&fi_fabric) fabric = nullptr;
  decltype(&fi_strerror) strerror = nullptr;
  decltype(&fi_version) version = nullptr;
  void* handle = nullptr;
  std::string path;  // of its file
};

constexpr uint32_t version(uint32_t major, uint32_t minor) {
  return major << 16 | minor;
}
constexpr uint32_t kApiVersion = version(1, 14);
// Older ones end a process now and then while a peer of it dies: seen with 1.17, over tcp and shm.
constexpr uint32_t kSoundVersion = version(2, 0);
bool is_sound(const Library& library);

// Names the libfabric of a package, which is taken where the system has none that is sound. Before the first
// open_library(); WEFT_LIBFABRIC goes before it.
void offer_library(std::string path);
// Lets a library read its settings, which it does once, at the first question. `queue_limit`: entries of the longest
// completion queue that every RDMA device of this machine can make; 0: there is none, and nothing is set.
//   FI_MR_CACHE_MAX_COUNT, FI_EFA_MR_CACHE_ENABLE: memory that was given back must be out of peers' reach, but the cache
//     keeps it registered, under its old key, with all rights. Only where RDMA devices are: cxi needs its cache.
//   FI_UNIVERSE_SIZE: a completion queue that is longer than the device's cannot be made at all.
//   FI_OFI_RXM_USE_SRX, which stays, as it is read whenever a rail is opened: without it a connection of verbs that ends
//     while a message of it has not been polled ends this process.
void read_settings(const Library& library, uint32_t queue_limit);
// Names what says how long a completion queue may be on this machine's RDMA devices; it returns 0 where there is none.
void ask_for_queue_limit(uint32_t (*limit)());
Result<const Library*> open_library();
std::string version_text(const Library& library);  // "1.17"

// `code` as libfabric returns it, negative.
Status failure(const Library& library, ssize_t code, const std::string& what);
// Of an operation that failed with this number of errno: whether the way to the peer is broken.
bool means_peer_gone(int error);

inline int close(fid& part) {
  return part.ops->close(&part);
}

// Owns what fi_getinfo() gave.
class InfoList {
 public:
  InfoList(const Library& library, fi_info* first) : library_(&library), first_(first) {}
  InfoList(InfoList&& other) noexcept : library_(other.library_), first_(other.first_) {
    other.first_ = nullptr;
  }
  InfoList& operator=(InfoList&&) = delete;
  ~InfoList() {
    if (first_) library_->freeinfo(first_);
  }
  fi_info* first() const { return first_; }

 private:
  const Library* library_;
  fi_info* first_;
};

// What libfabric has for one kind of network: "tcp", "shm", "efa", "verbs", "cxi". One endpoint can be opened
// from each answer of "shm", as the answer has the endpoint's name.
Result<InfoList> find_networks(const Library& library, const std::string& kind);

}  // namespace weft::provider::fi
