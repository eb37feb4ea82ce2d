// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: datagrams with descriptors, in sequences, that reach a rank's socket from whoever knows its key and
// from whoever does not. tools/fuzz builds and runs it. Each datagram is a byte of what it is, one of its length, and
// bytes. Without the key, the rank gets what its peer gave; in the end no descriptor is left.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "base/log.h"
#include "bootstrap/fd_exchange.h"

using namespace weft;

namespace {

void require(bool holds) {
  if (!holds) std::abort();  // what libFuzzer reports
}

struct Header {  // of fd_exchange.cc
  uint64_t magic, key, sequence;
  uint32_t sender, bytes;
};

size_t open_descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                           std::filesystem::directory_iterator()));
}

// What a datagram is, by the bits of its first byte.
struct Kind {
  bool has_key, is_framed;  // framed: its header says how long it is, and a sender that there is
  int descriptors, calls_ahead;

  explicit Kind(uint8_t bits)
      : has_key(bits & 1), is_framed(bits & 2), descriptors(bits >> 2 & 3), calls_ahead(bits >> 4 & 3) {}
};

void send_datagram(const FdAddress& to, const std::string& bytes, int descriptors) {
  static const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const size_t chars = std::strlen(to.socket_name);
  std::memcpy(name.sun_path + 1, to.socket_name, chars);
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_name = &name;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + chars);
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
  if (descriptors) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors * sizeof(int));  // of standard input, as often as that
  }
  (void)!sendmsg(socket.get(), &message, MSG_NOSIGNAL);
}

struct TwoRanks {
  std::unique_ptr<FdExchange> first, second;
  std::vector<FdAddress> addresses;

  TwoRanks() {
    for (auto* rank : {&first, &second}) {
      auto opened = FdExchange::open(rank == &first ? 0 : 1);
      require(opened.ok());
      *rank = std::move(*opened);
      addresses.push_back((*rank)->address());
    }
    for (auto* rank : {&first, &second}) {
      require((*rank)->connect(addresses).ok());
      (*rank)->begin_call();
    }
  }
};

// Sends all datagrams of an input to the first rank.
void send_all_of(const uint8_t* data, size_t size, TwoRanks& ranks) {
  const FdAddress& to = ranks.addresses[0];
  uint64_t call = 1;
  while (size >= 2) {
    const Kind kind(data[0]);
    const size_t length = std::min<size_t>(data[1], size - 2);
    std::string bytes(reinterpret_cast<const char*>(data) + 2, length);
    if (kind.has_key) {
      Header header{};
      bytes.resize(std::max(bytes.size(), sizeof header));
      std::memcpy(&header, bytes.data(), sizeof header);
      header.magic = 0x3154464557ull;
      header.key = to.key;
      header.sequence = 256 * (call + kind.calls_ahead) + 1;
      if (kind.is_framed) {
        header.sender = 1;
        header.bytes = static_cast<uint32_t>(bytes.size() - sizeof header);
      }
      std::memcpy(bytes.data(), &header, sizeof header);
    }
    send_datagram(to, bytes, kind.descriptors);
    if (data[0] & 0x80) {  // the rank looks at what has come
      static_cast<void>(ranks.first->all_gather({"mine", {}}, "fuzz", Deadline::after_s(0)));
      ranks.first->begin_call();
      ++call;
    }
    data += 2 + length;
    size -= 2 + length;
  }
}

// Strangers without the key: the ranks' call ends with what each gave.
void run_strangers(const uint8_t* data, size_t size) {
  TwoRanks ranks;
  const std::string junk(reinterpret_cast<const char*>(data), std::min<size_t>(size, 2000));
  for (int descriptors = 0; descriptors <= 3; ++descriptors)
    send_datagram(ranks.addresses[0], junk, descriptors);
  const auto until = Deadline::after_s(20);
  std::thread other([&] { require(ranks.second->all_gather({"honest", {}}, "fuzz", until).ok()); });
  const auto all = ranks.first->all_gather({"mine", {}}, "fuzz", until);
  other.join();
  require(all.ok() && (*all)[1].bytes == "honest");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool is_silent = [] {
    set_log_sink([](LogLevel, const std::string&) {});
    return true;
  }();
  static_cast<void>(is_silent);
  send_datagram({}, "", 0);  // opens what is opened once
  const size_t before = open_descriptors();
  {
    TwoRanks ranks;
    send_all_of(data, size, ranks);
  }
  run_strangers(data, size);
  // Those of refused datagrams are closed by threads of their own.
  require(wait_until(Deadline::after_s(20), [&] { return open_descriptors() == before; }));
  return 0;
}
