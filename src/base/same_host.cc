// SPDX-License-Identifier: Apache-2.0
#include "base/same_host.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "base/process_name.h"
#include "base/random.h"

namespace weft {
namespace {

// Drops the first `bytes` bytes of a list.
void advance(iovec*& stretch, size_t& count, size_t bytes) {
  while (count > 0 && bytes >= stretch->iov_len) {
    bytes -= stretch->iov_len;
    ++stretch;
    --count;
  }
  if (count == 0) return;
  stretch->iov_base = static_cast<char*>(stretch->iov_base) + bytes;
  stretch->iov_len -= bytes;
}

// A key has one place, which holds it while it is granted.
constexpr uint64_t kGrants = 1 << 16;
std::array<std::atomic<uint64_t>, kGrants> grants;

}  // namespace

Neighbour this_process() {
  static const uint64_t witness = random_key();
  return {getpid(), host_mark(), reinterpret_cast<uint64_t>(&witness), witness,
          reinterpret_cast<uint64_t>(grants.data())};
}

bool grant(uint64_t key) {
  uint64_t free = 0;
  return grants[key % kGrants].compare_exchange_strong(free, key);
}

void take_back(uint64_t key) {
  grants[key % kGrants].compare_exchange_strong(key, 0);
}

bool can_copy_across(const Neighbour& neighbour) {
  if (neighbour.host != this_process().host) return false;
  uint64_t seen = 0;
  iovec here{&seen, sizeof seen}, there{reinterpret_cast<void*>(neighbour.witness_at), sizeof seen};
  return copy_across(Across::kRead, neighbour.pid, &here, 1, &there, 1) == 0 && seen == neighbour.witness;
}

int copy_across(Across way, pid_t pid, iovec* here, size_t here_count, iovec* there, size_t there_count) {
  auto* const move = way == Across::kWrite ? process_vm_writev : process_vm_readv;
  advance(here, here_count, 0);  // stretches of no bytes
  while (here_count > 0) {       // once, but for what is too long for one call
    const ssize_t moved = move(pid, here, here_count, there, there_count, 0);
    if (moved <= 0) return moved < 0 ? errno : EFAULT;
    advance(here, here_count, static_cast<size_t>(moved));
    advance(there, there_count, static_cast<size_t>(moved));
  }
  return 0;
}

int check_grant(const Neighbour& neighbour, uint64_t key) {
  uint64_t seen = 0;
  iovec here{&seen, sizeof seen};
  iovec there{reinterpret_cast<void*>(neighbour.grants_at + key % kGrants * sizeof seen), sizeof seen};
  if (const int error = copy_across(Across::kRead, neighbour.pid, &here, 1, &there, 1); error != 0)
    return error;
  return seen == key ? 0 : EKEYREVOKED;
}

}  // namespace weft
