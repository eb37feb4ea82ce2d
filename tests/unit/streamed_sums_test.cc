// SPDX-License-Identifier: Apache-2.0
//
// The sums of combine on targets with bulk copies, on the host: pieces are asked for in the order in which they are added,
// never more than there is room for, and all of them are taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/moe/high_throughput_combine_stream.cuh"

namespace weft {
namespace {

// A RowQueue that copies where it is asked, and notes what would go wrong on a GPU.
class CheckedQueue {
 public:
  explicit CheckedQueue(uint32_t slots) : slots_(slots) {}

  bool has_room() const { return pieces_.size() < slots_; }
  void ask(const std::byte* src, uint32_t bytes) {
    EXPECT_TRUE(has_room());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(src) % 16, 0u);
    EXPECT_EQ(bytes % 16, 0u);
    ASSERT_GT(bytes, 0u);
    ASSERT_LE(bytes, kQueuePieceBytes);
    // Poison behind the piece: whoever adds more than was asked for adds NaNs.
    std::vector<Vec16> piece(kQueuePieceBytes / 16);
    std::memset(static_cast<void*>(piece.data()), 0xff, kQueuePieceBytes);
    std::memcpy(static_cast<void*>(piece.data()), src, bytes);
    pieces_.push_back(std::move(piece));
    most_waiting_ = std::max(most_waiting_, pieces_.size());
  }
  const Vec16* front() const { return pieces_.at(0).data(); }
  void pop() { pieces_.pop_front(); }
  bool is_empty() const { return pieces_.empty(); }
  size_t most_waiting() const { return most_waiting_; }

 private:
  uint32_t slots_;
  size_t most_waiting_ = 0;
  std::deque<std::vector<Vec16>> pieces_;
};

struct Case {
  uint32_t row_elems;
  uint32_t slots;
  std::vector<uint32_t> counts;  // rows of each token
};

// Sums of small whole numbers, so that every order gives the same value.
template <class Element>
void sums_are_exact(int64_t element, const Case& c, uint32_t biases) {
  using Scalar = std::conditional_t<std::is_same_v<Element, Fp32>, float, uint16_t>;
  auto from = [](int value) -> Scalar {
    if constexpr (std::is_same_v<Element, Fp32>)
      return static_cast<float>(value);
    else
      return static_cast<uint16_t>(bf16_bits(static_cast<float>(value)));
  };
  const HighThroughputShape shape{static_cast<int64_t>(c.row_elems * sizeof(Scalar)), 16, 0, 1, element};
  const size_t tokens = c.counts.size();
  std::mt19937 random(c.row_elems * 7 + c.slots);
  auto vecs = [&](size_t rows) {
    return std::vector<Vec16>(rows * static_cast<size_t>(shape.row_bytes) / 16 + 1);
  };
  auto values = [](std::vector<Vec16>& of) { return reinterpret_cast<Scalar*>(of.data()); };
  size_t rows = 0;
  for (const uint32_t count : c.counts) rows += count;
  auto staging = vecs(rows), own = vecs(tokens), combined = vecs(tokens);
  std::vector<Vec16> bias[2] = {vecs(tokens), vecs(tokens)};
  std::vector<int> want(tokens * c.row_elems, 0);

  CombineArgs a{};
  a.combined = reinterpret_cast<std::byte*>(combined.data());
  std::vector<combine::ArrivedToken> arrived;
  size_t row = 0;
  for (size_t token = 0; token < tokens; ++token) {
    const uint32_t count = c.counts[token];
    const uint32_t mine = random() % (count + 1);  // count: none of its rows is this rank's
    for (uint32_t b = 0; b < biases; ++b)
      for (uint32_t i = 0; i < c.row_elems; ++i) {
        const int value = static_cast<int>(random() % 9) - 4;
        values(bias[b])[token * c.row_elems + i] = from(value);
        want[token * c.row_elems + i] += value;
      }
    for (uint32_t r = 0; r < count; ++r)
      for (uint32_t i = 0; i < c.row_elems; ++i) {
        const int value = static_cast<int>(random() % 9) - 4;
        (r == mine ? values(own)[token * c.row_elems + i] : values(staging)[(row + r) * c.row_elems + i]) =
            from(value);
        want[token * c.row_elems + i] += value;
      }
    combine::TokenRows of{};
    of.staging = reinterpret_cast<std::byte*>(staging.data()) + row * static_cast<size_t>(shape.row_bytes);
    of.own_row = reinterpret_cast<std::byte*>(own.data()) + token * static_cast<size_t>(shape.row_bytes);
    of.count = count;
    of.mine = mine;
    arrived.push_back({token, of, true});
    row += count;
  }
  for (uint32_t b = 0; b < biases; ++b) a.bias[b] = reinterpret_cast<std::byte*>(bias[b].data());

  CheckedQueue queue(c.slots);
  size_t taken = 0;
  std::vector<uint64_t> done;
  combine::sum_streamed(
      a, Warp{}, shape, queue, [&] { return taken < tokens ? arrived[taken++] : combine::ArrivedToken{}; },
      [&](const combine::ArrivedToken& token) { done.push_back(token.token); });

  EXPECT_TRUE(queue.is_empty());
  const size_t pieces = (static_cast<size_t>(shape.row_bytes) + kQueuePieceBytes - 1) / kQueuePieceBytes;
  size_t most_rows = 0;  // of a token and the next one
  for (size_t token = 0; token < tokens; ++token)
    most_rows = std::max<size_t>(most_rows, c.counts[token] + (token + 1 < tokens ? c.counts[token + 1] : 0));
  EXPECT_EQ(queue.most_waiting(), std::min<size_t>(c.slots, most_rows * pieces));
  ASSERT_EQ(done.size(), tokens);
  for (size_t token = 0; token < tokens; ++token) {
    EXPECT_EQ(done[token], token);
    for (uint32_t i = 0; i < c.row_elems; ++i)
      ASSERT_EQ(values(combined)[token * c.row_elems + i], from(want[token * c.row_elems + i]))
          << "token " << token << ", element " << i;
  }
}

const std::vector<std::vector<uint32_t>> kCounts = {
    {}, {0}, {1}, {0, 0, 3, 0, 1, 0}, {2, 2, 2, 2}, {7, 0, 17, 1, 1, 1, 1, 1, 1}, {1, 0, 0, 0},
};

TEST(StreamedSums, OfBf16AreExact) {
  for (const uint32_t elems : {8u, 56u, 1024u, 1032u, 3576u})  // one vector; one piece less, all, more
    for (const uint32_t slots : {1u, 2u, 3u, 16u})
      for (const auto& counts : kCounts)
        for (const uint32_t biases : {0u, 1u, 2u})
          sums_are_exact<Bf16>(kElementBf16, {elems, slots, counts}, biases);
}

TEST(StreamedSums, OfFloat32AreExact) {
  for (const uint32_t elems : {4u, 512u, 516u, 1788u})
    for (const uint32_t slots : {1u, 3u})
      for (const auto& counts : kCounts)
        for (const uint32_t biases : {0u, 2u})
          sums_are_exact<Fp32>(kElementFp32, {elems, slots, counts}, biases);
}

}  // namespace
}  // namespace weft
