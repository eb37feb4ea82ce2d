// SPDX-License-Identifier: Apache-2.0
//
// Rows that a build adds to the list of transports (transports/list.h): none in this one. See settings.h.
#pragma once

#define WEFT_EXTRA_TRANSPORTS(WEFT_TRANSPORT)
#define WEFT_EXTRA_FOLDER ""  // that their folders lie in
