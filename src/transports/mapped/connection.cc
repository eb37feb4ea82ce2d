// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped/connection.h"

#include "transports/mapped_peers.h"

namespace weft {
namespace {

class MappedLink : public Link {
 public:
  MappedLink(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  Result<MeshPart> mesh(const WindowView& window) override {
    const MappedMesh mesh = mapped_mesh(window, rank_, ranks_);
    return mesh_part("MappedMesh", mesh);
  }

 private:
  const int rank_, ranks_;
};

class MappedTransport : public Transport {
 public:
  const char* name() const override { return "mapped"; }
  const char* carried_by() const override { return "shared memory on the host; peer memory of GPUs"; }
  Caps caps(Device device) const override { return mapped_caps(device); }
  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    return why_not_mapped(self, peer);
  }
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    return std::unique_ptr<Link>(new MappedLink(group.rank, static_cast<int>(group.facts->size())));
  }
};

}  // namespace

MappedMesh mapped_mesh(const WindowView& window, int rank, int ranks) {
  return MappedMesh::of(window.bases, window.table, static_cast<uint32_t>(rank),
                        static_cast<uint32_t>(ranks));
}

const Transport& mapped_transport() {
  static const MappedTransport transport;
  return transport;
}

}  // namespace weft
