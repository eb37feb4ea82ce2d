// SPDX-License-Identifier: Apache-2.0
//
// What the two halves of PageStreams share: sending (page_streams.cc) and receiving (page_streams_receive.cc).
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

namespace weft::provider {

inline constexpr size_t kPartsPerCall = 256;  // each call hands the list to the kernel again
// A reply to a claim; other refusals are of a frame.
inline constexpr uint32_t kClaimRefused = 2;

// Whether it is worth another try, and then when epoll says so.
inline bool must_wait(bool& can) {
  if (errno == EINTR) return true;
  if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
  can = false;
  return true;
}

inline size_t parts_at_once(const std::vector<iovec>& parts, size_t next) {
  return std::min(parts.size() - next, kPartsPerCall);
}

// Drops what has moved from the front of a list; true when nothing is left.
inline bool advance(std::vector<iovec>& parts, size_t& next, size_t bytes) {
  while (next < parts.size() && bytes >= parts[next].iov_len) bytes -= parts[next++].iov_len;
  if (next == parts.size()) return true;
  parts[next].iov_base = static_cast<char*>(parts[next].iov_base) + bytes;
  parts[next].iov_len -= bytes;
  return false;
}

}  // namespace weft::provider
