// SPDX-License-Identifier: Apache-2.0
//
// Folders and files that the build tells the tests. In one file, so that no other test's command line names the folder
// of a checkout: checkouts share compiled objects then (ccache).
#pragma once

namespace weft::testing {

extern const char* const kSourceDir;    // the checkout
extern const char* const kDeviceDir;    // what kernels are compiled from
extern const char* const kStandInsDir;  // libraries that stand in for NCCL and NVSHMEM
extern const char* const kNcclRmaFile;  // libnccl-rma-weft.so; "" where it is part of the test program

}  // namespace weft::testing
