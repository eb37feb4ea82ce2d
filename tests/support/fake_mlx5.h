// SPDX-License-Identifier: Apache-2.0
//
// libibverbs and libmlx5 without hardware: devices of the fake of libibverbs (tests/conformance/fake_verbs.h) whose queue
// pairs, completion queues and keys are those of a model of a NIC. They check what the libraries and the kernel check:
// states, attributes, flags, sequence numbers of both ends.
//   FakeMlx5 fake({.seed = 3});
//   ibgda::Mlx5Nics nics(fake.verbs(), fake.mlx5());
// Threads: any. One at a time: its functions find it by themselves.
#pragma once

#include "support/fake_devx.h"
#include "support/nic_model.h"
#include "transports/ibgda/mlx5_library.h"

namespace weft::testing {

class FakeMlx5 {
 public:
  explicit FakeMlx5(NicPlan plan);
  ~FakeMlx5();

  provider::ib::Library verbs() const;
  ibgda::mlx5::Library mlx5() const;
  NicModel& model() { return model_; }
  // What was asked for and is wrong, besides the model's failures.
  std::string failures() const;
  // Queue pairs, completion queues and registrations that were not given back.
  size_t left_over() const;
  size_t windows_exported() const;  // registered by DMA-BUF so far

  FakeDevx& devx() { return devx_; }

  void refuse_overrun_flag() { takes_overrun_flag_ = false; }  // as older kernels do
  void be_of_another_family() { is_mlx5_ = false; }

 private:
  friend struct FakeMlx5Calls;
  NicModel model_;
  FakeDevx devx_;
  bool takes_overrun_flag_ = true, is_mlx5_ = true;
};

}  // namespace weft::testing
