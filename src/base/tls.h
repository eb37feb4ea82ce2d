// SPDX-License-Identifier: Apache-2.0
//
// TLS 1.3 over a socket that does not block, by a key that both sides know: OpenSSL 3, opened at run time.
//   WEFT_TRY_ASSIGN(std::unique_ptr<TlsSession> tls, TlsSession::open(fd, TlsSession::Side::kCaller, secret));
//   while (tls->shake_hands() == TlsSession::Moved::kAgain) ...poll...;
//   const ssize_t sent = tls->send(data, bytes);      // as send(): -1 and EAGAIN where the socket takes nothing now
// The key is derived from the secret. There are no certificates: a side without the secret cannot finish the handshake.
// Each connection has keys of its own (ECDHE), so a recorded connection cannot be decrypted later, even with the
// secret.
// Threads: any; a lock keeps sending and receiving apart.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/proof.h"
#include "base/status.h"

namespace weft {

class TlsSession {
 public:
  enum class Side { kCaller, kListener };
  enum class Moved { kDone, kAgain, kFailed };

  // Errors: kUnsupported where there is no OpenSSL 3; kInvalid without a secret. `fd` stays the caller's, and open.
  static Result<std::unique_ptr<TlsSession>> open(int fd, Side side, std::string_view secret);
  // What open() would refuse.
  static Status check(std::string_view secret);
  ~TlsSession();

  Moved shake_hands();
  // As send() and recv() of a socket that does not block. EPROTO: the bytes are not of this connection.
  ssize_t send(const void* data, size_t bytes);
  ssize_t receive(void* data, size_t bytes);
  const std::string& why() const { return why_; }             // of kFailed and EPROTO
  bool is_gone() const { return is_at_end_ || error_ != 0; }  // and no word of TLS's said why

  // For OpenSSL's calls back.
  const Proof& key() const { return key_; }
  int write_socket(const char* data, int bytes);
  int read_socket(char* data, int bytes);

 private:
  TlsSession(int fd, const Proof& key) : fd_(fd), key_(key) {}
  ssize_t result(int code);

  const int fd_;
  const Proof key_;
  void* ssl_ = nullptr;
  std::mutex mutex_;
  bool is_at_end_ = false;
  int error_ = 0;  // of the socket
  std::string why_;
};

}  // namespace weft
