// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/shm_rails.h"

#include "base/log.h"
#include "base/owner_process.h"

namespace weft::provider {
namespace {

constexpr size_t kMostGone = 8;  // some MB each

}  // namespace

void close_parts(const fi::Library& library, const std::string& nic, const RailParts& parts) {
  for (fid* part : parts)
    if (const int code = part ? fi::close(*part) : 0; code != 0)  // something of it was not closed before
      log_warn("fabric: closing a part of {}: {}", nic, library.strerror(-code));
}

ShmRails& ShmRails::of_process() {
  static OnePerProcess<ShmRails> rails;
  return rails.get();
}

void ShmRails::opened() {
  const std::lock_guard lock(mutex_);
  ++open_;
}

void ShmRails::closed(const fi::Library& library, const std::string& nic, const RailParts& parts) {
  const std::lock_guard lock(mutex_);
  gone_.push_back({&library, nic, parts});
  for (const size_t most = --open_ == 0 ? 0 : kMostGone; gone_.size() > most; gone_.pop_front())
    close_parts(*gone_.front().library, gone_.front().nic, gone_.front().parts);
}

}  // namespace weft::provider
