// SPDX-License-Identifier: Apache-2.0
//
// Copies between this process and another one of the same host, by one system call and without its help.
//   to.give(this_process());                                  // there
//   if (can_copy_across(neighbour)) copy_across(Across::kWrite, neighbour.pid, &here, 1, &there, 1);
// Whether the system allows it is tried, not guessed: containers and ptrace rules forbid it now and then.
// The system knows nothing of registrations, so each process keeps a table of the keys under which others may copy:
// check_grant() looks there. Threads: any.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace weft {

struct Neighbour {
  pid_t pid = 0;
  uint64_t host = 0;        // the same in two processes that can name each other by process number
  uint64_t witness_at = 0;  // where that process keeps a random number, and which
  uint64_t witness = 0;
  uint64_t grants_at = 0;  // where it keeps its table of keys
};

constexpr uint32_t kStretchesMax = 1024;  // IOV_MAX

Neighbour this_process();
bool can_copy_across(const Neighbour& neighbour);

enum class Across { kWrite, kRead };
// Writes `here` to `there`, or reads it from there; both lists name as many bytes, in at most kStretchesMax
// stretches, and are used up. Returns 0, or an errno value; then some of the bytes may have moved.
int copy_across(Across way, pid_t pid, iovec* here, size_t here_count, iovec* there, size_t there_count);

// Lets other processes copy under `key`, which is not 0, until it is taken back; false where another key has its place.
bool grant(uint64_t key);
void take_back(uint64_t key);

// 0 while that process grants the key; EKEYREVOKED once it has taken the key back, or the errno of the check. A write
// checks before it copies, and misses a key that is taken back while it runs. A read checks after it has copied, and
// misses none, because a key is taken back before its memory is used again.
int check_grant(const Neighbour& neighbour, uint64_t key);

}  // namespace weft
