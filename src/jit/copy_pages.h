// SPDX-License-Identifier: Apache-2.0
//
// Copies a list of ranges between memories that kernels of one GPU reach.
//   WEFT_TRY(prepare_copy_pages(device));                               // compiles and loads; once
//   WEFT_TRY(copy_pages(device, stream, list, count, longest_bytes));   // enqueues
// Threads: any. Streams: `list` is read when the stream comes to the kernel.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace weft {

struct PageCopy;  // kernels/core/copy_pages.cuh

Status prepare_copy_pages(int device);
Status copy_pages(int device, void* stream, const PageCopy* list, uint32_t count, uint64_t longest_bytes);

}  // namespace weft
