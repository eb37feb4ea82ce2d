// SPDX-License-Identifier: Apache-2.0
#include "transfer/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "transfer/plan.h"

namespace weft::transfer {
namespace {

using ::testing::HasSubstr;

Address some_address() {
  return {random_id(),    "decode-1",          "fabric:tcp",
          random_nonce(), this_process_name(), {"rail zero", "rail one"}};
}

TEST(Wire, AddressSurvivesTheTrip) {
  const Address address = some_address();
  const auto again = parse_address(to_bytes(address));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->engine, address.engine);
  EXPECT_EQ(again->name, "decode-1");
  EXPECT_EQ(again->rails, address.rails);
  EXPECT_EQ(again->process.pid, address.process.pid);
  EXPECT_STREQ(again->process.machine, address.process.machine);
}

TEST(Wire, WordsAreCutAndComeBack) {
  EXPECT_EQ(*parse_text(text_body("why")), "why");
  EXPECT_EQ(parse_text(text_body(std::string(9000, 'x')))->size(), kTextBytesMax);
  EXPECT_FALSE(parse_text(text_body("why") + "x").ok());
  EXPECT_FALSE(parse_text("").ok());
}

TEST(Wire, EveryTruncationIsRefused) {
  const std::string bytes[] = {to_bytes(some_address()),
                               to_bytes(Descriptor{random_id(), 7, {1, 2}, 4096, 3})};
  for (size_t length = 0; length < bytes[0].size(); ++length)
    EXPECT_FALSE(parse_address(std::string_view(bytes[0]).substr(0, length)).ok()) << length;
  for (size_t length = 0; length < bytes[1].size(); ++length)
    EXPECT_FALSE(parse_descriptor(std::string_view(bytes[1]).substr(0, length)).ok()) << length;
  EXPECT_FALSE(parse_address(bytes[0] + "x").ok());
  EXPECT_FALSE(parse_descriptor(bytes[1] + "x").ok());
}

TEST(Wire, OtherVersionsAreNamed) {
  std::string bytes = to_bytes(Descriptor{});
  bytes[4] = 9;
  EXPECT_THAT(parse_descriptor(bytes).status().message(),
              HasSubstr(text("wire version 9, allowed: {} ", kWireVersion)));
  std::string message = to_bytes(MessageHead{MessageType::kBye, random_id(), 1, 0, 0}, "");
  message[4] = 9;
  EXPECT_EQ(parse_head(message).status().code(), Code::kUnsupported);
}

TEST(Wire, HeadMustAgreeWithItsBody) {
  const MessageHead head{MessageType::kEager, random_id(), 3, 4, 0};
  const std::string message = to_bytes(head, "hello");
  const auto again = parse_head(message);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->life, 3u);
  EXPECT_EQ(again->sequence, 4u);
  EXPECT_EQ(message.substr(kHeadBytes), "hello");
  EXPECT_FALSE(parse_head(message + "x").ok());
  EXPECT_FALSE(parse_head(message.substr(0, message.size() - 1)).ok());
}

TEST(Wire, ASealIsOfEveryByteAndOfOneWayInOneLife) {
  const EngineId a = random_id(), b = random_id();
  const Nonce salt = random_nonce();
  const SenderKeys keys = sender_keys("the secret of a job", a, b, salt);
  std::string message = to_bytes({MessageType::kEager, a, 3, 4, 0}, "hello");
  EXPECT_FALSE(is_sealed(message, keys.mac));
  seal(message, keys.mac);
  EXPECT_TRUE(parse_head(message).ok());
  EXPECT_TRUE(is_sealed(message, keys.mac));
  for (size_t i = 0; i < message.size(); ++i) {
    message[i] ^= 1;
    EXPECT_FALSE(is_sealed(message, keys.mac)) << i;
    message[i] ^= 1;
  }
  for (const SenderKeys& others :
       {sender_keys("the secret of a job", b, a, salt), sender_keys("another secret", a, b, salt),
        sender_keys("the secret of a job", a, b, random_nonce())}) {
    EXPECT_FALSE(is_sealed(message, others.mac));
    EXPECT_NE(others.token, keys.token);
  }
}

TEST(Wire, PackMayNotReachBeyondItsSlot) {
  PackHead head;
  head.request_id = 5;
  head.packs = 1;
  head.turn = 1;
  head.pieces = {{1, 0, 100}, {1, 200, 50}};
  std::string slot(pack_bytes(2, 150), '\0');
  write_pack_head(slot.data(), head);
  ASSERT_TRUE(parse_pack(slot).ok());
  EXPECT_EQ(parse_pack(slot)->pieces[1].offset, 200u);
  EXPECT_FALSE(parse_pack(std::string_view(slot).substr(0, slot.size() - 1)).ok());
  head.pieces[1].bytes = UINT64_MAX;
  write_pack_head(slot.data(), head);
  EXPECT_FALSE(parse_pack(slot).ok());
}

TEST(Wire, RandomBytesNeverPass) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_FALSE(parse_address(bytes).ok());
    EXPECT_FALSE(parse_descriptor(bytes).ok());
    EXPECT_FALSE(parse_head(bytes).ok());
    EXPECT_FALSE(parse_pack(bytes).ok());
    (void)parse_hello(bytes);
    (void)parse_attached(bytes);
    (void)parse_stage_grant(bytes);
  }
}

TEST(Wire, CountersOfBarriersAndImmediatesDiffer) {
  EXPECT_NE(counter_key(ImmClass::kBarrier, 7), counter_key(ImmClass::kCount, 7));
  EXPECT_EQ(key_class(counter_key(ImmClass::kBarrier, kImmIdMax)), ImmClass::kBarrier);
  EXPECT_EQ(imm_id(counter_key(ImmClass::kBarrier, kImmIdMax)), kImmIdMax);
  EXPECT_TRUE(parse_notify(to_body(Notified{kCounterKeyMax, 1})).ok());
  EXPECT_FALSE(parse_notify(to_body(Notified{kCounterKeyMax + 1, 1})).ok());
}

TEST(Wire, ImmediateKeepsItsParts) {
  for (uint32_t sender : {0u, 1u, kPeersMax - 1})
    for (uint32_t id : {0u, 77u, kImmIdMax}) {
      const uint32_t imm = encode_imm(ImmClass::kStage, sender, id);
      EXPECT_EQ(imm_class(imm), ImmClass::kStage);
      EXPECT_EQ(imm_sender(imm), sender);
      EXPECT_EQ(imm_id(imm), id);
      EXPECT_EQ(static_cast<uint32_t>(with_token(imm, 0xfedcba98)), imm);
      EXPECT_EQ(imm_token(with_token(imm, 0xfedcba98)), 0xfedcba98);
    }
}

TEST(Plan, ShardsCoverEveryByteOnce) {
  for (uint32_t rails : {1u, 2u, 3u, 4u, 7u})
    for (uint64_t bytes : {0ull, 1ull, 8191ull, 8192ull, 8193ull, 100000ull, 1000003ull})
      for (uint64_t piece : {1000ull, 65536ull, ~0ull}) {
        const auto shards = shard_range(bytes, {rails, 8192, piece}, 1);
        std::set<std::pair<uint64_t, uint64_t>> ranges;
        uint64_t total = 0;
        for (const Shard& shard : shards) {
          EXPECT_LT(shard.rail, rails);
          EXPECT_LE(shard.bytes, piece);
          ranges.insert({shard.offset, shard.bytes});
          total += shard.bytes;
        }
        EXPECT_EQ(total, bytes);
        uint64_t next = 0;
        for (auto [offset, length] : ranges) {
          EXPECT_EQ(offset, next);
          next = offset + length;
        }
        EXPECT_EQ(expected_imms(bytes, {rails, 8192, piece}), shards.size());
      }
}

TEST(Plan, MemoryIsReachedAsTheWorstNicAllows) {
  using provider::MemoryKind;
  provider::Nic exports, peers, blind;
  exports.caps.device_memory = exports.caps.dmabuf = true;
  peers.caps.device_memory = true;
  blind.provider = "fabric:tcp";
  blind.name = "lo";
  EXPECT_EQ(choose_memory_path(MemoryKind::kHost, {blind}).path, MemoryPath::kHost);
  EXPECT_EQ(choose_memory_path(MemoryKind::kCuda, {exports, exports}).path, MemoryPath::kDmabuf);
  EXPECT_EQ(choose_memory_path(MemoryKind::kCuda, {exports, peers}).path, MemoryPath::kPeerMemory);
  const MemoryChoice staged = choose_memory_path(MemoryKind::kCuda, {exports, blind});
  EXPECT_EQ(staged.path, MemoryPath::kStaged);
  EXPECT_EQ(staged.reason, "fabric:tcp on lo does not reach device memory");
}

TEST(Plan, PagesMergeOnlyWhereBothSidesTouch) {
  const auto merged = pair_pages({0, 100, {3, 4, 5, 9}, 0}, {50, 100, {0, 1, 7, 8}, 0}, 100, true);
  ASSERT_TRUE(merged.ok());
  ASSERT_EQ(merged->size(), 3u);
  EXPECT_EQ((*merged)[0].src, 300u);
  EXPECT_EQ((*merged)[0].dst, 50u);
  EXPECT_EQ((*merged)[0].bytes, 200u);
  EXPECT_EQ(pair_pages({0, 100, {}, 4}, {0, 100, {}, 4}, 100, false)->size(), 4u);
  EXPECT_EQ(pair_pages({0, 100, {}, 4}, {0, 100, {}, 4}, 100, true)->size(), 1u);
  EXPECT_FALSE(pair_pages({0, 100, {1}, 0}, {0, 100, {1, 2}, 0}, 100, true).ok());
  EXPECT_FALSE(pair_pages({0, ~0ull, {3}, 0}, {0, 100, {1}, 0}, 100, true).ok());
}

}  // namespace
}  // namespace weft::transfer
