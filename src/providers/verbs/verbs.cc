// SPDX-License-Identifier: Apache-2.0
//
// Which NICs there are, and why some are of no use.
#include "providers/verbs/verbs.h"

#include <cerrno>
#include <cstring>

#include "base/cuda_driver.h"
#include "providers/verbs/connect.h"
#include "providers/verbs/library.h"
#include "providers/verbs/rail.h"
#include "topology/rdma_devices.h"

namespace weft::provider {
namespace {

class Verbs : public Provider {
 public:
  explicit Verbs(Result<ib::Library> library) : library_(std::move(library)) {}
  std::string name() const override { return "verbs"; }

  std::vector<Nic> probe() override {
    if (!library_.ok()) return {unusable("-", library_.status().message())};
    std::vector<Nic> nics;
    each_device([&](ibv_device*, const Nic& nic, const ib::PortChoice&) { nics.push_back(nic); });
    if (nics.empty()) nics.push_back(unusable("-", "libibverbs finds no RDMA device"));
    return nics;
  }

  Result<std::unique_ptr<Rail>> open(const Nic& nic, const RailOptions& options) override {
    WEFT_TRY(Status(library_.status()));
    Result<std::unique_ptr<Rail>> opened =
        Status::invalid("nic: got {}, which verbs does not have", nic.name);
    each_device([&](ibv_device* device, const Nic& found, const ib::PortChoice& port) {
      if (found.name != nic.name || opened.ok()) return;
      auto rail = std::make_unique<VerbsRail>(*library_, found, options.secret);
      Status status =
          found.usable() ? rail->open(device, port) : Status(Code::kUnsupported, found.unusable_because);
      if (status.ok())
        opened = std::unique_ptr<Rail>(std::move(rail));
      else
        opened = status;
    });
    return opened;
  }

 private:
  static Nic unusable(const std::string& name, const std::string& why) {
    Nic nic;
    nic.provider = "verbs";
    nic.name = name;
    nic.unusable_because = why;
    return nic;
  }

  // Calls visit(device, nic, port) while the device list is held.
  template <class Visit>
  void each_device(Visit visit) {
    int count = 0;
    ibv_device** devices = library_->get_device_list(&count);
    for (int i = 0; devices && i < count; ++i) {
      const std::string name = library_->get_device_name(devices[i]);
      ibv_context* context = library_->open_device(devices[i]);
      if (!context) {
        visit(devices[i], unusable(name, "cannot be opened: " + std::string(std::strerror(errno))), {});
        continue;
      }
      const ib::PortChoice port = ib::choose_port(*library_, context, name);
      library_->close_device(context);
      visit(devices[i], look_at(name, port), port);
    }
    if (devices) library_->free_device_list(devices);
  }

  Nic look_at(const std::string& name, const ib::PortChoice& port) {
    if (!port.unusable_because.empty()) return unusable(name, port.unusable_because);
    Nic nic;
    nic.provider = "verbs";
    nic.name = name;
    const RdmaDevice device = rdma_device(name, port.port);
    nic.pci = device.place.pci;
    nic.numa_node = device.place.numa_node;
    nic.gbit_per_s = device.gbit_per_s;
    nic.caps.ordered_writes = false;   // relaxed ordering is on
    nic.caps.source = Source::kRoute;  // each peer has a queue pair of its own
    nic.caps.device_memory = cuda_driver().ok();
    nic.caps.dmabuf = library_->reg_dmabuf_mr != nullptr;
    nic.caps.write_bytes_max = port.attr.max_msg_sz ? port.attr.max_msg_sz : 1u << 30;
    nic.caps.message_bytes_max = kMessageBytes;
    nic.caps.tx_depth = kSendDepth;
    nic.caps.cq_depth = 8192;
    return nic;
  }

  Result<ib::Library> library_;
};

}  // namespace

std::shared_ptr<Provider> make_verbs() {
  return std::make_shared<Verbs>(ib::open_library());
}
std::shared_ptr<Provider> make_verbs(const ib::Library& library) {
  return std::make_shared<Verbs>(library);
}

}  // namespace weft::provider
