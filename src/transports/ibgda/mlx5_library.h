// SPDX-License-Identifier: Apache-2.0
//
// libmlx5, opened at run time and kept open. kUnsupported with the loader's words where there is none.
// Threads: any.
#pragma once

#include <string>

#include "base/status.h"
#include "providers/verbs/verbs.h"
#include "transports/ibgda/mlx5_abi.h"

namespace weft::ibgda::mlx5 {

// Commands that libmlx5 hands on to the NIC (DevX). All null where the library or a test lacks one.
struct Devx {
  decltype(&mlx5dv_open_device) open_device = nullptr;
  decltype(&mlx5dv_devx_umem_reg_ex) umem_reg = nullptr;
  decltype(&mlx5dv_devx_umem_dereg) umem_dereg = nullptr;
  decltype(&mlx5dv_devx_alloc_uar) alloc_uar = nullptr;
  decltype(&mlx5dv_devx_free_uar) free_uar = nullptr;
  decltype(&mlx5dv_devx_query_eqn) query_eqn = nullptr;
  decltype(&mlx5dv_devx_obj_create) obj_create = nullptr;
  decltype(&mlx5dv_devx_obj_modify) obj_modify = nullptr;
  decltype(&mlx5dv_devx_obj_destroy) obj_destroy = nullptr;
};

// The entry points in use; a test puts its own functions here.
struct Library {
  decltype(&mlx5dv_is_supported) is_supported = nullptr;
  decltype(&mlx5dv_create_cq) create_cq = nullptr;
  decltype(&mlx5dv_init_obj) init_obj = nullptr;
  Devx devx{};
  std::string lacks_devx{};  // which of those
};
Result<Library> open_library();

}  // namespace weft::ibgda::mlx5
