// SPDX-License-Identifier: Apache-2.0
//
// NVSHMEM's device code, as kernels with ports are linked with it: the archive libnvshmem_device.a, and a unit of Weft's that
// gives its calls names without NVSHMEM's headers (calls.cuh). The unit is compiled with the headers once for each release and
// architecture; a kernel is compiled without them, and linked in some 50 ms.
//   WEFT_TRY_ASSIGN(const DeviceLibrary where, find_device_library("/.../nvshmem/lib/libnvshmem_host.so.3", "3.8.0"));
//   WEFT_TRY_ASSIGN(auto sources, device_sources(where));   // for MeshPart::sources
// Threads: any.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "transports/transport.h"

namespace weft::nvshmem_link {

struct DeviceLibrary {
  std::string include;  // the folder
  std::string archive;  // the file
  std::string version;  // "3.8.0"
};

// That of the release `version`: in WEFT_NVSHMEM_HOME if that is set, else beside the host library. Errors: kUnsupported,
// naming the folders where there is none, both versions where it is of another release, or the least one.
Result<DeviceLibrary> find_device_library(const std::string& library_path, const std::string& version);

// The sources and the archive that kernels are compiled and linked with. One object for each archive. Errors:
// kUnsupported where there is no linker; kSystem where the archive cannot be read.
Result<std::shared_ptr<const DeviceSources>> device_sources(const DeviceLibrary& library);

}  // namespace weft::nvshmem_link
