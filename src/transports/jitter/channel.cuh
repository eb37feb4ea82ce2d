// SPDX-License-Identifier: Apache-2.0
//
// The channel of another transport, before some of whose calls the calling thread waits a random time. What is
// promised stays: calls of one thread keep their order, so signals come after earlier puts. Merely usual
// behaviour is lost: that a signal follows its put at once, that ranks are in step, that two threads' calls
// come in the order in which they were begun.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft {

namespace jitter {

// One call in so many waits.
inline constexpr uint32_t kOneIn = 4;

struct Dial {
  uint64_t* drawn;   // how many calls have drawn a time so far; every channel of the rank counts here
  uint64_t seed;     // of the rank
  uint64_t most_ns;  // below 2^32
};

// How long call number `draw` waits: 0, or anything below most_ns. splitmix64's finaliser makes the draw.
WEFT_DEVICE constexpr uint64_t wait_ns(uint64_t seed, uint64_t draw, uint64_t most_ns) {
  uint64_t drawn = seed + draw * 0x9e3779b97f4a7c15u;
  drawn = (drawn ^ drawn >> 30) * 0xbf58476d1ce4e5b9u;
  drawn = (drawn ^ drawn >> 27) * 0x94d049bb133111ebu;
  drawn ^= drawn >> 31;
  return drawn % kOneIn == 0 ? (drawn >> 32) * most_ns >> 32 : 0;
}

// By the thread that is about to call.
WEFT_DEVICE void hesitate(const Dial& dial) {
  const uint64_t wait = wait_ns(dial.seed, add_local(dial.drawn, uint64_t{1}), dial.most_ns);
  if (wait == 0) return;
  const uint64_t until = now_ns() + wait;
  for (uint32_t looks = 0; now_ns() < until; ++looks) pause(looks);
}

}  // namespace jitter

template <class Behind>
class JitterChannel {
 public:
  WEFT_DEVICE JitterChannel(Behind behind, jitter::Dial dial) : behind_(behind), dial_(dial) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    if (group.rank() == 0) jitter::hesitate(dial_);
    group.sync();
    behind_.put(group, dst, src, bytes);
  }
  // In two calls, with a wait of its own for the signal.
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    put(group, dst, src, bytes);
    group.sync();
    if (group.rank() == 0) put_value(word, value);
    group.sync();
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) {
    jitter::hesitate(dial_);
    behind_.put_value(word, value);
  }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) {
    jitter::hesitate(dial_);
    behind_.signal_add(word, n);
  }
  WEFT_DEVICE void flush() {
    jitter::hesitate(dial_);
    behind_.flush();
  }
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    if (group.rank() == 0) jitter::hesitate(dial_);
    group.sync();
    behind_.get(group, dst, src, bytes, word, value);
  }

 private:
  Behind behind_;
  jitter::Dial dial_;
};

// The mesh of the transport behind, and after it the dial (JitterLink::mesh() in jitter.cc).
template <Mesh Behind>
struct JitterMesh {
  Behind behind;
  jitter::Dial dial;

  WEFT_DEVICE auto to(uint32_t peer) const { return JitterChannel(behind.to(peer), dial); }
  WEFT_DEVICE uint32_t rank() const { return behind.rank(); }
  WEFT_DEVICE uint32_t ranks() const { return behind.ranks(); }
  WEFT_DEVICE std::byte* local() const { return behind.local(); }
  WEFT_DEVICE std::byte* mapped_window(uint32_t) const { return nullptr; }
  WEFT_DEVICE auto places() const
    requires requires(const Behind& mesh) { mesh.places(); }
  {
    return behind.places();
  }

  static_assert(sizeof(Behind) % alignof(jitter::Dial) == 0, "the two parts must follow each other");
  static_assert(
      requires(Behind mesh, jitter::Dial dial) {
        requires Channel<decltype(JitterChannel(mesh.to(0), dial))>;
      }, "JitterChannel must model Channel");
};

}  // namespace weft
