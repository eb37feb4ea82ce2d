// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/page_streams.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "providers/fabric/page_streams_parts.h"

namespace weft::provider {
namespace {

// While nothing is under way, progress() looks at the sockets, a system call, in each call; after kEagerLooks in vain in each
// eighth, and after kIdleLooks only once kIdlePause has passed, too.
constexpr uint32_t kEagerLooks = 64, kIdleLooks = 320;
constexpr uint32_t kCallsPerLook = 8;
constexpr auto kIdlePause = std::chrono::microseconds(100);
// What epoll says of: the listener, an outgoing stream by its place, an incoming one by its socket.
constexpr uint64_t kListenerMark = UINT64_MAX, kOutgoingMark = uint64_t{1} << 32;

int new_socket() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int one = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

}  // namespace

Result<std::unique_ptr<PageStreams>> PageStreams::listen(in_addr interface, std::string secret) {
  WEFT_TRY(Stream::check(secret));
  std::unique_ptr<PageStreams> streams(new PageStreams());
  streams->secret_ = std::move(secret);
  auto failed = [](const char* what) {
    return logged(Status::from_errno(errno, "fabric: {} for pages", what));
  };
  streams->listener_ = new_socket();
  if (streams->listener_ < 0) return failed("making a socket");
  sockaddr_in self{};
  self.sin_family = AF_INET;
  self.sin_addr = interface;
  socklen_t length = sizeof self;
  auto* const address = reinterpret_cast<sockaddr*>(&self);
  if (bind(streams->listener_, address, length) != 0) return failed("binding a socket");
  if (::listen(streams->listener_, SOMAXCONN) != 0) return failed("listening");
  if (getsockname(streams->listener_, address, &length) != 0) return failed("asking for the port");
  streams->port_ = ntohs(self.sin_port);
  streams->news_ = epoll_create1(EPOLL_CLOEXEC);
  if (streams->news_ < 0 || !streams->watch(streams->listener_, EPOLLIN, kListenerMark))
    return failed("watching sockets");
  return streams;
}

PageStreams::~PageStreams() {
  if (listener_ >= 0) ::close(listener_);
  if (news_ >= 0) ::close(news_);
}

bool PageStreams::watch(int fd, uint32_t what, uint64_t mark) {
  epoll_event event{what, {.u64 = mark}};
  return epoll_ctl(news_, EPOLL_CTL_ADD, fd, &event) == 0;
}

void PageStreams::allow(const Registration& registration, const Range& range, uint32_t access) {
  if (range.kind == MemoryKind::kHost)
    regions_[registration.rkey] = {static_cast<char*>(range.data), range.bytes, registration.base,
                                   (access & kRemoteWrite) != 0};
}

void PageStreams::forbid(const Registration& registration) {
  const auto found = regions_.find(registration.rkey);
  if (found == regions_.end()) return;
  const Region region = found->second;
  regions_.erase(found);
  auto touches = [&](const std::vector<iovec>& parts, size_t from) {
    return std::any_of(parts.begin() + static_cast<std::ptrdiff_t>(from), parts.end(),
                       [&](const iovec& part) {
                         const auto* at = static_cast<const char*>(part.iov_base);
                         return at >= region.data && at < region.data + region.bytes;
                       });
  };
  for (Outgoing& out : outgoing_)
    if (std::any_of(out.frames.begin(), out.frames.end(),
                    [&](const Frame& frame) { return touches(frame.parts, frame.next); }))
      fail(out, "the memory of a frame was released", false, failed_);
  for (Incoming* in : arriving_)
    if (in->writes_to(registration.rkey)) in->refuse_rest();
}

// By key: other memory that peers may still write can lie at the same address.
bool PageStreams::Incoming::writes_to(uint64_t rkey) const {
  if (next == into.size()) return false;
  for (size_t at = sizeof(FrameHead); at < heads_bytes; at += sizeof(PageHead)) {
    PageHead page;
    std::memcpy(&page, heads.data() + at, sizeof page);
    if (page.rkey == rkey) return true;
  }
  return false;
}

// Of the frame that arrives.
void PageStreams::Incoming::refuse_rest() {
  for (; next < into.size(); ++next) skip_bytes += into[next].iov_len;
  into.clear();
  next = 0;
  is_refused = true;
}

// ---- sending

size_t PageStreams::open(in_addr interface, uint16_t port) {
  Outgoing out;
  out.to.sin_family = AF_INET;
  out.to.sin_addr = interface;
  out.to.sin_port = htons(port);
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    if (outgoing_[i].is_used) continue;
    outgoing_[i] = std::move(out);
    return i;
  }
  outgoing_.push_back(std::move(out));
  return outgoing_.size() - 1;
}

void PageStreams::close(size_t stream) {
  fail(outgoing_[stream], "the peer was let go", false, failed_);
  outgoing_[stream].is_used = false;
}

bool PageStreams::connect(size_t stream) {
  Outgoing& out = outgoing_[stream];
  FileDescriptor socket(new_socket());
  if (!socket.is_open()) return false;
  const auto* to = reinterpret_cast<const sockaddr*>(&out.to);
  if (::connect(socket.get(), to, sizeof out.to) != 0 && errno != EINPROGRESS) return false;
  auto opened = Stream::open(std::move(socket), Stream::Side::kCaller, secret_);
  if (!opened.ok()) return false;  // listen() has checked what may be wrong
  out.stream = std::move(*opened);
  return watch(out.stream.fd(), EPOLLIN | EPOLLOUT | EPOLLET, kOutgoingMark | stream);
}

void PageStreams::post(size_t stream, const Piece* pieces, uint32_t count, Context* context,
                       std::optional<uint64_t> imm, bool is_temporary) {
  Frame frame;
  FrameHead head;
  head.pages = static_cast<uint16_t>(count);
  head.has_imm = imm.has_value();
  head.imm = imm.value_or(0);
  frame.heads.resize(sizeof head + count * sizeof(PageHead));
  std::memcpy(frame.heads.data(), &head, sizeof head);
  frame.parts.reserve(count + 1);
  frame.parts.push_back({frame.heads.data(), frame.heads.size()});
  for (uint32_t i = 0; i < count; ++i) {
    const PageHead page{pieces[i].remote, pieces[i].rkey, pieces[i].bytes};
    std::memcpy(frame.heads.data() + sizeof head + i * sizeof page, &page, sizeof page);
    if (pieces[i].bytes) frame.parts.push_back({pieces[i].local, pieces[i].bytes});
  }
  frame.context = context;
  frame.is_temporary = is_temporary;
  Outgoing& out = outgoing_[stream];
  out.frames.push_back(std::move(frame));
  ++unanswered_;
  is_moving_.store(true, std::memory_order_relaxed);
  if (!out.stream.is_open() && !connect(stream))
    return fail(out, text("connecting: {}", std::strerror(errno)), true, failed_);
  send_frames(out, failed_);
}

void PageStreams::fail(Outgoing& out, const std::string& why, bool peer_gone, std::deque<Event>& events) {
  out.stream.close();
  out.is_open = out.can_read = out.can_write = false;
  for (const Frame& frame : out.frames) {
    Event& event = events.emplace_back();
    event.kind = EventKind::kFailed;
    event.peer_gone = peer_gone;
    event.context = frame.context;
    event.text = text("pages over tcp: {}", why);
  }
  unanswered_ -= out.frames.size();
  out.frames.clear();
  out.sent = 0;
  out.reply_bytes = 0;
  out.challenge_bytes = 0;
  out.is_claimed = false;
}

// Whether both sides have shaken hands; without waiting.
bool PageStreams::shake_hands(Outgoing& out, std::deque<Event>& events) {
  if (out.is_open || !(out.can_read || out.can_write)) return out.is_open;
  const Stream::Hands hands = out.stream.shake_hands();
  if (hands == Stream::Hands::kRefused) fail(out, out.stream.why().message(), true, events);
  return out.is_open = hands == Stream::Hands::kShaken;
}

// Whether the other side has had its proof; without waiting.
bool PageStreams::answer_challenge(Outgoing& out, std::deque<Event>& events) {
  if (out.is_claimed || !shake_hands(out, events) || !out.can_read) return out.is_claimed;
  char* const at = reinterpret_cast<char*>(&out.challenge) + out.challenge_bytes;
  const ssize_t came = out.stream.receive(at, sizeof out.challenge - out.challenge_bytes);
  if (came < 0 && must_wait(out.can_read)) return false;
  if (came <= 0) {
    fail(out, came ? std::strerror(errno) : "the peer closed its end", true, events);
    return false;
  }
  out.challenge_bytes += static_cast<size_t>(came);
  if (out.challenge_bytes < sizeof out.challenge) return false;
  StreamClaim claim;
  claim.proof = prove(secret_, "pages", {bytes_of(out.challenge.nonce)});
  const bool is_challenge =
      std::memcmp(out.challenge.tag, StreamChallenge().tag, sizeof out.challenge.tag) == 0;
  // The first bytes on a new connection: there is room for them.
  if (!is_challenge || out.stream.send(&claim, sizeof claim) != sizeof claim) {
    fail(out, is_challenge ? std::strerror(errno) : "something else listens there", true, events);
    return false;
  }
  return out.is_claimed = true;
}

void PageStreams::send_frames(Outgoing& out, std::deque<Event>& events) {
  if (!answer_challenge(out, events)) return;
  while (out.can_write && out.sent < out.frames.size()) {
    Frame& frame = out.frames[out.sent];
    const ssize_t sent = out.stream.send(&frame.parts[frame.next], parts_at_once(frame.parts, frame.next));
    if (sent < 0 && must_wait(out.can_write)) return;
    if (sent < 0) return fail(out, std::strerror(errno), true, events);
    if (advance(frame.parts, frame.next, static_cast<size_t>(sent))) ++out.sent;
  }
}

void PageStreams::take_replies(Outgoing& out, std::deque<Event>& events) {
  while (out.is_claimed && out.can_read && !out.frames.empty()) {
    char* const at = reinterpret_cast<char*>(&out.reply) + out.reply_bytes;
    const ssize_t came = out.stream.receive(at, sizeof out.reply - out.reply_bytes);
    if (came < 0 && must_wait(out.can_read)) return;
    if (came <= 0) return fail(out, came ? std::strerror(errno) : "the peer closed its end", true, events);
    out.reply_bytes += static_cast<size_t>(came);
    if (out.reply_bytes < sizeof out.reply) continue;
    out.reply_bytes = 0;
    if (out.reply.is_refused == kClaimRefused)
      return fail(out, "the peer refused this stream: its job has another secret", true, events);
    if (std::memcmp(out.reply.tag, FrameReply().tag, sizeof out.reply.tag) != 0 || out.sent == 0)
      return fail(out, "the peer answered what it was not asked", true, events);
    Event& event = events.emplace_back();
    event.kind = out.reply.is_refused ? EventKind::kFailed : EventKind::kDone;
    event.context = out.frames.front().context;
    event.key_refused = out.reply.is_refused && out.frames.front().is_temporary;
    if (out.reply.is_refused) event.text = "pages over tcp: the peer does not let this memory be written";
    out.frames.pop_front();
    --out.sent;
    --unanswered_;
  }
}

bool PageStreams::is_time_to_look() {
  if (is_moving_.load(std::memory_order_relaxed) || idle_looks_ < kEagerLooks) return true;
  if (++quiet_calls_ % kCallsPerLook != 0) return false;
  if (idle_looks_ < kIdleLooks) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now - looked_ < kIdlePause) return false;
  looked_ = now;
  return true;
}

// Notes what the sockets have to say; whether somebody calls.
bool PageStreams::look() {
  bool has_callers = false;
  epoll_event news[16];
  const int count = epoll_wait(news_, news, 16, 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t mark = news[i].data.u64;
    const bool has_ended = (news[i].events & (EPOLLERR | EPOLLHUP)) != 0;
    const bool can_read = has_ended || (news[i].events & EPOLLIN) != 0;
    const bool can_write = has_ended || (news[i].events & EPOLLOUT) != 0;
    if (mark == kListenerMark) {
      has_callers = true;
    } else if (mark & kOutgoingMark) {
      Outgoing& out = outgoing_[mark & ~kOutgoingMark];
      out.can_read = out.can_read || can_read;
      out.can_write = out.can_write || can_write;
    } else {
      Incoming* const in = incoming_.at(static_cast<int>(mark)).get();
      in->can_read = in->can_read || can_read;
      in->can_write = in->can_write || can_write;
      if (std::ranges::find(arriving_, in) == arriving_.end()) arriving_.push_back(in);
    }
  }
  return has_callers;
}

bool PageStreams::progress(std::deque<Event>& events) {
  has_come_ = false;
  for (; !failed_.empty(); failed_.pop_front()) events.push_back(std::move(failed_.front()));
  const bool looks = is_time_to_look();
  const bool has_callers = looks && look();
  if (unanswered_)
    for (Outgoing& out : outgoing_) {
      if (out.frames.empty()) continue;
      send_frames(out, events);
      take_replies(out, events);
    }
  receive_all();
  for (const uint64_t imm : std::exchange(imms_, {})) {
    events.emplace_back().kind = EventKind::kImm;
    events.back().imm = imm;
  }
  if (has_unproven_) drop_silent();
  if (has_callers) accept_all();
  const bool is_moving = unanswered_ || !arriving_.empty();
  is_moving_.store(is_moving, std::memory_order_relaxed);
  if (is_moving || has_come_)
    idle_looks_ = 0;
  else if (looks)
    ++idle_looks_;
  return has_come_;
}

bool PageStreams::sleep(uint64_t most_ns) const {
  if (!is_moving_.load(std::memory_order_relaxed)) return false;
  pollfd news{news_, POLLIN, 0};
  const timespec most{0, static_cast<long>(most_ns)};
  (void)ppoll(&news, 1, &most, nullptr);
  return true;
}

}  // namespace weft::provider
