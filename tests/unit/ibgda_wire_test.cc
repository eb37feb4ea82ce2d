// SPDX-License-Identifier: Apache-2.0
//
// Every shape of an entry as the bytes that a NIC reads, by hand; and transports/ibgda/wire.h against the vendor's own
// structs where rdma-core's headers are installed (Debian: libibverbs-dev).
#include "transports/ibgda/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#if __has_include(<infiniband/mlx5dv.h>)
#include <arpa/inet.h>
#include <endian.h>
#include <infiniband/mlx5dv.h>
#define WEFT_HAS_VENDOR_HEADER 1
#endif

namespace weft::ibgda {
namespace {

std::string hex(const void* data, size_t bytes) {
  static const char* digits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    if (i % 16 == 0 && i > 0) out += '\n';
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  return out;
}

// Every byte of every field differs, so that none can stand in for another.
constexpr uint32_t kQueue = 0x0a1b2c, kRemoteKey = 0x31425364, kLocalKey = 0x75869708;
constexpr uint64_t kRemote = 0x0102030405060708, kLocal = 0x1112131415161718;
constexpr Heading kAt{0x5a6b7, kQueue, kSignalled};  // 16 bits of the index count
constexpr Place kDst{kRemote, big_endian(kRemoteKey)}, kSrc{kLocal, big_endian(kLocalKey)};

TEST(IbgdaWire, AWriteIsTheseBytes) {
  const Entry entry = write_entry(kAt, kDst, kSrc, 0x00fedcb0);
  EXPECT_EQ(hex(&entry, sizeof entry),
            "00a6b708"  // opmod, index, write
            "0a1b2c03"  // queue, three units
            "00000008"  // no signature, no stream channel, a completion always
            "00000000\n"
            "0102030405060708"
            "31425364"
            "00000000\n"
            "00fedcb0"
            "75869708"
            "1112131415161718\n"
            "00000000000000000000000000000000");
}

TEST(IbgdaWire, AReadIsTheseBytes) {
  const Entry entry = read_entry(kAt, kSrc, kDst, 0x00fedcb0);
  EXPECT_EQ(hex(&entry, sizeof entry),
            "00a6b710"  // read
            "0a1b2c03"
            "00000008"
            "00000000\n"
            "0102030405060708"  // where it is, at the peer
            "31425364"
            "00000000\n"
            "00fedcb0"
            "75869708"
            "1112131415161718\n"  // where it goes
            "00000000000000000000000000000000");
}

TEST(IbgdaWire, AValueIsTheseBytes) {
  const Entry entry = value_entry({0xffff, kQueue, 0}, kDst, 0xa1a2a3a4a5a6a7a8);
  EXPECT_EQ(hex(&entry, sizeof entry),
            "00ffff08"
            "0a1b2c03"
            "00000000"
            "00000000\n"
            "0102030405060708"
            "31425364"
            "00000000\n"
            "80000008"          // inline, 8 bytes
            "a8a7a6a5a4a3a2a1"  // as they are in memory
            "00000000\n"
            "00000000000000000000000000000000");
}

TEST(IbgdaWire, AnAddIsTheseBytes) {
  const Entry entry = add_entry(kAt, kDst, 0xb1b2b3b4b5b6b7b8, kSrc);
  EXPECT_EQ(hex(&entry, sizeof entry),
            "00a6b712"
            "0a1b2c04"
            "00000008"
            "00000000\n"
            "0102030405060708"
            "31425364"
            "00000000\n"
            "b1b2b3b4b5b6b7b8"  // the addend is big-endian
            "0000000000000000\n"
            "00000008"
            "75869708"
            "1112131415161718");
}

TEST(IbgdaWire, RecordAndDoorbellSayTheNextIndex) {
  const uint32_t record = record_word(0x7fffa6b8);
  EXPECT_EQ(hex(&record, sizeof record), "0000a6b8");
  const uint64_t doorbell = doorbell_word(0x7fffa6b8, kQueue);
  EXPECT_EQ(hex(&doorbell, sizeof doorbell), "00a6b8000a1b2c00");
  const uint64_t wrapped = doorbell_word(0x10000, kQueue);
  EXPECT_EQ(hex(&wrapped, sizeof wrapped), "000000000a1b2c00");
}

TEST(IbgdaWire, ACompletionIsReadFromItsLastWord) {
  alignas(4) unsigned char bytes[64] = {};
  bytes[54] = 0x81;
  bytes[55] = 0x15;
  bytes[60] = 0xa6;
  bytes[61] = 0xb7;
  bytes[63] = 13 << 4 | 1;
  Completion completion;
  std::memcpy(&completion, bytes, sizeof completion);
  EXPECT_EQ(index_of(completion.last), 0xa6b7u);
  EXPECT_EQ(opcode_of(completion.last), kRefused);
  EXPECT_EQ(completion.vendor, 0x81);
  EXPECT_EQ(completion.syndrome, static_cast<uint8_t>(Syndrome::kRetryExceeded));
}

#if defined(WEFT_HAS_VENDOR_HEADER)
static_assert(sizeof(mlx5_wqe_ctrl_seg) == kUnitBytes && sizeof(mlx5_wqe_raddr_seg) == kUnitBytes &&
              sizeof(mlx5_wqe_data_seg) == kUnitBytes && sizeof(mlx5_wqe_atomic_seg) == kUnitBytes);
static_assert(sizeof(mlx5_cqe64) == sizeof(Completion) && sizeof(mlx5_err_cqe) == sizeof(Completion));
static_assert(offsetof(mlx5_err_cqe, vendor_err_synd) == offsetof(Completion, vendor));
static_assert(offsetof(mlx5_err_cqe, syndrome) == offsetof(Completion, syndrome));
static_assert(offsetof(mlx5_err_cqe, s_wqe_opcode_qpn) == offsetof(Completion, opcode_and_queue));
static_assert(offsetof(mlx5_err_cqe, wqe_counter) == offsetof(Completion, last));
static_assert(offsetof(mlx5_err_cqe, op_own) == offsetof(Completion, last) + 3);
static_assert(offsetof(mlx5_cqe64, wqe_counter) == offsetof(Completion, last));
static_assert(MLX5_SND_DBR == kRecordOfSends);
static_assert(MLX5_SEND_WQE_BB == kBlockBytes);
static_assert(uint32_t(MLX5_INLINE_SEG) == kInline);
static_assert(MLX5_WQE_CTRL_CQ_UPDATE == kSignalled && MLX5_WQE_CTRL_FENCE == kFenced);
static_assert(MLX5_OPCODE_NOP == uint32_t(Opcode::kNop) &&
              MLX5_OPCODE_RDMA_WRITE == uint32_t(Opcode::kWrite) &&
              MLX5_OPCODE_RDMA_WRITE_IMM == uint32_t(Opcode::kWriteImmediate) &&
              MLX5_OPCODE_RDMA_READ == uint32_t(Opcode::kRead) &&
              MLX5_OPCODE_ATOMIC_CS == uint32_t(Opcode::kCompareSwap) &&
              MLX5_OPCODE_ATOMIC_FA == uint32_t(Opcode::kFetchAdd));
static_assert(MLX5_CQE_REQ == kCompleted && MLX5_CQE_REQ_ERR == kRefused && MLX5_CQE_INVALID == kNotYet);
static_assert(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR == uint8_t(Syndrome::kLocalLength) &&
              MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR == uint8_t(Syndrome::kLocalQueue) &&
              MLX5_CQE_SYNDROME_LOCAL_PROT_ERR == uint8_t(Syndrome::kLocalProtection) &&
              MLX5_CQE_SYNDROME_WR_FLUSH_ERR == uint8_t(Syndrome::kFlushed) &&
              MLX5_CQE_SYNDROME_MW_BIND_ERR == uint8_t(Syndrome::kWindowBind) &&
              MLX5_CQE_SYNDROME_BAD_RESP_ERR == uint8_t(Syndrome::kBadResponse) &&
              MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR == uint8_t(Syndrome::kLocalAccess) &&
              MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR == uint8_t(Syndrome::kRemoteInvalid) &&
              MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR == uint8_t(Syndrome::kRemoteAccess) &&
              MLX5_CQE_SYNDROME_REMOTE_OP_ERR == uint8_t(Syndrome::kRemoteOperation) &&
              MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR == uint8_t(Syndrome::kRetryExceeded) &&
              MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR == uint8_t(Syndrome::kReceiverNotReady) &&
              MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR == uint8_t(Syndrome::kAborted));

// The vendor's functions make the same bytes.
template <class Segment>
void put_unit(Entry& entry, int unit, const Segment& segment) {
  static_assert(sizeof segment == kUnitBytes);
  std::memcpy(&entry.units[unit], &segment, sizeof segment);
}

Entry vendors(uint32_t index, uint8_t opcode, uint8_t units, uint8_t flags) {
  Entry entry{};
  mlx5_wqe_ctrl_seg control{};  // the function leaves the stream channel alone
  mlx5dv_set_ctrl_seg(&control, static_cast<uint16_t>(index), opcode, 0, kQueue, flags, units, 0, 0);
  mlx5_wqe_raddr_seg remote{};
  remote.raddr = htobe64(kRemote);
  remote.rkey = htobe32(kRemoteKey);
  put_unit(entry, 0, control);
  put_unit(entry, 1, remote);
  return entry;
}

TEST(IbgdaWire, TheVendorsStructsAreTheSameBytes) {
  mlx5_wqe_data_seg data;
  mlx5dv_set_data_seg(&data, 0x00fedcb0, kLocalKey, kLocal);
  Entry theirs = vendors(kAt.index, MLX5_OPCODE_RDMA_WRITE, 3, MLX5_WQE_CTRL_CQ_UPDATE);
  put_unit(theirs, 2, data);
  const Entry write = write_entry(kAt, kDst, kSrc, 0x00fedcb0);
  EXPECT_EQ(hex(&write, sizeof write), hex(&theirs, sizeof theirs));
  theirs = vendors(kAt.index, MLX5_OPCODE_RDMA_READ, 3, MLX5_WQE_CTRL_CQ_UPDATE);
  put_unit(theirs, 2, data);
  const Entry read = read_entry(kAt, kSrc, kDst, 0x00fedcb0);
  EXPECT_EQ(hex(&read, sizeof read), hex(&theirs, sizeof theirs));

  mlx5_wqe_atomic_seg atomic{};
  atomic.swap_add = htobe64(0xb1b2b3b4b5b6b7b8);
  mlx5dv_set_data_seg(&data, 8, kLocalKey, kLocal);
  theirs = vendors(kAt.index, MLX5_OPCODE_ATOMIC_FA, 4, MLX5_WQE_CTRL_CQ_UPDATE);
  put_unit(theirs, 2, atomic);
  put_unit(theirs, 3, data);
  const Entry add = add_entry(kAt, kDst, 0xb1b2b3b4b5b6b7b8, kSrc);
  EXPECT_EQ(hex(&add, sizeof add), hex(&theirs, sizeof theirs));

  mlx5_wqe_inl_data_seg inlined{};
  inlined.byte_count = htobe32(8u | MLX5_INLINE_SEG);
  theirs = vendors(0xffff, MLX5_OPCODE_RDMA_WRITE, 3, 0);
  std::memcpy(&theirs.units[2], &inlined, sizeof inlined);
  const uint64_t value = 0xa1a2a3a4a5a6a7a8;
  std::memcpy(reinterpret_cast<char*>(&theirs.units[2]) + sizeof inlined, &value, sizeof value);
  const Entry mine = value_entry({0xffff, kQueue, 0}, kDst, value);
  EXPECT_EQ(hex(&mine, sizeof mine), hex(&theirs, sizeof theirs));
}
#else
TEST(IbgdaWire, TheVendorsStructsAreTheSameBytes) {
  GTEST_SKIP() << "infiniband/mlx5dv.h is not installed (Debian: libibverbs-dev)";
}
#endif

}  // namespace
}  // namespace weft::ibgda
