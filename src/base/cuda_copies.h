// SPDX-License-Identifier: Apache-2.0
//
// The CUDA context in which this library copies.
//   WEFT_TRY_ASSIGN(CudaContext context, enter_copy_context(device));
// Threads: any.
#pragma once

#include "base/cuda_driver.h"

namespace weft {

// From now on copies of this library run in a CUDA context of their own on each GPU, which takes some hundred MB there. For
// copies that a kernel waits for: a thread of the user that waits for that kernel inside the driver, as Tensor.cpu() does,
// holds the lock of the primary context, and a copy there would wait for it. Before the first copy.
void copy_in_own_context();
bool copies_in_own_context();

// Makes the context for copies on that GPU current: the primary one, or the library's own.
Result<CudaContext> enter_copy_context(int device);

}  // namespace weft
