// SPDX-License-Identifier: Apache-2.0
//
// The receiving half of PageStreams: who connects, what comes, and where it goes.
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "providers/fabric/page_streams.h"
#include "providers/fabric/page_streams_parts.h"

namespace weft::provider {
namespace {

constexpr size_t kStreamsMax = 4096;         // that strangers may open
constexpr int kCallsPerTurn = 64;            // of one stream, before others get theirs
constexpr size_t kQueuedReplyBytes = 65536;  // bytes, for a peer that does not read them
constexpr uint64_t kSkippedAtOnce = 65536;
constexpr int kAcceptsPerTurn = 16;
constexpr size_t kLeastHeadBytes = sizeof(FrameHead) + sizeof(PageHead);  // of a frame, asked for in one call
constexpr size_t kUnprovenLeast = 16, kUnprovenMost = 256;
constexpr auto kUnprovenFor = std::chrono::seconds(5);

// How many strangers may keep connections at once: an eighth of the files that the process may open.
size_t unproven_max() {
  rlimit limit{};
  const rlim_t files = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
  return std::clamp<size_t>(files / 8, kUnprovenLeast, kUnprovenMost);
}

}  // namespace

// Who has connected and proven nothing for long; of too many also the one that has had the longest time.
void PageStreams::drop_silent() {
  const auto now = std::chrono::steady_clock::now();
  Incoming* oldest = nullptr;
  size_t unproven = 0;
  for (auto at = incoming_.begin(); at != incoming_.end();) {
    Incoming& in = *at->second;
    if (!in.is_proven && now - in.since > kUnprovenFor) {
      std::erase(arriving_, &in);
      at = incoming_.erase(at);
      continue;
    }
    unproven += !in.is_proven;
    if (!in.is_proven && (!oldest || in.since < oldest->since)) oldest = &in;
    ++at;
  }
  has_unproven_ = unproven > 0;
  if (unproven < unproven_max()) return;
  std::erase(arriving_, oldest);
  incoming_.erase(oldest->stream.fd());
}

void PageStreams::accept_all() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    FileDescriptor socket(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.is_open()) return;
    const int fd = socket.get(), one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (incoming_.size() >= kStreamsMax) continue;
    auto stream = Stream::open(std::move(socket), Stream::Side::kListener, secret_);
    if (!stream.ok() || !watch(fd, EPOLLIN | EPOLLOUT | EPOLLET, static_cast<uint64_t>(fd))) continue;
    auto in = std::make_unique<Incoming>();
    in->stream = std::move(*stream);
    in->since = std::chrono::steady_clock::now();
    arriving_.push_back(in.get());  // it is to be greeted
    incoming_[fd] = std::move(in);
    drop_silent();
  }
}

// Once both sides have shaken hands; false for one that is refused.
bool PageStreams::challenge(Incoming& in) {
  const Stream::Hands hands = in.stream.shake_hands();
  if (hands == Stream::Hands::kNotYet) {
    in.can_read = false;
    return true;
  }
  if (hands == Stream::Hands::kRefused) {
    if (in.stream.why().code() != Code::kPeerLost)
      refusals_.warn("fabric: a stream of pages is refused: {}", in.stream.why().message());
    return false;
  }
  StreamChallenge challenge;
  challenge.nonce = in.nonce = random_nonce();
  in.is_open = in.can_read = true;  // more may have come with it
  return in.stream.send(&challenge, sizeof challenge) == sizeof challenge;
}

// Once the claim is there; false for one that proves nothing, which is told so.
bool PageStreams::check_claim(Incoming& in) {
  StreamClaim claim;
  std::memcpy(&claim, in.heads.data(), sizeof claim);
  in.is_proven = std::memcmp(claim.tag, StreamClaim().tag, sizeof claim.tag) == 0 &&
                 is_same(claim.proof, prove(secret_, "pages", {bytes_of(in.nonce)}));
  in.heads.clear();
  in.heads_bytes = kLeastHeadBytes;
  if (in.is_proven) return true;
  refusals_.warn("fabric: a stream of pages is refused: its sender does not know the job's secret");
  FrameReply reply;
  reply.is_refused = kClaimRefused;
  (void)!in.stream.send(&reply, sizeof reply);
  return false;
}

// Where a page goes; null when the peer may not write there.
char* PageStreams::place(const PageHead& page) const {
  const auto found = regions_.find(page.rkey);
  if (found == regions_.end() || !found->second.is_writable || page.remote < found->second.base)
    return nullptr;
  const uint64_t offset = page.remote - found->second.base;
  const bool is_inside = offset <= found->second.bytes && page.bytes <= found->second.bytes - offset;
  return is_inside ? found->second.data + offset : nullptr;
}

PageStreams::Came PageStreams::receive_heads(Incoming& in) {
  const size_t have = in.heads.size();
  in.heads.resize(in.heads_bytes);
  const ssize_t came = in.stream.receive(in.heads.data() + have, in.heads_bytes - have);
  in.heads.resize(have + static_cast<size_t>(std::max<ssize_t>(came, 0)));
  if (came < 0 && must_wait(in.can_read)) return Came::kNothing;
  return came > 0 ? Came::kSome : Came::kEnd;
}

// Once all heads are there; false for what is no frame.
bool PageStreams::begin_pages(Incoming& in) {
  in.into.clear();
  in.next = 0;
  uint64_t bytes = 0;
  for (size_t at = sizeof(FrameHead); at < in.heads_bytes; at += sizeof(PageHead)) {
    PageHead page;
    std::memcpy(&page, in.heads.data() + at, sizeof page);
    char* const to = place(page);
    in.is_refused = in.is_refused || !to;
    if (to && page.bytes) in.into.push_back({to, page.bytes});
    if (__builtin_add_overflow(bytes, page.bytes, &bytes)) return false;
  }
  if (!in.is_refused) return true;
  in.into.clear();
  in.skip_bytes = bytes;
  return true;
}

PageStreams::Came PageStreams::receive_pages(Incoming& in) {
  char skipped[kSkippedAtOnce];
  ssize_t came = 0;
  if (in.skip_bytes) {
    came = in.stream.receive(skipped, std::min(in.skip_bytes, kSkippedAtOnce));
    if (came > 0) in.skip_bytes -= static_cast<uint64_t>(came);
  } else {
    came = in.stream.receive(&in.into[in.next], parts_at_once(in.into, in.next));
    if (came > 0) advance(in.into, in.next, static_cast<size_t>(came));
  }
  if (came < 0 && must_wait(in.can_read)) return Came::kNothing;
  return came > 0 ? Came::kSome : Came::kEnd;
}

bool PageStreams::end_frame(Incoming& in) {
  FrameHead head;
  std::memcpy(&head, in.heads.data(), sizeof head);
  if (head.has_imm && !in.is_refused) imms_.push_back(head.imm);
  FrameReply reply;
  reply.is_refused = in.is_refused;
  const char* bytes = reinterpret_cast<const char*>(&reply);
  in.replies.insert(in.replies.end(), bytes, bytes + sizeof reply);
  in.heads.clear();
  in.heads_bytes = kLeastHeadBytes;
  in.is_refused = false;
  return send_replies(in);
}

bool PageStreams::send_replies(Incoming& in) {
  if (in.replies.empty() || !in.can_write) return true;
  const ssize_t sent = in.stream.send(in.replies.data(), in.replies.size());
  if (sent < 0) return must_wait(in.can_write);
  in.replies.erase(in.replies.begin(), in.replies.begin() + sent);
  return true;
}

// Takes what has come on one stream; false when the stream has ended or is not worth listening to.
bool PageStreams::receive(Incoming& in) {
  if (!in.is_open && !challenge(in)) return false;
  if (!in.is_open) return true;
  if (!send_replies(in) || in.replies.size() > kQueuedReplyBytes) return false;
  for (int calls = 0; in.can_read && calls < kCallsPerTurn; ++calls) {
    const bool is_in_heads = in.heads.size() < in.heads_bytes;
    const Came came = is_in_heads ? receive_heads(in) : receive_pages(in);
    if (came != Came::kSome) return came == Came::kNothing;
    has_come_ = has_come_ || in.is_proven;
    if (is_in_heads) {
      if (in.heads.size() < in.heads_bytes) continue;
      if (!in.is_proven) {
        if (!check_claim(in)) return false;
        continue;
      }
      FrameHead head;
      std::memcpy(&head, in.heads.data(), sizeof head);
      const bool is_head = std::memcmp(head.tag, FrameHead().tag, sizeof head.tag) == 0;
      if (!is_head || head.pages == 0 || head.pages > kPagesPerFrame) return false;
      in.heads_bytes = sizeof head + head.pages * sizeof(PageHead);
      if (in.heads.size() < in.heads_bytes) continue;
      if (!begin_pages(in)) return false;
    }
    if (in.next == in.into.size() && in.skip_bytes == 0 && !end_frame(in)) return false;
  }
  return true;
}

void PageStreams::receive_all() {
  std::vector<Incoming*> look;
  look.swap(arriving_);
  for (Incoming* in : look) {
    if (!receive(*in)) {
      incoming_.erase(in->stream.fd());
    } else if (in->can_read || in->is_in_pages() || !in->replies.empty()) {
      arriving_.push_back(in);
    }
  }
}

}  // namespace weft::provider
