// SPDX-License-Identifier: Apache-2.0
#include "support/places.h"

namespace weft::testing {

const char* const kSourceDir = WEFT_SOURCE_DIR;
const char* const kDeviceDir = WEFT_DEVICE_DIR;
const char* const kStandInsDir = WEFT_STAND_INS;
const char* const kNcclRmaFile = WEFT_NCCL_RMA;

}  // namespace weft::testing
