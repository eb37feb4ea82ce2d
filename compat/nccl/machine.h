// SPDX-License-Identifier: Apache-2.0
//
// Finds on this machine, without Python, what a communicator needs: the program book, and the compiler for
// kernels.
#pragma once

#include "base/device.h"
#include "collective/program_book.h"

namespace weft::nccl {

// The book for `ranks` on `device`: WEFT_PROGRAM_BOOK; else what `weft tune` wrote for this machine; else the
// one beside this library. A bad one is named in a warning and the next is taken. Errors: kUnsupported when
// none is left, with every reason.
Result<ProgramBook> find_book(Device device, uint32_t ranks);

// Sets the toolchain from the Python packages around, once per process.
void find_toolchain();

}  // namespace weft::nccl
