// SPDX-License-Identifier: Apache-2.0
//
// Ring sends messages to, and takes them from, the neighbours of a rank in the circle of all ranks.
//   WEFT_TRY_ASSIGN(auto ring, Ring::create(buffer, 1 << 20, 4));         // messages to 1 MiB, 4 under way
//   WEFT_TRY(ring->send({data, bytes, next, 0, stream}));                 // waits while 4 are not read yet
//   WEFT_TRY(ring->receive({data, bytes, previous, 0, stream}));
// Messages from one rank to another keep their order, and each is received with the size it was sent with. On
// CUDA calls enqueue on `stream`, calls with one neighbour on streams that the caller orders, and a graph can
// be captured; on the host they return when they are done. Threads: one caller at a time. Lifetime: must not
// outlive the buffer, whose deadline and faults it shares. Errors: kInvalid for a rank that is no neighbour,
// a message that is too large, or, on the receiver, of another size than was sent: that message is lost, the
// next may succeed; kPeerLost names the silent neighbour.
#pragma once

#include <memory>

#include "moe/buffer.h"
#include "plan/elastic.h"

namespace weft {

struct RingCall {
  std::byte* data;  // memory of this rank's device; a send only reads it
  uint64_t bytes;
  uint32_t peer;
  uint32_t num_sms;  // 0: chosen by size
  void* stream;
};

class Ring {
 public:
  // Collective: every rank with the same sizes. Errors: those of Window::create.
  static Result<std::unique_ptr<Ring>> create(MoeBuffer& buffer, uint64_t max_bytes, uint32_t in_flight);

  Status send(const RingCall& call) {
    if (call.peer < static_cast<uint32_t>(window_->communicator()->size()))
      buffer_.tally().sent_to(call.peer, call.bytes);
    return buffer_.tally().count(sends_, {call.bytes, call.bytes, -1, false},
                                 [&] { return run(call, true); });
  }
  Status receive(const RingCall& call) {
    return buffer_.tally().count(receives_, {call.bytes, call.bytes, -1, false},
                                 [&] { return run(call, false); });
  }

  Status check_owner() const { return window_->communicator()->check_owner("buffer"); }

 private:
  Ring(MoeBuffer& buffer, std::unique_ptr<Window> window, const NeighbourPlan& plan, uint64_t max_bytes,
       uint32_t in_flight)
      : buffer_(buffer),
        window_(std::move(window)),
        plan_(plan),
        max_bytes_(max_bytes),
        in_flight_(in_flight),
        sends_(buffer.tally().operation("pp_send")),
        receives_(buffer.tally().operation("pp_recv")) {}
  Status run(const RingCall& call, bool sends);

  MoeBuffer& buffer_;
  std::unique_ptr<Window> window_;
  NeighbourPlan plan_;
  uint64_t max_bytes_;
  uint32_t in_flight_;
  TallyOperation &sends_, &receives_;
};

}  // namespace weft
