// SPDX-License-Identifier: Apache-2.0
#include "base/stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/config.h"

namespace weft {
namespace {

bool is_tls() {
  return config().tls != 0;
}

bool must_wait() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

msghdr message_of(iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return message;
}

}  // namespace

Status Stream::check(std::string_view secret) {
  return is_tls() ? TlsSession::check(secret) : Status();
}

Result<Stream> Stream::open(FileDescriptor socket, Side side, std::string_view secret) {
  Stream stream;
  if (is_tls()) {
    WEFT_TRY_ASSIGN(stream.tls_, TlsSession::open(socket.get(), side, secret));
  }
  stream.socket_ = std::move(socket);
  return stream;
}

void Stream::close() {
  tls_.reset();
  socket_.close();
}

Stream::Hands Stream::refuse(Status why) {
  why_ = std::move(why);
  return Hands::kRefused;
}

Stream::Hands Stream::gone() {
  return refuse(
      Status::make(Code::kPeerLost, "{}", errno ? std::strerror(errno) : "the other side closed it"));
}

// The openings of both sides.
Stream::Hands Stream::greet() {
  Opening own;
  own.is_tls = is_tls();
  while (said_ < sizeof own) {
    const ssize_t sent = ::send(fd(), reinterpret_cast<const char*>(&own) + said_, sizeof own - said_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return must_wait() ? Hands::kNotYet : gone();
    said_ += static_cast<size_t>(sent);
  }
  while (heard_ < sizeof theirs_) {
    errno = 0;
    const ssize_t got =
        ::recv(fd(), reinterpret_cast<char*>(&theirs_) + heard_, sizeof theirs_ - heard_, MSG_DONTWAIT);
    if (got <= 0) return got < 0 && must_wait() ? Hands::kNotYet : gone();
    heard_ += static_cast<size_t>(got);
  }
  if (std::memcmp(theirs_.magic, own.magic, sizeof own.magic) != 0 || theirs_.version != own.version)
    return refuse(Status::invalid("address: something else listens or calls there"));
  if (theirs_.is_tls != own.is_tls)
    return refuse(
        Status::invalid("WEFT_TLS: got {} here and {} on the other side, allowed: the same on all ranks",
                        own.is_tls, theirs_.is_tls));
  return Hands::kShaken;
}

Stream::Hands Stream::shake_hands() {
  if (const Hands greeted = greet(); greeted != Hands::kShaken || !tls_) return greeted;
  const TlsSession::Moved moved = tls_->shake_hands();
  if (moved == TlsSession::Moved::kDone) return Hands::kShaken;
  if (moved == TlsSession::Moved::kAgain) return Hands::kNotYet;
  if (tls_->is_gone()) return refuse(Status(Code::kPeerLost, tls_->why()));
  return refuse(Status::invalid(
      "secret: the one given differs from the other side's, allowed: the same WEFT_JOB_SECRET "
      "on all ranks (TLS: {})",
      tls_->why()));
}

ssize_t Stream::send(const void* data, size_t bytes) {
  return tls_ ? tls_->send(data, bytes) : ::send(fd(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t Stream::receive(void* data, size_t bytes) {
  return tls_ ? tls_->receive(data, bytes) : ::recv(fd(), data, bytes, MSG_DONTWAIT);
}

ssize_t Stream::send(iovec* parts, size_t count) {
  if (tls_) return tls_->send(parts[0].iov_base, parts[0].iov_len);
  const msghdr message = message_of(parts, count);
  return ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t Stream::receive(iovec* parts, size_t count) {
  if (tls_) return tls_->receive(parts[0].iov_base, parts[0].iov_len);
  msghdr message = message_of(parts, count);
  return ::recvmsg(fd(), &message, MSG_DONTWAIT);
}

}  // namespace weft
