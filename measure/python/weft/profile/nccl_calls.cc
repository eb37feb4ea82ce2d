// SPDX-License-Identifier: Apache-2.0
//
// Host time of calls of libnccl: the calling thread's processor time without that in kernels, on CPU ranks that are
// processes. Prints the median of rank 0 for each call, in microseconds, as a table. nccl.py compiles and runs it:
//   nccl_calls RANKS ELEMENTS CALLS
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "nccl.h"

namespace {

constexpr int kWarmUp = 20;

int ranks = 2, calls = 2000;
size_t elems = 256;

double thread_us() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

void ok(ncclResult_t result) {
  if (result == ncclSuccess) return;
  std::fprintf(stderr, "%s: %s\n", ncclGetErrorString(result), ncclGetLastError(nullptr));
  std::exit(1);
}

double median_us(const std::function<void()>& call) {
  for (int i = 0; i < kWarmUp; ++i) call();
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    const uint64_t kernel_ns = weftNcclKernelNs();
    const double began_us = thread_us();
    call();
    const double took_us = thread_us() - began_us;
    times.push_back(took_us - static_cast<double>(weftNcclKernelNs() - kernel_ns) * 1e-3);
  }
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[calls / 2];
}

struct Call {
  std::string name;
  std::function<void()> run;
};

std::vector<Call> calls_of(ncclComm_t comm, int rank, float* src, float* dst) {
  const auto messages = [=](int each) {
    ok(ncclGroupStart());
    for (int i = 0; i < each; ++i)
      for (int peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        ok(ncclSend(src + static_cast<size_t>(peer) * elems, elems, ncclFloat, peer, comm, nullptr));
        ok(ncclRecv(dst + static_cast<size_t>(peer) * elems, elems, ncclFloat, peer, comm, nullptr));
      }
    ok(ncclGroupEnd());
  };
  const auto group = [=](const std::function<void()>& body) {
    ok(ncclGroupStart());
    body();
    ok(ncclGroupEnd());
  };
  const auto reduce = [=] { ok(ncclAllReduce(src, dst, elems, ncclFloat, ncclSum, comm, nullptr)); };
  return {
      {"nothing: the measuring itself", [] {}},
      {"AllReduce", reduce},
      {"AllReduce in place", [=] { ok(ncclAllReduce(dst, dst, elems, ncclFloat, ncclSum, comm, nullptr)); }},
      {"AllGather", [=] { ok(ncclAllGather(src, dst, elems, ncclFloat, comm, nullptr)); }},
      {"ReduceScatter", [=] { ok(ncclReduceScatter(src, dst, elems, ncclFloat, ncclSum, comm, nullptr)); }},
      {"AlltoAll", [=] { ok(ncclAlltoAll(src, dst, elems, ncclFloat, comm, nullptr)); }},
      {"Broadcast", [=] { ok(ncclBroadcast(src, dst, elems, ncclFloat, 0, comm, nullptr)); }},
      {"Reduce", [=] { ok(ncclReduce(src, dst, elems, ncclFloat, ncclSum, 0, comm, nullptr)); }},
      {"group of 4 AllReduce",
       [=] {
         group([&] {
           for (int i = 0; i < 4; ++i) reduce();
         });
       }},
      {"group of a Send and a Recv per peer", [=] { messages(1); }},
      {"group of 4 Send and 4 Recv per peer", [=] { messages(4); }},
  };
}

int run_rank(int rank, const ncclUniqueId& id) {
  ncclComm_t comm = nullptr;
  ok(ncclCommInitRank(&comm, ranks, id, rank));
  std::vector<float> src(elems * static_cast<size_t>(ranks), 1), dst(src);
  for (const Call& call : calls_of(comm, rank, src.data(), dst.data())) {
    const double us = median_us(call.run);
    if (rank == 0) std::printf("| %s | %.2f |\n", call.name.c_str(), us);
    std::fill(dst.begin(), dst.end(), 1.0f);  // sums in place grow
  }
  ok(ncclCommDestroy(comm));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) ranks = std::atoi(argv[1]);
  if (argc > 2) elems = static_cast<size_t>(std::atoll(argv[2]));
  if (argc > 3) calls = std::atoi(argv[3]);
  std::printf("%d ranks, float32[%zu], median of %d calls, host time without kernels in us\n", ranks, elems,
              calls);
  std::fflush(stdout);
  std::vector<int> ends;
  for (int rank = 1; rank < ranks; ++rank) {
    int ways[2];
    if (pipe(ways) != 0) return 1;
    if (fork() == 0) {
      ncclUniqueId id;
      if (read(ways[0], &id, sizeof id) != sizeof id) return 1;
      return run_rank(rank, id);
    }
    ends.push_back(ways[1]);
  }
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  for (int end : ends)
    if (write(end, &id, sizeof id) != sizeof id) return 1;
  int result = run_rank(0, id), status = 0;
  while (wait(&status) > 0) result |= WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  return result;
}
