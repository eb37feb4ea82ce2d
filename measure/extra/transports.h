// SPDX-License-Identifier: Apache-2.0
//
// The transport of this house, for the list of the library (transports/list.h).
#pragma once

#include "measure/jitter/channel.cuh"

#define WEFT_EXTRA_TRANSPORTS(WEFT_TRANSPORT) WEFT_TRANSPORT(jitter, JitterMesh<weft::ProxyMesh>)
#define WEFT_EXTRA_FOLDER "measure/"
