/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for the real NCCL: answers that say what it was given.
 */
#include <stdint.h>

typedef struct {
  int nRanks, rank, stride;
} ncclTeam_t;
typedef struct {
  uint64_t magic;
  int rank;
} Comm;

ncclTeam_t ncclTeamLsa(const Comm* comm) { return (ncclTeam_t){6, comm->rank, 3}; }

int ncclTeamRankToWorld(const Comm* comm, ncclTeam_t team, int rank) {
  return team.nRanks + comm->rank + team.stride + rank;
}

int ncclLsaBarrierCreateRequirement(ncclTeam_t team, int barriers, void* handle, ncclTeam_t* out) {
  (void)handle;
  *out = (ncclTeam_t){team.nRanks, barriers, team.stride};
  return 0;
}

/* What is collective waits for the group's end, and is told there what it is: how many calls the group had. */
static int depth, waiting;
static int* told[8];

static int wait_for_end(int* out) {
  if (depth == 0) return 5;
  told[waiting++] = out;
  return 0;
}
int ncclDevCommCreate(Comm* comm, const void* requirements, int* out) {
  (void)comm, (void)requirements;
  return wait_for_end(out);
}
int ncclCommWindowRegister(Comm* comm, void* buffer, uint64_t bytes, void** window, int flags) {
  (void)comm, (void)buffer, (void)bytes, (void)flags;
  return wait_for_end((int*)window);
}
int ncclGroupStart(void) { return ++depth, 0; }
int ncclGroupEnd(void) {
  if (--depth) return 3;
  for (int i = 0; i < waiting; ++i) *told[i] = waiting;
  waiting = 0;
  return 0;
}

int ncclParamGetI32(void* handle, int32_t* out) {
  (void)handle;
  *out = 17;
  return 0;
}
