// SPDX-License-Identifier: Apache-2.0
//
// A Stream is a connected socket between two processes of a job. With WEFT_TLS=1 its bytes are encrypted, by the secret
// that both know (base/tls.h). This is the one place where a socket becomes either.
//   WEFT_TRY_ASSIGN(Stream stream, Stream::open(std::move(socket), Stream::Side::kCaller, secret));
//   while (stream.shake_hands() == Stream::Hands::kNotYet) ...poll...;
//   stream.send(data, bytes);
// Nothing waits: send() and receive() are those of a socket that does not block, which the socket must be. After
// receive() has failed with EAGAIN no byte is left, so poll() tells of the next ones.
// Wire format: each side begins with an Opening, so that sides which are set differently can say so; then comes TLS.
// Threads: one may send while another receives.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/tls.h"

namespace weft {

struct Opening {
  char magic[8] = {'w', 'e', 'f', 't', 'l', 'i', 'n', 'k'};
  uint32_t version = 1;
  uint32_t is_tls = 0;
};
static_assert(sizeof(Opening) == 16);

class Stream {
 public:
  using Side = TlsSession::Side;
  enum class Hands { kShaken, kNotYet, kRefused };

  Stream() = default;
  // Errors: those of check().
  static Result<Stream> open(FileDescriptor socket, Side side, std::string_view secret);
  // Whether streams can be had with this secret: WEFT_TLS=1 needs one, and OpenSSL.
  static Status check(std::string_view secret);

  bool is_open() const { return socket_.is_open(); }
  int fd() const { return socket_.get(); }
  void close();

  // One step, as soon as the socket can be read, and at first.
  Hands shake_hands();
  // Of kRefused. kInvalid: the other side is set differently, has another secret, or is nothing of Weft's; kPeerLost: it
  // has gone.
  const Status& why() const { return why_; }

  ssize_t send(const void* data, size_t bytes);
  ssize_t receive(void* data, size_t bytes);
  // Of a list of parts; as many bytes as go at once.
  ssize_t send(iovec* parts, size_t count);
  ssize_t receive(iovec* parts, size_t count);

 private:
  Hands refuse(Status why);
  Hands greet();
  Hands gone();

  FileDescriptor socket_;
  std::unique_ptr<TlsSession> tls_;
  Opening theirs_;
  size_t said_ = 0, heard_ = 0;  // bytes of the openings
  Status why_;
};

}  // namespace weft
