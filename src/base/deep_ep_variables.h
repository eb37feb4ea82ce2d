// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the variables of DeepEP's NCCL back end under the drop-in deep_ep.
//   for (const ForeignVariable& variable : deep_ep_variables()) log_info("{}", variable.text);
// Threads: none may change the environment meanwhile.
#pragma once

#include <vector>

#include "base/config.h"

namespace weft {

// One for each of DEEP_EP_BACKEND, EP_DISABLE_GIN and NCCL_GIN_TYPE that is set, in that order. Nothing is changed.
std::vector<ForeignVariable> deep_ep_variables();

}  // namespace weft
