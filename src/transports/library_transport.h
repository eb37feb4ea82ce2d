// SPDX-License-Identifier: Apache-2.0
//
// The common part of transports whose windows lie in memory of a library that is found at run time: nccl and
// nvshmem. Ranks of one node map each other, those of others are ports, and both are taken by name alone.
//   class NcclTransport : public LibraryTransport { ... LibraryFacts look(Device) ... };
//   class NcclLink : public LibraryLink { ... };
//   WEFT_TRY_ASSIGN(const auto ids, gather_ready(group, "nccl", ready, id_of_rank_0));
#pragma once

#include <set>
#include <string>
#include <vector>

#include "transports/lost_peers.h"
#include "transports/transport.h"

namespace weft {

// A library as others and people see it. Versions are the same on all ranks of a link.
struct LibraryFacts {
  std::string version;
  std::string where;         // for people: its path, and what is to know about it
  std::string ports;         // for people: what carries them
  std::string why_no_ports;  // empty: they are there
};

class LibraryTransport : public Transport {
 public:
  const char* name() const final { return name_; }
  Caps caps(Device device) const final;
  // The version, and why it has no ports behind a line; empty where the library cannot be used.
  std::string descriptor(Device device) const final;
  Caps towards(const Caps& caps, const RankFacts& self, const RankFacts& peer) const final;
  std::string refuses(const RankFacts& self, const RankFacts& peer) const final;

 protected:
  LibraryTransport(const char* name, const char* title) : name_(name), title_(title) {}
  // The library for ranks on `device`, or why there is none.
  virtual Result<LibraryFacts> look(Device device) const = 0;
  // Two ranks that the library does not take together: why; else empty. Pure.
  virtual std::string refuses_both(const RankFacts& self, const RankFacts& peer) const = 0;

 private:
  const char* const name_;   // "nccl"
  const char* const title_;  // "NCCL"
};

class LibraryLink : public Link {
 public:
  void lose(int peer, const std::string& how) final { lost_.add(peer, how); }
  void on_lost(LostPeers::Tell tell) final { lost_.listen(std::move(tell)); }

 protected:
  explicit LibraryLink(const Group& group);

  const Device device_;
  const int rank_, ranks_;
  const std::set<int> mapped_;  // this rank, too
  const double timeout_s_;
  LostPeers lost_;
};

// A library for ranks on `device`. On the CPU that is one that stands in for it in tests, and only where `configured`,
// the path of the user's choice, names it. `Library` has `path` and `serves_host`.
template <class Library>
Result<const Library*> library_for(Device device, const char* title, const std::string& configured,
                                   Result<const Library*> (*open)()) {
  const auto host_has_none = [&] {
    return Status::make(Code::kUnsupported, "{} joins GPUs, this rank is on the CPU", title);
  };
  if (device.is_host() && configured.empty()) return host_has_none();
  WEFT_TRY_ASSIGN(const Library* library, open());
  if (device.is_host() && !library->serves_host) return host_has_none();
  if (!device.is_host() && library->serves_host)
    return Status::make(Code::kUnsupported, "{} stands in for {} on CPUs, this rank is on a GPU",
                        library->path, title);
  return library;
}

// Collective, before the library's own first collective call: what each rank shows the others, by rank; of one length on
// all. Where a rank is not ready, all fail alike, with its Status. Errors: that, kInvalid, kPeerLost.
Result<std::vector<std::string>> gather_ready(const Group& group, const char* transport, const Status& mine,
                                              const std::string& shown);

}  // namespace weft
