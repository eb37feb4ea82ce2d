// SPDX-License-Identifier: Apache-2.0
//
// Frames: the messages between ranks and the server of their rendezvous, assembled from what a stream receives; and the
// rule by which a silent side is noticed.
#pragma once

#include <errno.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/config.h"
#include "base/log.h"
#include "bootstrap/listener.h"

namespace weft {

inline constexpr uint64_t kMaxFrameBytes = 16 << 20;
inline constexpr double kSoon_s = 10;      // for the kernel to take what is sent
inline constexpr double kAccount_s = 0.2;  // for a better account of a rank that is gone: how it was killed

enum class Kind : uint32_t {
  kGive = 1,  // to the rendezvous: bytes for everybody; number: milliseconds that the sender will wait
  kAnswer,    // from it: number is a Code; everybody's bytes, each with its length before it, or words
  kLost,      // `rank` is lost: words say how; number: 1 where that may be known better elsewhere
  kLeave,     // `rank` leaves; the rendezvous answers the same when it has told the others
  kBeat,      // nothing: so that a network that is gone is noticed
};
struct Frame {
  Kind kind = Kind::kBeat;
  int32_t rank = -1;
  uint64_t bytes = 0;
  uint64_t number = 0;
};
static_assert(sizeof(Frame) == 24);

inline bool send_frame(Stream& stream, Frame frame, std::string_view bytes) {
  frame.bytes = bytes.size();
  std::string all(reinterpret_cast<const char*>(&frame), sizeof frame);
  all += bytes;
  return send_all(stream, all.data(), all.size(), Deadline::after_s(kSoon_s)) == Moved::kAll;
}

// Puts together the frames that come on a stream, without waiting for any.
class Inbox {
 public:
  explicit Inbox(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  // Takes what is there; 0, or the error that ended the connection, ENOTCONN where the other side closed it.
  int take(Stream& stream) {
    char some[16384];
    while (true) {
      const ssize_t got = stream.receive(some, sizeof some);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN ? 0 : errno;
      if (got == 0) return ENOTCONN;
      bytes_.append(some, static_cast<size_t>(got));
      if (!is_sound()) return EPROTO;
    }
  }
  // The next whole frame.
  bool next(Frame& frame, std::string& bytes) {
    if (bytes_.size() < sizeof frame) return false;
    std::memcpy(static_cast<void*>(&frame), bytes_.data(), sizeof frame);
    if (bytes_.size() - sizeof frame < frame.bytes) return false;
    bytes = bytes_.substr(sizeof frame, frame.bytes);
    bytes_.erase(0, sizeof frame + frame.bytes);
    return true;
  }

 private:
  bool is_sound() const {
    Frame frame;
    if (bytes_.size() < sizeof frame) return true;
    std::memcpy(static_cast<void*>(&frame), bytes_.data(), sizeof frame);
    return frame.kind >= Kind::kGive && frame.kind <= Kind::kBeat && frame.bytes <= bytes_max_;
  }

  const uint64_t bytes_max_;
  std::string bytes_;
};

// The settings of silence, as they were when a thread was started.
struct Silence {
  double heartbeat_s = config().heartbeat_s;
  double peer_dead_s = config().peer_dead_s;
};

// A peer whose host does not even acknowledge heartbeats is gone; one that is only stopped is not, as its
// kernel does.
inline void watch_network(int socket, const Silence& silence) {
  const auto limit_ms = static_cast<unsigned>(silence.peer_dead_s * 1e3);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
}

inline std::string how_it_ended(int error, const Silence& silence) {
  const bool is_silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return is_silent ? text("has not been heard of for {} s", silence.peer_dead_s) : "closed its connection";
}

}  // namespace weft
