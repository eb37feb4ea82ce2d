// SPDX-License-Identifier: Apache-2.0
//
// record_kernel(key, "sm_90a") adds a line to the file of the option record_kernels, if it names one: a JSON
// object with the members of KernelKey and "target". `weft warm --recorded` reads it. Threads, processes: any.
#pragma once

#include <string>

#include "jit/jit.h"

namespace weft {

// A file that cannot be written costs one warning.
void record_kernel(const KernelKey& key, const std::string& target);

}  // namespace weft
