// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: unique ids, and what comes over the connections of a rendezvous, on both sides. tools/fuzz builds
// and runs it. The first byte says who speaks: a stranger at the listener, a rank that was let in, a false rendezvous,
// or the right one. Whatever is said, the rendezvous serves its next rank.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "bootstrap/listener.h"
#include "bootstrap/tcp_bootstrap.h"

using namespace weft;

namespace {

void require(bool holds) {
  if (!holds) std::abort();  // what libFuzzer reports
}

Deadline soon(double seconds = 20) {
  return Deadline::after_s(seconds);
}

SocketAddress address_of(uint16_t port) {
  SocketAddress address{};
  address.v4.sin_family = AF_INET;
  address.v4.sin_port = htons(port);
  address.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

void close_at_once(int socket) {
  const linger at_once{1, 0};  // no port is left waiting
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

// What a connection begins with, and then anything.
std::string opened(const std::string& bytes) {
  const Opening opening;
  return std::string(reinterpret_cast<const char*>(&opening), sizeof opening) + bytes;
}

UniqueId rendezvous() {
  auto unique_id = open_rendezvous("lo");
  require(unique_id.ok());
  return *unique_id;
}

std::string key_of(const UniqueId& unique_id) {
  return std::string(reinterpret_cast<const char*>(unique_id.key), sizeof unique_id.key);
}

// Bytes of a stranger; nobody is let in.
void connect_with(const std::string& bytes) {
  static const UniqueId unique_id = rendezvous();
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress address = address_of(unique_id.port);
  require(::connect(socket.get(), &address.any, sizeof address.v4) == 0);
  close_at_once(socket.get());
  const std::string all = opened(bytes);
  (void)!::send(socket.get(), all.data(), all.size(), MSG_NOSIGNAL);
  char answer[256] = {};
  for (size_t at = 0; at < sizeof(Opening) + sizeof(Challenge) && bytes.size() >= sizeof(Claim);) {
    const ssize_t got = ::recv(socket.get(), answer, sizeof answer, 0);
    if (got <= 0) break;
    at += static_cast<size_t>(got);
  }
}

// A rank of one, which says anything once it is in.
void say(const std::string& bytes) {
  const UniqueId unique_id = rendezvous();
  auto stream = connect_to({{address_of(unique_id.port)}, key_of(unique_id), 0, 1, "the rendezvous"}, soon());
  require(stream.ok());
  close_at_once(stream->fd());
  (void)!stream->send(bytes.data(), bytes.size());
  ::shutdown(stream->fd(), SHUT_WR);
  char answer[4096];
  receive_all(*stream, answer, sizeof answer, soon(1));  // until the rendezvous has closed it
}

// What a rank hears of a rendezvous that says anything, before or after it has shown that it knows the key.
void listen_to(const std::string& bytes, bool is_right) {
  FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  SocketAddress address = address_of(0);
  socklen_t length = sizeof address.v4;
  require(::bind(listener.get(), &address.any, length) == 0 && ::listen(listener.get(), 4) == 0);
  require(::getsockname(listener.get(), &address.any, &length) == 0);
  UniqueId unique_id{};
  std::memcpy(unique_id.magic, "weftmeet", 8);
  unique_id.port = ntohs(address.v4.sin_port);
  std::memcpy(unique_id.address, &address.v4.sin_addr, 4);
  const int fd = listener.get();
  std::thread host([&, listener = std::move(listener)]() mutable {
    pollfd entry{fd, POLLIN, 0};
    ::poll(&entry, 1, 5000);
    if (is_right) {
      Listener accepting(std::move(listener), key_of(unique_id));
      std::vector<Client> clients;
      for (const Deadline until = soon(5); clients.empty() && !until.passed();) clients = accepting.serve();
      if (clients.empty()) return;
      Listener::welcome(clients[0]);
      close_at_once(clients[0].stream.fd());
      (void)!clients[0].stream.send(bytes.data(), bytes.size());
      ::shutdown(clients[0].stream.fd(), SHUT_WR);
      char said[256];
      receive_all(clients[0].stream, said, sizeof said, soon(0.05));
    } else {
      FileDescriptor socket(::accept4(fd, nullptr, nullptr, SOCK_CLOEXEC));
      const std::string all = opened(bytes);
      (void)!::send(socket.get(), all.data(), all.size(), MSG_NOSIGNAL);
      ::shutdown(socket.get(), SHUT_WR);
      listener.close();  // a rank that is dropped tries again
      pollfd heard{socket.get(), POLLIN, 0};
      ::poll(&heard, 1, 50);
    }
  });
  const auto joined =
      join_rendezvous(unique_id, 0, 2, soon(2));  // as rank 0, which gives the host no time to explain
  require(is_right == joined.ok() || is_right);
  if (joined.ok()) {
    const auto all = (*joined)->all_gather("mine", soon(0.01));
    require(!all.ok() || all->size() == 2);
  }
  host.join();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  UniqueId unique_id{};
  std::memcpy(static_cast<void*>(&unique_id), bytes.data(), std::min(bytes.size(), sizeof unique_id));
  if (!unique_id.is_valid()) require(!join_rendezvous(unique_id, 0, 1, soon()).ok());
  switch (data[0] % 4) {
    case 0:
      return connect_with(bytes), 0;
    case 1:
      return say(bytes), 0;
    case 2:
      return listen_to(bytes, false), 0;
    default:
      return listen_to(bytes, true), 0;
  }
}
