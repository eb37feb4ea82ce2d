// SPDX-License-Identifier: Apache-2.0
//
// Where RDMA devices sit, read from a folder like sysfs.
#include "topology/rdma_devices.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "transports/proxy/network.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// A machine of two processors: a switch with a GPU and a NIC, and a NIC beside it; one NIC at the other processor; one in
// software over an interface.
class Machine : public ::testing::Test {
 protected:
  Machine() {
    add("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0", 0);  // a GPU
    add("pci0000:10/0000:10:01.0/0000:11:00.0/0000:13:00.0", 0);
    add("pci0000:10/0000:10:02.0/0000:14:00.0", 0);
    add("pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    fs::create_directories(root_ / "devices/pci0000:80/0000:80:01.0/0000:82:00.0/virtio1");
    write("devices/pci0000:80/0000:80:01.0/0000:82:00.0/numa_node", "1");
    add_nic("mlx5_0", "devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:13:00.0", "400 Gb/sec (4X NDR)");
    write("class/infiniband/rxe0/ports/1/rate", "2.5 Gb/sec (1X SDR)");
    write("class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0", "net0");
    fs::create_directories(root_ / "class/net/net0");
    fs::create_symlink(root_ / "devices/pci0000:80/0000:80:01.0/0000:82:00.0/virtio1",
                       root_ / "class/net/net0/device");
  }
  ~Machine() override { fs::remove_all(root_); }

  void add(const std::string& path, int node) {
    write("devices/" + path + "/numa_node", std::to_string(node));
    fs::create_directories(root_ / "bus/pci/devices");
    fs::create_symlink(root_ / "devices" / path, root_ / "bus/pci/devices" / fs::path(path).filename());
  }
  void add_nic(const std::string& name, const std::string& device, const std::string& rate) {
    write("class/infiniband/" + name + "/ports/1/rate", rate);
    fs::create_symlink(root_ / device, root_ / "class/infiniband" / name / "device");
  }
  void write(const std::string& path, const std::string& line) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << line << "\n";
  }
  Nearness near(const DevicePlace& a, const DevicePlace& b) { return nearness(a, b, root_.string()); }

  const fs::path root_ = fs::path(::testing::TempDir()) / ("sysfs-" + std::to_string(getpid()));
};

TEST_F(Machine, ADeviceHasAnAddressANodeAndASpeed) {
  const RdmaDevice nic = rdma_device("mlx5_0", 1, root_.string());
  EXPECT_EQ(nic.place.pci, "0000:13:00.0");
  EXPECT_EQ(nic.place.numa_node, 0);
  EXPECT_EQ(nic.gbit_per_s, 400);
}

TEST_F(Machine, ADeviceInSoftwareSitsWhereItsInterfaceDoes) {
  const RdmaDevice nic = rdma_device("rxe0", 1, root_.string());
  EXPECT_EQ(nic.place.pci, "0000:82:00.0");
  EXPECT_EQ(nic.place.numa_node, 1);
  EXPECT_EQ(nic.gbit_per_s, 2.5);
}

TEST_F(Machine, ADeviceHasADriverAndOneInSoftwareHasNot) {
  EXPECT_EQ(kernel_driver("mlx5_0", root_.string()), "");
  fs::create_symlink("../../bus/pci/drivers/mlx5_core",
                     root_ / "devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:13:00.0/driver");
  fs::create_symlink("../../bus/pci/drivers/virtio-pci",
                     root_ / "devices/pci0000:80/0000:80:01.0/0000:82:00.0/driver");
  EXPECT_EQ(kernel_driver("mlx5_0", root_.string()), "mlx5_core");
  EXPECT_EQ(kernel_driver("rxe0", root_.string()), "") << "its interface's driver is another thing";
  EXPECT_EQ(kernel_driver("mlx5_9", root_.string()), "");
}

TEST_F(Machine, ADeviceThatIsNotThereIsNowhere) {
  const RdmaDevice nic = rdma_device("mlx5_9", 1, root_.string());
  EXPECT_EQ(nic.place.pci, "");
  EXPECT_EQ(nic.place.numa_node, -1);
  EXPECT_EQ(nic.gbit_per_s, 0);
}

TEST_F(Machine, ASwitchIsNearerThanAProcessor) {
  const DevicePlace gpu{"0000:12:00.0", 0};
  EXPECT_EQ(near(gpu, {"0000:13:00.0", 0}), Nearness::kSameSwitch);
  EXPECT_EQ(near(gpu, {"0000:14:00.0", 0}), Nearness::kSameNode);
  EXPECT_EQ(near(gpu, {"0000:81:00.0", 1}), Nearness::kFar);
  EXPECT_EQ(near(gpu, {"", -1}), Nearness::kFar);
  EXPECT_EQ(near({"0000:13:00.0", -1}, {"0000:81:00.0", -1}), Nearness::kFar);
}

provider::Nic nic_at(const char* name, const char* pci, int node, double gbit_per_s) {
  provider::Nic nic;
  nic.name = name;
  nic.pci = pci;
  nic.numa_node = node;
  nic.gbit_per_s = gbit_per_s;
  return nic;
}

TEST_F(Machine, RanksTakeTheNearestNicsByTurns) {
  const std::string sysfs = root_.string();
  const std::vector<provider::Nic> all = {nic_at("far", "0000:81:00.0", 1, 400),
                                          nic_at("node", "0000:14:00.0", 0, 400),
                                          nic_at("switch", "0000:13:00.0", 0, 200)};
  const auto chosen = [&](const proxy::RankPlace& rank_place) {
    return proxy::nearest_nic(all, rank_place, sysfs).name;
  };
  EXPECT_EQ(chosen({{"0000:12:00.0", 0}, 0}), "switch");
  EXPECT_EQ(chosen({{"0000:12:00.0", 0}, 1}), "switch");
  EXPECT_EQ(chosen({{"0000:81:00.0", 1}, 0}), "far") << "a GPU that is a NIC is its rank's own";
  EXPECT_EQ(chosen({{"0000:14:00.0", 0}, 1}), "node");
  EXPECT_EQ(chosen({{"", 1}, 0}), "far");
  EXPECT_EQ(chosen({{"", 0}, 0}), "node") << "of the near ones, the faster";
  EXPECT_EQ(chosen({{"", -1}, 0}), "far");
  EXPECT_EQ(chosen({{"", -1}, 1}), "node") << "ranks whose place is unknown spread over the fast ones";
  EXPECT_EQ(chosen({{"", -1}, 2}), "far");
  const std::vector<provider::Nic> nowhere = {nic_at("eth0", "", -1, 0), nic_at("docker0", "", -1, 0)};
  EXPECT_EQ(proxy::nearest_nic(nowhere, {{"", 0}, 1}, sysfs).name, "eth0");
}

TEST(ProxyNics, ASemicolonBeginsThoseOfTheHostsNextRank) {
  const std::vector<provider::Nic> all = (*provider::find_provider("loopback"))->probe();
  ASSERT_GE(all.size(), 3u);
  const std::string lists = all[0].name + ";" + all[1].name + "," + all[2].name;
  const auto chosen = [&](uint32_t index) {
    std::vector<std::string> names;
    for (const provider::Nic& nic : proxy::choose_network("loopback", lists, {{}, index})->nics)
      names.push_back(nic.name);
    return names;
  };
  EXPECT_NE(proxy::choose_network("loopback", "", {{}, 0})->if_unreached.find("WEFT_PROXY_NICS"),
            std::string::npos);
  EXPECT_EQ(proxy::choose_network("loopback", lists, {{}, 0})->if_unreached, "");
  EXPECT_EQ(chosen(0), std::vector<std::string>{all[0].name});
  EXPECT_EQ(chosen(1), (std::vector<std::string>{all[1].name, all[2].name}));
  EXPECT_EQ(chosen(2), chosen(0));
  EXPECT_FALSE(proxy::choose_network("loopback", "nobody", {}).ok());
}

}  // namespace
}  // namespace weft
