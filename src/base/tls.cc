// SPDX-License-Identifier: Apache-2.0
#include "base/tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/log.h"

namespace weft {
namespace {

// The functions of OpenSSL 3 that are used, as its manual pages declare them; what they point to is opaque.
struct Ssl;
struct SslContext;
struct Bio;
using AskCaller = unsigned (*)(Ssl*, const char* hint, char* identity, unsigned identity_max,
                               unsigned char* key, unsigned key_max);
using AskListener = unsigned (*)(Ssl*, const char* identity, unsigned char* key, unsigned key_max);
#define WEFT_OPENSSL(F)                                                \
  F(TLS_method, const void*, ())                                       \
  F(SSL_CTX_new, SslContext*, (const void*))                           \
  F(SSL_CTX_ctrl, long, (SslContext*, int command, long, void*))       \
  F(SSL_CTX_set_ciphersuites, int, (SslContext*, const char*))         \
  F(SSL_CTX_set_num_tickets, int, (SslContext*, size_t))               \
  F(SSL_CTX_set_psk_client_callback, void, (SslContext*, AskCaller))   \
  F(SSL_CTX_set_psk_server_callback, void, (SslContext*, AskListener)) \
  F(SSL_new, Ssl*, (SslContext*))                                      \
  F(SSL_free, void, (Ssl*))                                            \
  F(SSL_set_bio, void, (Ssl*, Bio*, Bio*))                             \
  F(SSL_set_ex_data, int, (Ssl*, int, void*))                          \
  F(SSL_get_ex_data, void*, (const Ssl*, int))                         \
  F(SSL_set_connect_state, void, (Ssl*))                               \
  F(SSL_set_accept_state, void, (Ssl*))                                \
  F(SSL_do_handshake, int, (Ssl*))                                     \
  F(SSL_read, int, (Ssl*, void*, int))                                 \
  F(SSL_write, int, (Ssl*, const void*, int))                          \
  F(SSL_get_error, int, (const Ssl*, int))                             \
  F(BIO_meth_new, void*, (int, const char*))                           \
  F(BIO_meth_set_write, int, (void*, int (*)(Bio*, const char*, int))) \
  F(BIO_meth_set_read, int, (void*, int (*)(Bio*, char*, int)))        \
  F(BIO_meth_set_ctrl, int, (void*, long (*)(Bio*, int, long, void*))) \
  F(BIO_new, Bio*, (const void*))                                      \
  F(BIO_set_data, void, (Bio*, void*))                                 \
  F(BIO_get_data, void*, (Bio*))                                       \
  F(BIO_set_init, void, (Bio*, int))                                   \
  F(BIO_set_flags, void, (Bio*, int))                                  \
  F(BIO_clear_flags, void, (Bio*, int))                                \
  F(ERR_clear_error, void, ())                                         \
  F(ERR_peek_last_error, unsigned long, ())                            \
  F(ERR_reason_error_string, const char*, (unsigned long))

struct Library {
#define WEFT_OPENSSL_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  WEFT_OPENSSL(WEFT_OPENSSL_MEMBER)
#undef WEFT_OPENSSL_MEMBER
  SslContext* context = nullptr;
  void* socket_calls = nullptr;
};

constexpr const char* kName = "libssl.so.3";
constexpr const char* kIdentity = "weft";
constexpr const char* kSuites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
// Of OpenSSL's ssl.h and bio.h.
constexpr int kControlMode = 33, kSetLeastVersion = 123, kControlFlush = 11;
constexpr long kTls13 = 0x0304, kPartialWrites = 1, kMovingBuffers = 2, kReleaseBuffers = 0x10;
constexpr int kWantRead = 2, kWantWrite = 3;
constexpr int kBioType = 0x0400 | 100, kBioRead = 1, kBioWrite = 2, kBioRetry = 8, kBioAll = 15;

const Library& openssl();

TlsSession& session_of(const Ssl* ssl) {
  return *static_cast<TlsSession*>(openssl().SSL_get_ex_data(ssl, 0));
}

unsigned give_key(const Ssl* ssl, unsigned char* key, unsigned key_max) {
  const Proof& own = session_of(ssl).key();
  if (key_max < own.size()) return 0;
  std::copy(own.begin(), own.end(), key);
  return own.size();
}

unsigned ask_caller(Ssl* ssl, const char*, char* identity, unsigned identity_max, unsigned char* key,
                    unsigned key_max) {
  if (identity_max <= std::strlen(kIdentity)) return 0;
  std::strcpy(identity, kIdentity);
  return give_key(ssl, key, key_max);
}

unsigned ask_listener(Ssl* ssl, const char* identity, unsigned char* key, unsigned key_max) {
  return identity && std::strcmp(identity, kIdentity) == 0 ? give_key(ssl, key, key_max) : 0;
}

// OpenSSL's own socket calls raise SIGPIPE; these do not.
int write_socket(Bio* bio, const char* data, int bytes) {
  const Library& lib = openssl();
  lib.BIO_clear_flags(bio, kBioAll);
  const int sent = static_cast<TlsSession*>(lib.BIO_get_data(bio))->write_socket(data, bytes);
  if (sent < 0 && errno == EAGAIN) lib.BIO_set_flags(bio, kBioWrite | kBioRetry);
  return sent;
}

int read_socket(Bio* bio, char* data, int bytes) {
  const Library& lib = openssl();
  lib.BIO_clear_flags(bio, kBioAll);
  const int got = static_cast<TlsSession*>(lib.BIO_get_data(bio))->read_socket(data, bytes);
  if (got < 0 && errno == EAGAIN) lib.BIO_set_flags(bio, kBioRead | kBioRetry);
  return got;
}

long control_socket(Bio*, int command, long, void*) {
  return command == kControlFlush;
}

Result<Library> open_library() {
  void* const handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  const char* const error = handle ? nullptr : dlerror();
  if (!handle)
    return logged(Status::make(Code::kUnsupported,
                               "WEFT_TLS: got 1, but {} of OpenSSL 3 cannot be opened ({}), "
                               "allowed: 0, or 1 with it (Debian's and Ubuntu's package libssl3)",
                               kName, error ? error : "no reason given"));
  Library lib;
  const char* missing = nullptr;
#define WEFT_OPENSSL_LOAD(name, result, arguments)                        \
  lib.name = reinterpret_cast<result(*) arguments>(dlsym(handle, #name)); \
  if (!lib.name) missing = #name;
  WEFT_OPENSSL(WEFT_OPENSSL_LOAD)
#undef WEFT_OPENSSL_LOAD
  if (missing) return logged(Status::make(Code::kUnsupported, "WEFT_TLS: {} has no {}", kName, missing));
  lib.socket_calls = lib.BIO_meth_new(kBioType, "weft");
  lib.context = lib.SSL_CTX_new(lib.TLS_method());
  if (!lib.socket_calls || !lib.context ||
      lib.SSL_CTX_ctrl(lib.context, kSetLeastVersion, kTls13, nullptr) != 1 ||
      lib.SSL_CTX_set_ciphersuites(lib.context, kSuites) != 1)
    return logged(
        Status::make(Code::kUnsupported, "WEFT_TLS: {} cannot have TLS 1.3 with {}", kName, kSuites));
  lib.BIO_meth_set_write(lib.socket_calls, write_socket);
  lib.BIO_meth_set_read(lib.socket_calls, read_socket);
  lib.BIO_meth_set_ctrl(lib.socket_calls, control_socket);
  lib.SSL_CTX_ctrl(lib.context, kControlMode, kPartialWrites | kMovingBuffers | kReleaseBuffers, nullptr);
  lib.SSL_CTX_set_num_tickets(lib.context, 0);  // a connection begins anew each time
  lib.SSL_CTX_set_psk_client_callback(lib.context, ask_caller);
  lib.SSL_CTX_set_psk_server_callback(lib.context, ask_listener);
  return lib;
}

const Result<Library>& library() {
  static const auto& once = *new Result<Library>(open_library());  // sessions may end after everything else
  return once;
}

const Library& openssl() {
  return *library();
}

}  // namespace

Status TlsSession::check(std::string_view secret) {
  if (secret.empty())
    return Status::invalid(
        "WEFT_TLS: got 1 without a secret, allowed: 1 where WEFT_JOB_SECRET, or the launcher, gives one");
  return library().status();
}

Result<std::unique_ptr<TlsSession>> TlsSession::open(int fd, Side side, std::string_view secret) {
  WEFT_TRY(check(secret));
  const Library& lib = openssl();
  std::unique_ptr<TlsSession> session(new TlsSession(fd, prove(secret, "tls 1.3", {})));
  Ssl* const ssl = lib.SSL_new(lib.context);
  Bio* const bio = ssl ? lib.BIO_new(lib.socket_calls) : nullptr;
  session->ssl_ = ssl;
  if (!bio) return Status::make(Code::kSystem, "WEFT_TLS: no memory for a connection");
  lib.BIO_set_data(bio, session.get());
  lib.BIO_set_init(bio, 1);
  lib.SSL_set_bio(ssl, bio, bio);  // ends with it
  lib.SSL_set_ex_data(ssl, 0, session.get());
  if (side == Side::kCaller)
    lib.SSL_set_connect_state(ssl);
  else
    lib.SSL_set_accept_state(ssl);
  return session;
}

TlsSession::~TlsSession() {
  if (ssl_) openssl().SSL_free(static_cast<Ssl*>(ssl_));
}

int TlsSession::write_socket(const char* data, int bytes) {
  const ssize_t sent = ::send(fd_, data, static_cast<size_t>(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno == EINTR) errno = EAGAIN;
  if (sent < 0 && errno != EAGAIN) error_ = errno;
  return static_cast<int>(sent);
}

int TlsSession::read_socket(char* data, int bytes) {
  const ssize_t got = ::recv(fd_, data, static_cast<size_t>(bytes), MSG_DONTWAIT);
  if (got < 0 && errno == EINTR) errno = EAGAIN;
  if (got < 0 && errno != EAGAIN) error_ = errno;
  is_at_end_ = is_at_end_ || got == 0;
  return static_cast<int>(got);
}

// What a call of OpenSSL's returned, as a socket's call would have said it.
ssize_t TlsSession::result(int code) {
  if (code > 0) return code;
  const Library& lib = openssl();
  const int want = lib.SSL_get_error(static_cast<Ssl*>(ssl_), code);
  if (want == kWantRead || want == kWantWrite) {
    errno = EAGAIN;
    return -1;
  }
  const char* const reason = lib.ERR_reason_error_string(lib.ERR_peek_last_error());
  if (why_.empty())
    why_ = is_at_end_ ? "the other side closed it"
           : error_   ? std::strerror(error_)
           : reason   ? reason
                      : "ended";
  lib.ERR_clear_error();
  if (is_at_end_) return 0;
  errno = error_ ? error_ : EPROTO;
  return -1;
}

TlsSession::Moved TlsSession::shake_hands() {
  const std::lock_guard lock(mutex_);
  openssl().ERR_clear_error();
  if (result(openssl().SSL_do_handshake(static_cast<Ssl*>(ssl_))) > 0) return Moved::kDone;
  return !is_at_end_ && errno == EAGAIN ? Moved::kAgain : Moved::kFailed;
}

ssize_t TlsSession::send(const void* data, size_t bytes) {
  const std::lock_guard lock(mutex_);
  openssl().ERR_clear_error();
  const int some = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
  const ssize_t sent = result(openssl().SSL_write(static_cast<Ssl*>(ssl_), data, some));
  if (sent != 0) return sent;
  errno = EPIPE;
  return -1;
}

ssize_t TlsSession::receive(void* data, size_t bytes) {
  const std::lock_guard lock(mutex_);
  openssl().ERR_clear_error();
  const int some = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
  return result(openssl().SSL_read(static_cast<Ssl*>(ssl_), data, some));
}

}  // namespace weft
