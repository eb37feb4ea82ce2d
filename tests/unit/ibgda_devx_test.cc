// SPDX-License-Identifier: Apache-2.0
//
// Queues in memory of a device: the bytes of the commands that make them, which way the memory is exported to the NIC,
// and what is said where it cannot be. That they work: the channel suite over DeviceQueueFixture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "conformance/fixtures.h"
#include "transports/ibgda/mlx5_commands.h"
#include "transports/ibgda/mlx5_device_queue.h"

namespace weft {
namespace {

using ::testing::AllOf;
using testing::DeviceQueueFixture;
using testing::DevxPlan;
using testing::FakeMlx5;
using testing::FileRooms;
using ::testing::HasSubstr;
using testing::Mlx5Fixture;
using testing::run_thread_ranks;

TEST(IbgdaDevx, FieldsLieWhereTheVendorSays) {
  namespace mlx5 = ibgda::mlx5;
  mlx5::Command command(mlx5::CommandCode::kCreateQp);
  std::array<uint8_t, mlx5::kCommandBytes> expected{};
  const auto puts = [&](mlx5::Field field, uint64_t value, size_t at, std::initializer_list<int> bytes) {
    command.set(field, value);
    EXPECT_EQ(mlx5::get_field(command.bytes.data(), field), value);
    for (int byte : bytes) expected[at++] |= static_cast<uint8_t>(byte);
    EXPECT_EQ(command.bytes, expected) << "at bit " << field.at;
  };
  expected[0] = 0x05;
  namespace qp = mlx5::qp;
  puts(qp::kContext + qp::kPathState, 3, 26, {0x18});
  puts(qp::kContext + qp::kPd, 0x123456, 29, {0x12, 0x34, 0x56});
  puts(qp::kContext + qp::kLogBlocks, 10, 34, {0x50});
  puts(qp::kContext + qp::kUar, 0xabcdef, 37, {0xab, 0xcd, 0xef});
  puts(qp::kContext + qp::kSendCq, 0x010203, 149, {1, 2, 3});
  puts(qp::kContext + qp::kRecordAt, 0x1122334455667788, 184,
       {0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88});
  puts(qp::kContext + qp::kReceives, 3, 196, {3});
  puts(qp::kContext + qp::kRecordIsUmem, 1, 232, {0x10});
  puts(qp::kContext + qp::kRecordUmem, 0x99aabbcc, 252, {0x99, 0xaa, 0xbb, 0xcc});
  puts(qp::kUmem, 0x01020304, 264, {1, 2, 3, 4});
  puts(qp::kIsUmem, 1, 268, {0x80});
  puts(qp::kPath + qp::kPathMacHigh, 0x0c42, 86, {0x0c, 0x42});
  puts(qp::kPath + qp::kPathMacLow, 0xa1b2c3d4, 88, {0xa1, 0xb2, 0xc3, 0xd4});
  command.set(qp::kContext + qp::kPathState, 0);  // others of the word stay
  EXPECT_EQ(command.bytes[26], 0);
  EXPECT_EQ(command.bytes[29], 0x12);
}

// What a refused way leaves; `rooms` as the device makes them.
class IbgdaDeviceQueues : public ::testing::Test {
 protected:
  void use(int64_t error = 0, const std::string& no_peers = "") {
    DeviceQueueFixture::set_up_with([error, no_peers](Device) {
      return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>(error, no_peers));
    });
  }
  void TearDown() override { Mlx5Fixture::tear_down(); }
  static FakeMlx5& fake() { return *Mlx5Fixture::fake(); }

  // The way, and why not a better one, that a NIC says when it is opened with such rooms.
  static std::pair<ibgda::RoomWay, std::string> chosen(int64_t error = 0, const std::string& no_peers = "") {
    ibgda::Opened nic;
    nic.verbs = fake().verbs();
    nic.direct = fake().mlx5();
    nic.name = "fake0";
    nic.rooms = std::make_unique<FileRooms>(error, no_peers);
    nic.pd = nic.verbs.alloc_pd(nullptr);
    const std::string why = choose_room_way(nic);
    return {nic.way, why};
  }
  // Whether two ranks reach each other.
  static void put_once() {
    run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, Device{}, 20, "ibgda");
      ASSERT_EQ(comm.status().message(), "");
      auto window = Window::create(*comm, 4096);
      ASSERT_TRUE(window.ok());
      const auto mesh = testing::mesh_of<IbgdaMesh>(**window);
      ASSERT_TRUE((*comm)->barrier().ok());
      mesh.to(static_cast<uint32_t>(1 - boot->rank())).put_value(64, 7);
      const auto* word = reinterpret_cast<const uint64_t*>(mesh.local() + 64);
      EXPECT_TRUE(wait_until(Deadline::after_s(20), [&] { return load_acquire(word) == 7; }));
      EXPECT_TRUE((*comm)->barrier().ok());
    });
  }
};

TEST_F(IbgdaDeviceQueues, EachWayIsTakenWhereTheKernelTakesIt) {
  use();
  EXPECT_EQ(chosen(), std::pair(ibgda::RoomWay::kDmabuf, std::string()));
  fake().devx().set_plan({.dmabuf = EOPNOTSUPP, .peer_memory = 0});
  auto [way, why] = chosen();
  EXPECT_EQ(way, ibgda::RoomWay::kPeerMemory);
  EXPECT_THAT(why, HasSubstr("DMA-BUF: fake0 does not take queues of file:0: Operation not supported"));
  put_once();
  EXPECT_GT(fake().devx().queues_made(), 0u);
  std::tie(way, why) = chosen(0, "no module");
  EXPECT_EQ(way, ibgda::RoomWay::kNone);
  EXPECT_THAT(why, AllOf(HasSubstr("DMA-BUF: "), HasSubstr("; peer memory: no module")));
}

TEST_F(IbgdaDeviceQueues, WhatIsRefusedLeavesQueuesInMemoryOfTheHost) {
  use(0, "no module");
  fake().devx().set_plan({.dmabuf = EOPNOTSUPP});
  put_once();
  fake().devx().set_plan({.context = EPERM});
  put_once();
  EXPECT_EQ(fake().devx().queues_made(), 0u);
}

TEST_F(IbgdaDeviceQueues, AnOldLibraryLeavesQueuesInMemoryOfTheHost) {
  use();
  ibgda::mlx5::Library old = fake().mlx5();
  old.devx = {};
  old.lacks_devx = " mlx5dv_devx_umem_reg_ex";
  ibgda::Mlx5Nics nics(fake().verbs(), old, [](Device) {
    return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>());
  });
  ibgda::set_nic_source(&nics);
  put_once();
  ibgda::set_nic_source(nullptr);
  EXPECT_EQ(fake().devx().queues_made(), 0u);
}

// Beyond the file the kernel refuses it.
TEST_F(IbgdaDeviceQueues, APlaceOutsideTheMemoryIsRefused) {
  use();
  const auto [way, why] = chosen(1 << 20, "no module");
  EXPECT_EQ(way, ibgda::RoomWay::kNone);
  EXPECT_THAT(why, HasSubstr("DMA-BUF: fake0 does not take queues of file:0: Invalid argument"));
}

TEST_F(IbgdaDeviceQueues, ARefusedQueuePairIsAnErrorWithTheNicsStatus) {
  use();
  fake().devx().set_plan({.queue_pair = EREMOTEIO});
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  EXPECT_THAT((*nic)->create_queue(16).status().message(),
              AllOf(HasSubstr("making a queue pair in device memory on fake0"), HasSubstr("status 3")));
}

// Windows go the way that queues went, or say why not.
TEST_F(IbgdaDeviceQueues, WindowsAreExportedAsQueuesAre) {
  use();
  alignas(64) static std::byte window[8192];
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  auto made = (*nic)->enroll(window, sizeof window, Device{});
  ASSERT_EQ(made.status().message(), "");
  EXPECT_EQ(made->base, reinterpret_cast<uint64_t>(&window[0]));
  EXPECT_EQ(fake().windows_exported(), 1u);
  (*nic)->release(*made);
  fake().devx().set_plan({.window = EOPNOTSUPP});
  const Status refused = (*nic)->enroll(window, sizeof window, Device{}).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(refused.message(),
            "fake0 does not take 8192 bytes of a window of file:0 by DMA-BUF: Operation not supported");
  nic->reset();
  fake().devx().set_plan({.dmabuf = EOPNOTSUPP, .peer_memory = 0});
  nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  made = (*nic)->enroll(window, sizeof window, Device{});
  ASSERT_EQ(made.status().message(), "");
  EXPECT_EQ(fake().windows_exported(), 1u);
  (*nic)->release(*made);
}

// What a NIC writes could be seen out of order there.
TEST_F(IbgdaDeviceQueues, WindowsOfADeviceWithoutOrderAreRefused) {
  DeviceQueueFixture::set_up_with([](Device) {
    return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>(0, "", "file:0 orders nothing"));
  });
  std::byte window[64];
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  EXPECT_EQ((*nic)->enroll(window, sizeof window, Device{}).status().message(), "file:0 orders nothing");
}

#if !defined(__SANITIZE_THREAD__)

// A page beside it: the NIC looks where nobody writes. Rounds end by their deadline, and name what is missing.
TEST(IbgdaDeviceQueuesWrong, AWrongPlaceInTheMemoryIsFoundByItsDeadline) {
  DeviceQueueFixture::set_up_with(
      [](Device) { return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>(4096)); });
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  auto a = (*nic)->create_queue(16), b = (*nic)->create_queue(16);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_TRUE((*a)->connect((*b)->address()).ok() && (*b)->connect((*a)->address()).ok());
  const ibgda::QueueMemory& at = (*a)->memory();
  ASSERT_TRUE((*a)->put_entry(0, {}).ok());
  store_register(at.doorbell, ibgda::doorbell_word(1, at.number));
  EXPECT_FALSE(wait_until(Deadline::after_s(0.3),
                          [&] { return ibgda::opcode_of((*a)->completion(0).last) != ibgda::kNotYet; }));
  EXPECT_THAT(Mlx5Fixture::fake()->model().failures(), HasSubstr("record"));
  a->reset();
  b->reset();
  nic->reset();
  ibgda::set_nic_source(nullptr);
  EXPECT_EQ(Mlx5Fixture::fake()->failures(), "");
  EXPECT_EQ(Mlx5Fixture::fake()->left_over(), 0u);
  Mlx5Fixture::nics().reset();
  Mlx5Fixture::fake().reset();
  testing::Settings::clear({"WEFT_IBGDA_DEPTH"});
}

// Refusals are found by the host, too, which copies completions; and a queue begins anew.
TEST_F(IbgdaDeviceQueues, TheHostSeesRefusalsAndQueuesBeginAnew) {
  use();
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_TRUE(nic.ok());
  auto a = (*nic)->create_queue(16), b = (*nic)->create_queue(16);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ((*a)->connect("nonsense").code(), Code::kInvalid);
  for (uint64_t round = 0; round < 3; ++round) {
    ASSERT_EQ((*a)->connect((*b)->address()).message(), "");
    ASSERT_EQ((*b)->connect((*a)->address()).message(), "");
    const ibgda::QueueMemory& at = (*a)->memory();
    EXPECT_TRUE((*a)->is_far());
    EXPECT_EQ((*a)->posted(), 0u);
    EXPECT_EQ(ibgda::opcode_of((*a)->completion(0).last), ibgda::kNotYet);
    fake().model().refuse_next(at.number, ibgda::Syndrome::kRemoteAccess);
    const ibgda::Entry entry = ibgda::value_entry({0, at.number, ibgda::kSignalled}, {64, 1}, 5);
    ASSERT_EQ((*a)->put_entry(0, entry).message(), "");
    EXPECT_EQ((*a)->posted(), 1u);
    store_register(at.doorbell, ibgda::doorbell_word(1, at.number));
    ibgda::Completion done{};
    EXPECT_TRUE(wait_until(Deadline::after_s(20), [&] {
      done = (*a)->completion(0);
      return ibgda::opcode_of(done.last) != ibgda::kNotYet;
    }));
    EXPECT_EQ(ibgda::opcode_of(done.last), ibgda::kRefused);
    EXPECT_EQ(done.syndrome, static_cast<uint8_t>(ibgda::Syndrome::kRemoteAccess));
    ASSERT_EQ((*a)->reset().message(), "");
    ASSERT_EQ((*b)->reset().message(), "");
  }
}

#endif

}  // namespace
}  // namespace weft
