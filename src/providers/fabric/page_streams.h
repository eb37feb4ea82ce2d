// SPDX-License-Identifier: Apache-2.0
//
// PageStreams carries lists of pages over TCP connections of its own. libfabric's tcp takes at most four
// pages per message and its messages cost more than copying a page; here a thousand pages are one message,
// which the kernel gathers from their places on one side and scatters to their places on the other. No page
// is copied twice.
//   auto streams = PageStreams::listen(interface, secret);
//   streams->allow(registration, range, access);             // what peers may write to
//   size_t to = streams->open(their_interface, their_port);
//   streams->post(to, pieces, count, context);               // one event in progress() once all are in place
//
// A frame may carry an immediate, which the receiver's progress() reports once the pages are in place.
//
// Wire format, on a Stream (base/stream.h), encrypted with WEFT_TLS=1: the receiver sends a StreamChallenge, and the sender answers with a StreamClaim, which proves that it
// knows the secret. Then frames: the sender's FrameHead, its PageHeads, then the pages' bytes; the receiver
// answers every frame with one FrameReply, in order. A frame of which any page may not be written is refused
// as a whole and skipped; so is the rest of one whose memory is forbidden while it comes. A stream that proves nothing for 5 s is closed.
// Threads: one at a time, but for sleep().
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <netinet/in.h>
#include <sys/uio.h>

#include "base/file_descriptor.h"
#include "base/paced_log.h"
#include "base/proof.h"
#include "base/stream.h"
#include "providers/provider.h"

namespace weft::provider {

constexpr uint32_t kPagesPerFrame = 1024;

struct StreamChallenge {
  char tag[8] = {'w', 'p', 'g', 'h', 'e', 'l', 'l', 'o'};
  Nonce nonce{};
};
struct StreamClaim {
  char tag[8] = {'w', 'p', 'g', 'c', 'l', 'a', 'i', 'm'};
  Proof proof{};
};
struct FrameHead {
  char tag[4] = {'w', 'p', 'g', '3'};
  uint16_t pages = 0;  // 1 to kPagesPerFrame
  uint16_t has_imm = 0;
  uint64_t imm = 0;
};
struct PageHead {
  uint64_t remote = 0;  // as in Piece
  uint64_t rkey = 0;
  uint64_t bytes = 0;
};
struct FrameReply {
  char tag[4] = {'w', 'p', 'g', 'r'};
  uint32_t is_refused = 0;  // 2: of the claim, after which the stream ends
};
static_assert(sizeof(StreamChallenge) == 24 && sizeof(StreamClaim) == 40);
static_assert(sizeof(FrameHead) == 16 && sizeof(PageHead) == 24 && sizeof(FrameReply) == 8);

class PageStreams {
 public:
  // Listens on `interface` (an IPv4 address in network order), on a port that the system chooses.
  static Result<std::unique_ptr<PageStreams>> listen(in_addr interface, std::string secret);
  ~PageStreams();
  PageStreams(const PageStreams&) = delete;
  PageStreams& operator=(const PageStreams&) = delete;

  uint16_t port() const { return port_; }

  void allow(const Registration& registration, const Range& range, uint32_t access);
  // From here on nothing writes to this memory or reads from it. What still comes for its key is skipped and refused;
  // streams that still send from it end.
  void forbid(const Registration& registration);

  // A connection to a peer's port, made with the first frame. close() fails what is under way on it.
  size_t open(in_addr interface, uint16_t port);
  void close(size_t stream);
  // Queues one frame; its pages must stay as they are until its event. A frame waits for room by itself.
  // `is_temporary`: a refusal says key_refused.
  void post(size_t stream, const Piece* pieces, uint32_t count, Context* context,
            std::optional<uint64_t> imm = {}, bool is_temporary = false);

  // Sends and receives what it can; cheap while nothing is under way. Appends an event for each frame that
  // ended: kDone when its pages are in place over there, and kImm for each immediate of a peer's frame. Returns whether anything of a peer's came in.
  bool progress(std::deque<Event>& events);

  // Sleeps until a socket has something new, or room, or `most_ns` have passed. False, and no sleep, where nothing was under way in
  // the last progress(). Threads: any, also while another is in progress(): what that one has found wakes nobody.
  bool sleep(uint64_t most_ns) const;

 private:
  struct Region {
    char* data;
    uint64_t bytes;
    uint64_t base;
    bool is_writable;
  };
  struct Frame {
    std::vector<char> heads;
    std::vector<iovec> parts;  // heads, then pages
    size_t next = 0;           // part that is being sent
    Context* context = nullptr;
    bool is_temporary = false;
  };
  struct Outgoing {
    sockaddr_in to{};
    Stream stream;
    bool is_used = true;
    bool is_open = false;                      // both sides have shaken hands
    bool can_read = false, can_write = false;  // by what epoll said, until the socket has refused
    bool is_claimed = false;                   // the challenge was answered
    StreamChallenge challenge;
    size_t challenge_bytes = 0;
    std::deque<Frame> frames;  // not answered yet
    size_t sent = 0;           // of which so many are with the kernel
    FrameReply reply;
    size_t reply_bytes = 0;
  };
  struct Incoming {
    Stream stream;
    bool can_read = false, can_write = true;
    bool is_open = false;  // both sides have shaken hands, and it has had its challenge
    Nonce nonce{};         // of that,
    std::chrono::steady_clock::time_point since{};
    bool is_proven = false;   // and whether it was answered
    std::vector<char> heads;  // of the frame that arrives, so far; before that, the claim
    size_t heads_bytes = sizeof(StreamClaim);
    std::vector<iovec> into;  // its pages
    size_t next = 0;
    uint64_t skip_bytes = 0;  // of a refused frame
    bool writes_to(uint64_t rkey) const;
    void refuse_rest();
    bool is_refused = false;
    std::vector<char> replies;  // not taken by the kernel yet
    // Pages are coming that may be written. For whoever says less than that, nobody looks at every turn.
    bool is_in_pages() const { return is_proven && heads.size() == heads_bytes && !is_refused; }
  };
  enum class Came { kNothing, kSome, kEnd };

  PageStreams() = default;
  bool connect(size_t stream);
  void fail(Outgoing& out, const std::string& why, bool peer_gone, std::deque<Event>& events);
  void send_frames(Outgoing& out, std::deque<Event>& events);
  void take_replies(Outgoing& out, std::deque<Event>& events);
  bool shake_hands(Outgoing& out, std::deque<Event>& events);
  bool answer_challenge(Outgoing& out, std::deque<Event>& events);
  void accept_all();
  void drop_silent();
  bool challenge(Incoming& in);
  bool check_claim(Incoming& in);
  bool receive(Incoming& in);
  Came receive_heads(Incoming& in);
  Came receive_pages(Incoming& in);
  bool begin_pages(Incoming& in);
  bool end_frame(Incoming& in);
  bool send_replies(Incoming& in);
  char* place(const PageHead& page) const;
  bool is_time_to_look();
  bool look();
  void receive_all();
  bool watch(int fd, uint32_t what, uint64_t mark);

  std::string secret_;
  PacedLog refusals_;
  bool has_unproven_ = false;  // among the incoming streams
  int listener_ = -1;
  int news_ = -1;  // an epoll instance, by edges: which socket has something new, or room
  uint16_t port_ = 0;
  uint32_t quiet_calls_ = 0;
  uint32_t idle_looks_ = 0;  // in a row, that found nothing
  std::chrono::steady_clock::time_point looked_{};
  std::unordered_map<uint64_t, Region> regions_;  // by rkey
  std::deque<Outgoing> outgoing_;
  size_t unanswered_ = 0;  // frames of all outgoing streams
  std::unordered_map<int, std::unique_ptr<Incoming>> incoming_;
  std::vector<Incoming*> arriving_;     // in the middle of a frame, or not read to the end
  std::atomic<bool> is_moving_{false};  // frames of either direction are under way
  std::deque<Event> failed_;            // outside of progress()
  std::vector<uint64_t> imms_;          // that came, in this progress()
  bool has_come_ = false;               // something, in this progress()
};

}  // namespace weft::provider
