// SPDX-License-Identifier: Apache-2.0
//
// A stranger beside a running job: does to its listeners what a process without the secret can, again and again, until
// its standard input ends. For the line `report` it prints what it did since the last one, and how often it was let in.
//   weft_attacker < targets        port 127.0.0.1:4711 | shm weft-17-4711-99 | datagrams NAME | clear | report
// `weft chaos --attacker` names the listeners of its ranks so. A port is libfabric's, that of page streams or a
// bootstrap's: the greeting tells. As root it connects to listeners of the host as nobody, since they trust the same
// user.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <sstream>

#include "base/file_descriptor.h"
#include "base/log.h"
#include "bootstrap/listener.h"
#include "providers/fabric/address.h"
#include "providers/fabric/page_streams.h"
#include "tests/support/stranger.h"

namespace weft {
namespace {

using transfer::testing::Stranger;

constexpr size_t kHeld = 48;         // connections that are kept open, the oldest goes
constexpr int kPause_ms = 10;        // between two attacks: the job's ranks need the cores, too
constexpr int kPerStranger = 200;    // then another one comes, with other addresses
constexpr double kPatience_s = 0.3;  // for what nobody may answer
constexpr uid_t kNobody = 65534;

enum class Greeting { kNone, kGone, kBootstrap, kPages };

// Counts of what was done, in memory that the child without root's rights has, too.
struct Tally {
  uint64_t silent, words, garbage, claims, messages, hellos, immediates, datagrams, files;
  uint64_t let_in;
};

std::mt19937_64& chance() {
  static std::mt19937_64 random(std::random_device{}());
  return random;
}

uint32_t small(uint32_t below) {
  return static_cast<uint32_t>(chance()() % below);
}

std::string garbage(size_t most) {
  std::string bytes(1 + chance()() % most, '\0');
  for (char& byte : bytes) byte = static_cast<char>(chance()());
  return bytes;
}

// ---- over TCP, whoever listens

FileDescriptor connected(const sockaddr_in& to) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0 && errno != EINPROGRESS)
    return {};
  pollfd entry{socket.get(), POLLOUT, 0};
  int error = 1;
  socklen_t bytes = sizeof error;
  if (::poll(&entry, 1, 300) == 1) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  return error ? FileDescriptor() : std::move(socket);
}

// The first bytes of bootstraps and of page streams are as long.
Greeting greeting_of(Stream& stream) {
  static_assert(sizeof(Challenge) == sizeof(provider::StreamChallenge));
  const Deadline soon = Deadline::after_s(kPatience_s);
  Stream::Hands hands = Stream::Hands::kNotYet;
  if (!wait_until(soon, [&] { return (hands = stream.shake_hands()) != Stream::Hands::kNotYet; }))
    return Greeting::kNone;
  if (hands == Stream::Hands::kRefused) return Greeting::kGone;
  Challenge challenge{};
  const Moved got = receive_all(stream, &challenge, sizeof challenge, Deadline::after_s(kPatience_s));
  if (got == Moved::kGone) return Greeting::kGone;
  if (got == Moved::kTimeout) return Greeting::kNone;
  const bool is_pages =
      std::memcmp(challenge.magic, provider::StreamChallenge().tag, sizeof challenge.magic) == 0;
  return is_pages ? Greeting::kPages : Greeting::kBootstrap;
}

// Whether a proof that is none was taken for one.
bool claim_without_secret(Stream& stream, Greeting greeting) {
  std::string claim = garbage(1);
  if (greeting == Greeting::kPages) {
    claim.assign(sizeof(provider::StreamClaim), '\x5a');
    std::memcpy(claim.data(), provider::StreamClaim().tag, sizeof provider::StreamClaim().tag);
  } else {
    Claim said{{'w', 'e', 'f', 't', 'd', 'o', 'o', 'r'}, 1, 2, random_nonce(), {}};
    claim.assign(reinterpret_cast<const char*>(&said), sizeof said);
  }
  const Deadline soon = Deadline::after_s(kPatience_s);
  if (send_all(stream, claim.data(), claim.size(), soon) != Moved::kAll) return false;
  uint32_t answer[2] = {};
  if (receive_all(stream, answer, sizeof answer, soon) != Moved::kAll) return false;
  return greeting == Greeting::kPages ? answer[1] == 0 : answer[0] != 0;
}

// ---- messages of libfabric

class Attempts {
 public:
  Attempts(const std::string& kind, Tally& tally) : kind_(kind), tally_(tally) {}

  // `own_part`: makes the victim's address of this stranger's own.
  void attack(const std::function<std::string(const std::string&)>& address_from) {
    if (!stranger_ || ++uses_ > kPerStranger) {
      stranger_.reset();
      auto found = provider::find_provider(kind_);
      if (!found.ok()) return;
      provider_ = *found;
      stranger_ = std::make_unique<Stranger>(provider_, "a secret of nobody");
      uses_ = 0;
    }
    const std::string victim = address_from(stranger_->rail().address());
    if (victim.empty()) return;
    if (victim != last_) stranger_->forget_route();
    last_ = victim;
    say_some(victim);
    // A welcome would say that a hello without the secret was believed.
    for (std::string heard = stranger_->hear(0.01); !heard.empty(); heard = stranger_->hear(0.01)) {
      const auto head = transfer::parse_head(heard);
      tally_.let_in += head.ok() && head->type == transfer::MessageType::kWelcome;
    }
  }

 private:
  void say_some(const std::string& victim) {
    using transfer::ImmClass;
    const uint32_t imm = transfer::encode_imm(static_cast<ImmClass>(small(3)), small(8), small(8));
    switch (chance()() % 5) {
      case 0:
        tally_.messages += stranger_->say(garbage(4000), victim, kPatience_s);
        return;
      case 1:
        tally_.messages += stranger_->say(forged(), victim, kPatience_s);
        return;
      case 2:
        tally_.hellos += stranger_->say(hello(), victim, kPatience_s);
        return;
      case 3:
        for (int i = 0; i < 64; ++i) tally_.immediates += stranger_->say_with_data(imm, victim, kPatience_s);
        return;
      default:
        const transfer::RailKey guess{0, chance()()};
        tally_.immediates += stranger_->write_imm(
            transfer::with_token(imm, static_cast<uint32_t>(chance()())), guess, victim, kPatience_s);
    }
  }

  std::string forged() {
    const auto last = static_cast<uint32_t>(transfer::MessageType::kLast);
    const auto type = static_cast<transfer::MessageType>(1 + chance()() % last);
    std::string message = transfer::to_bytes(
        {type, transfer::random_id(), 1, static_cast<uint32_t>(1 + chance()() % 300), 0}, "forged");
    transfer::seal(message, {chance()(), chance()()});
    return message;
  }

  std::string hello() {
    transfer::Hello hello;
    hello.address.engine = transfer::random_id();
    hello.address.name = "a stranger";
    hello.address.provider = kind_;
    hello.address.rails = {stranger_->rail().address()};
    hello.inbox = {stranger_->inbox()};
    hello.nonce = random_nonce();
    const transfer::MessageHead head{transfer::MessageType::kHello, hello.address.engine, 1, 0, 0};
    hello.proof = transfer::prove_hello("a secret of nobody", head, hello, transfer::random_id());
    return transfer::to_bytes(head, transfer::to_body(hello));
  }

  const std::string kind_;
  Tally& tally_;
  std::shared_ptr<provider::Provider> provider_;
  std::unique_ptr<Stranger> stranger_;
  std::string last_;
  int uses_ = 0;
};

// ---- listeners of the host

// Random bytes to a rank's socket, some with descriptors, of which one makes close() wait.
void send_datagram(const std::string& name, Tally& tally) {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), std::min(name.size(), sizeof to.sun_path - 1));
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const FileDescriptor from(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const FileDescriptor lingers(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const linger wait{1, 20};
  setsockopt(lingers.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof wait);
  std::string said = garbage(400);
  iovec part{said.data(), said.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_name = &to;
  message.msg_namelen = bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (chance()() % 2) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(2 * sizeof(int));
    const int both[] = {from.get(), lingers.get()};
    std::memcpy(CMSG_DATA(head), both, sizeof both);
  }
  for (int i = 0; i < 20; ++i)
    tally.datagrams += ::sendmsg(from.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

// What a child without root's rights does on the host, a name of a listener at a time.
class OtherUser {
 public:
  explicit OtherUser(Tally& tally) {
    int ends[2];
    if (geteuid() != 0 || pipe2(ends, O_CLOEXEC) != 0) return;
    const pid_t child = fork();
    if (child == 0) {
      ::close(ends[1]);
      if (setgroups(0, nullptr) == 0 && setgid(kNobody) == 0 && setuid(kNobody) == 0) serve(ends[0], tally);
      _exit(0);
    }
    ::close(ends[0]);
    to_ = FileDescriptor(ends[1]);
  }
  // kind: d (datagrams) or f (a region of shared memory).
  bool attack(char kind, const std::string& name) {
    char line[128] = {kind};
    std::memcpy(line + 1, name.data(), std::min(name.size(), sizeof line - 2));
    return to_.is_open() && ::write(to_.get(), line, sizeof line) == sizeof line;
  }

 private:
  static void serve(int from, Tally& tally) {
    char line[128];
    while (::read(from, line, sizeof line) == sizeof line) {
      const std::string name(line + 1);
      if (line[0] == 'd') {
        send_datagram(name, tally);
        continue;
      }
      const FileDescriptor region(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
      ++tally.files;
      tally.let_in += region.is_open();
    }
  }
  FileDescriptor to_;
};

class Attacker {
 public:
  explicit Attacker(Tally& tally)
      : tally_(tally), other_(tally), tcp_("fabric:tcp", tally), shm_("fabric:shm", tally) {}

  void take(const std::string& line) {
    std::istringstream words(line);
    std::string kind, where;
    words >> kind >> where;
    if (kind == "clear") return targets_.clear();
    if (kind == "report") return report();
    const std::pair<std::string, std::string> target{kind, where};
    if (std::ranges::find(targets_, target) == targets_.end()) targets_.push_back(target);
  }

  void attack() {
    if (targets_.empty()) return;
    const auto [kind, where] = targets_[chance()() % targets_.size()];
    try {
      if (kind == "port") attack_port(where);
      if (kind == "datagrams") other_.attack('d', where);
      if (kind == "shm") attack_region(where);
    } catch (const std::exception&) {  // the victim ended in the middle
    }
  }

 private:
  void report() {
    std::printf(
        "{\"silent\": %lu, \"words\": %lu, \"garbage\": %lu, \"claims\": %lu, \"messages\": %lu, \"hellos\": "
        "%lu, "
        "\"immediates\": %lu, \"datagrams\": %lu, \"files\": %lu, \"let_in\": %lu}\n",
        tally_.silent, tally_.words, tally_.garbage, tally_.claims, tally_.messages, tally_.hellos,
        tally_.immediates, tally_.datagrams, tally_.files, tally_.let_in);
    std::fflush(stdout);
    tally_ = {};
  }

  void attack_port(const std::string& where) {
    const size_t colon = where.rfind(':');
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(where.substr(colon + 1))));
    if (inet_pton(AF_INET, where.substr(0, colon).c_str(), &to.sin_addr) != 1) return;
    FileDescriptor socket = connected(to);
    if (!socket.is_open()) return;
    switch (chance()() % 5) {
      case 0:
        ++tally_.silent;
        return hold(std::move(socket));
      case 1:
        ++tally_.words;
        (void)!::send(socket.get(), "?", 1, MSG_NOSIGNAL);
        return hold(std::move(socket));
      case 2: {
        ++tally_.garbage;
        const std::string bytes = garbage(4000);
        (void)!::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        return;
      }
      default:
        break;
    }
    auto opened = Stream::open(std::move(socket), Stream::Side::kCaller, "a secret of nobody");
    if (!opened.ok()) return;
    const Greeting greeting = greeting_of(*opened);
    if (greeting == Greeting::kGone) return;
    if (greeting != Greeting::kNone) {
      ++tally_.claims;
      tally_.let_in += claim_without_secret(*opened, greeting);
      return;
    }
    opened->close();
    tcp_.attack([&](std::string own) {
      own.replace(sizeof(provider::AddressHead), sizeof to, reinterpret_cast<const char*>(&to), sizeof to);
      return alone(own);
    });
  }

  void attack_region(const std::string& name) {
    if (chance()() % 2) {
      other_.attack('f', "/" + name);
      return;
    }
    shm_.attack([&](std::string own) {
      const size_t at = own.find("weft-", sizeof(provider::AddressHead));
      if (at == std::string::npos) return std::string();
      own.resize(at);
      return alone(own + name + '\0');
    });
  }

  // The address of a rail that has libfabric's part alone: no process to copy from, no port for pages.
  static std::string alone(std::string address) {
    const provider::AddressHead head;
    return address.replace(0, sizeof head, reinterpret_cast<const char*>(&head), sizeof head);
  }

  void hold(FileDescriptor socket) {
    held_.push_back(std::move(socket));
    if (held_.size() > kHeld) held_.pop_front();
  }

  Tally& tally_;
  OtherUser other_;
  Attempts tcp_, shm_;
  std::vector<std::pair<std::string, std::string>> targets_;
  std::deque<FileDescriptor> held_;
};

// The lines that have come; false at the end.
bool read_lines(Attacker& attacker) {
  static std::string pending;
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (::poll(&input, 1, 0) > 0) {
    char bytes[4096];
    const ssize_t got = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (got <= 0) return false;
    pending.append(bytes, static_cast<size_t>(got));
    for (size_t end = pending.find('\n'); end != std::string::npos; end = pending.find('\n')) {
      attacker.take(pending.substr(0, end));
      pending.erase(0, end + 1);
    }
  }
  return true;
}

int run() {
  std::signal(SIGPIPE, SIG_IGN);
  set_log_sink([](LogLevel, const std::string&) {});  // that it is refused is what it came for
  void* const shared =
      mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  Attacker attacker(*new (shared) Tally{});
  while (read_lines(attacker)) {
    attacker.attack();
    usleep(kPause_ms * 1000);
  }
  return 0;
}

}  // namespace
}  // namespace weft

int main() {
  return weft::run();
}
