// SPDX-License-Identifier: Apache-2.0
//
// mlx5 NICs through libibverbs and libmlx5, opened at run time. Not run on hardware: its tests run against a fake of
// the libraries. Queues lie in memory of the host, where libmlx5 puts them, and are pinned for GPUs.
// Doorbells: the NIC's register, mapped for the GPU; where its driver does not map it, a thread of the host rings.
//   NicSource& source = mlx5_nics();
//   Mlx5Nics source(fake_verbs_library(), fake_mlx5_library());
#pragma once

#include "providers/verbs/verbs.h"
#include "transports/ibgda/mlx5_abi.h"
#include "transports/ibgda/nic.h"

namespace weft::ibgda {

class Mlx5Nics : public NicSource {
 public:
  Mlx5Nics(Result<provider::ib::Library> verbs, Result<mlx5::Library> direct)
      : verbs_(std::move(verbs)), direct_(std::move(direct)) {}
  // The first usable one, or the first of WEFT_PROXY_NICS that is. Says of each device why it is of no use.
  NicFinding find(Device device) override;
  Result<std::unique_ptr<Nic>> open(Device device) override;

 private:
  const Result<provider::ib::Library> verbs_;
  const Result<mlx5::Library> direct_;
};

NicSource& mlx5_nics();

}  // namespace weft::ibgda
