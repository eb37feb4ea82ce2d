// SPDX-License-Identifier: Apache-2.0
//
// What a test asks of the library that stands in for NCCL (stand_in_nccl.cc).
#pragma once

#include <cstddef>
#include <string>

struct StandInFaults {
  bool is_symmetric = true;         // false: windows are registered as null
  int lsa_ranks = 0;                // of the LSA team; 0: all
  int allocations = -1;             // that still work; -1: all
  int stays_away_at_init = -1;      // a rank that never answers
  int stays_away_at_register = -1;  // ... from its next registration but registers_before on
  int registers_before = 0;
  int gin_type = 2;                 // ncclGinType_t; 0: NCCL has no GIN
  bool says_success_early = false;  // as NCCL 2.28: the call is under way, and says that it has worked
};

extern "C" {
int weftStandsInForNccl();
void standInNcclFaults(const StandInFaults* wanted);  // forgets the calls so far, too
void standInNcclCalls(std::string* out);              // names without "nccl", with spaces between
size_t standInNcclAllocations();                      // that have not been freed
}
