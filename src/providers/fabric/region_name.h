// SPDX-License-Identifier: Apache-2.0
//
// Names for the regions of shared memory that libfabric's shm provider makes, one for each endpoint.
//   getinfo(version, fresh_region_name().c_str(), nullptr, kSource, hints, &found);
// Left alone libfabric names a region by its process number. What a killed process leaves behind then stops
// the next process with that number from opening an endpoint (-FI_EBUSY), which containers, whose numbers
// start low, meet at every restart.
//
// Threads: any.
#pragma once

#include <string>

namespace weft::provider {

// A name that no other endpoint has or had: "weft-<host>-<process number>-<random>".
std::string fresh_region_name();

// Removes the regions of processes of this host (and of this PID namespace) that are gone. What cannot be
// removed stays.
void remove_regions_of_the_dead();

}  // namespace weft::provider
