// SPDX-License-Identifier: Apache-2.0
//
// Picks the target that device code is compiled for. The three headers have the same content and are the only
// places with PTX, GCN built-ins or std::atomic_ref:
//   groups        Warp, Block: rank(), size(), sync(); a host warp is one thread; Cluster of blocks
//   memory        scoped loads, stores, fences, atomics; Vec16; copies
//   RowPipe       bulk asynchronous copies through shared memory (TMA on Hopper, plain copies elsewhere)
//   RowQueue      rows into shared memory, where kHasRowQueue; RowWriter: out of it. By bulk asynchronous copies on GPUs
//   time          now_ns(), pause()
#pragma once

#if defined(WEFT_TARGET_HEADER)  // a target of tests
#include WEFT_TARGET_HEADER
#elif defined(__CUDACC_RTC__) || defined(__CUDACC__)
#include "kernels/target/cuda.h"
#elif defined(__HIP__)
#include "kernels/target/hip.h"
#else
#include "kernels/target/host.h"
#endif
