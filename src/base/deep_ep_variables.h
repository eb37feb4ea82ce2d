// SPDX-License-Identifier: Apache-2.0
//
// Says how the drop-in deep_ep treats the variables of DeepEP's NCCL back end.
//   for (const ForeignVariable& variable : deep_ep_variables()) log_info("{}", variable.text);
// Threads: none may change the environment meanwhile.
#pragma once

#include <vector>

#include "base/config.h"

namespace weft {

// One for each of DEEP_EP_BACKEND, EP_DISABLE_GIN and NCCL_GIN_TYPE that is set, in that order. Nothing is changed.
std::vector<ForeignVariable> deep_ep_variables();

}  // namespace weft
