// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: what may be sent to the port that takes pages. tools/fuzz builds and runs it. The input goes
// over a real connection, in pieces as its first byte says, which also says whether it proves to know the
// secret first; memory around what may be written must stay as it was, and nothing may be written and no immediate
// may come without the proof and the right key.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "providers/fabric/page_streams.h"

using namespace weft;
using namespace weft::provider;

namespace {

constexpr uint64_t kKey = 0x1122334455667788;  // in the corpus, so that frames with it are found
const char kSecret[] = "the secret of this target";
constexpr size_t kGuard = 64, kBytes = 256;
char memory[kGuard + kBytes + kGuard];

void require(bool holds) {
  if (!holds) std::abort();  // what libFuzzer reports
}

int dial(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0);
  const linger at_once{1, 0};  // no port is left waiting
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  const Opening opening;
  require(send(fd, &opening, sizeof opening, MSG_NOSIGNAL) == sizeof opening);
  return fd;
}

PageStreams& streams() {
  static std::unique_ptr<PageStreams> made = [] {
    in_addr here{};
    here.s_addr = htonl(INADDR_LOOPBACK);
    auto listening = PageStreams::listen(here, kSecret);
    require(listening.ok());
    Registration registration;
    registration.rkey = kKey;
    (*listening)->allow(registration, {memory + kGuard, kBytes}, kRemoteWrite);
    return std::move(*listening);
  }();
  return *made;
}

// Answers the challenge, as a peer of the job.
void prove_it(int fd) {
  struct {
    Opening opening;
    StreamChallenge challenge;
  } said;
  std::deque<Event> events;
  const time_t deadline = time(nullptr) + 60;
  for (ssize_t got = -1; got != sizeof said;) {
    streams().progress(events);
    got = recv(fd, &said, sizeof said, MSG_PEEK | MSG_DONTWAIT);
    require(got != 0 && time(nullptr) < deadline);
  }
  require(recv(fd, &said, sizeof said, 0) == sizeof said);
  StreamClaim claim;
  claim.proof = prove(kSecret, "pages", {bytes_of(said.challenge.nonce)});
  require(send(fd, &claim, sizeof claim, MSG_NOSIGNAL) == sizeof claim);
}

// Until all that was sent has been taken in, which the other side says by closing: what it leaves would count
// as the next input's.
void finish(int fd, std::deque<Event>& events) {
  const time_t deadline = time(nullptr) + 60;
  char replies[4096];
  shutdown(fd, SHUT_WR);
  for (ssize_t got = 1; got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));) {
    require(time(nullptr) < deadline);
    streams().progress(events);
    got = recv(fd, replies, sizeof replies, MSG_DONTWAIT);
  }
  close(fd);
}

bool has_key(const uint8_t* data, size_t size) {
  for (size_t at = 0; at + sizeof kKey <= size; ++at)
    if (std::memcmp(data + at, &kKey, sizeof kKey) == 0) return true;
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::memset(memory, 0x5A, sizeof memory);
  const int fd = dial(streams().port());
  std::deque<Event> events;
  const bool is_proven = data[0] % 4 != 3;
  if (is_proven) prove_it(fd);
  const size_t step = data[0] ? data[0] : size;
  for (size_t at = 1; at < size; at += step) {
    (void)!send(fd, data + at, std::min(step, size - at), MSG_NOSIGNAL);
    for (int i = 0; i < 20; ++i) streams().progress(events);
  }
  finish(fd, events);
  const bool may_write = is_proven && has_key(data, size);
  for (const Event& event : events) require(may_write && event.kind == EventKind::kImm);
  for (size_t i = 0; i < kGuard; ++i) require(memory[i] == 0x5A && memory[kGuard + kBytes + i] == 0x5A);
  for (size_t i = 0; i < kBytes && !may_write; ++i) require(memory[kGuard + i] == 0x5A);
  return 0;
}
