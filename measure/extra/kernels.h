// SPDX-License-Identifier: Apache-2.0
//
// The kernels of this house, for the list of the library (jit/kernel_list.h).
#pragma once

#include "measure/kernels/channel_loop.cuh"
#include "measure/kernels/exchange_floor.cuh"
#include "measure/kernels/fifo_load.cuh"

// clang-format off: one row a line
#define WEFT_EXTRA_KERNELS(WEFT_ROW) \
  WEFT_ROW(kAny, "measure/kernels/channel_loop.cuh", channel_loop_run, ChannelLoopArgs, ChannelLoopShape, 32, "") \
  WEFT_ROW(kMapped, "measure/kernels/exchange_floor.cuh", exchange_floor_run, ExchangeFloorArgs, ExchangeFloorShape, 512, "way=0; way=1; way=2") \
  WEFT_ROW(kPorts, "measure/kernels/fifo_load.cuh", fifo_load_run, FifoLoadArgs, FifoLoadShape, 128, "")
// clang-format on
