// SPDX-License-Identifier: Apache-2.0
//
// One process of tests/gpu/nccl_rma_gin.py: ranks as threads, a GPU each, that put, get and signal through NCCL's GIN.
//   nccl_rma_gin RANKS FIRST COUNT ID_FILE OPERATIONS      ranks FIRST to FIRST + COUNT - 1 of RANKS
// Every line of the output begins with "rank N:". "ok" and "FAILED" end what was checked; "refused" says what NCCL does
// not give. A line for each step comes before the step, so a hang is seen where it is; after 45 s the process ends by
// itself with status 3. Status: 0 all is well, 1 something was wrong, 2 NCCL refuses GIN.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kSlot = 1 << 20;  // a rank's place in another's window
constexpr int kContexts = 2, kSignals = 8;
std::atomic<int> worst{0};

void say(int rank, const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  printf("rank %d: %s\n", rank, line);
  fflush(stdout);
}

bool check(int rank, const char* what, bool is_ok) {
  say(rank, "%s: %s", what, is_ok ? "ok" : "FAILED");
  if (!is_ok) worst = 1;
  return is_ok;
}

#define CUDA(call)                                                                    \
  do {                                                                                \
    cudaError_t e = (call);                                                           \
    if (e != cudaSuccess) {                                                           \
      check(rank, (std::string(#call ": ") + cudaGetErrorString(e)).c_str(), false); \
      return;                                                                         \
    }                                                                                 \
  } while (0)
#define NCCL(call)                                                                                             \
  do {                                                                                                         \
    say(rank, "%s", #call);                                                                                    \
    ncclResult_t e = (call);                                                                                   \
    if (e != ncclSuccess) {                                                                                    \
      check(rank, (std::string(#call ": ") + ncclGetErrorString(e) + "; " + ncclGetLastError(nullptr)).c_str(), \
            false);                                                                                            \
      return;                                                                                                  \
    }                                                                                                          \
  } while (0)

__device__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Waits 8 s at most; false afterwards.
__device__ bool wait_for(ncclGin const& gin, unsigned signal, uint64_t least) {
  const uint64_t until = now_ns() + 8000000000ull;
  while (gin.readSignal(signal) < least)
    if (now_ns() > until) return false;
  return true;
}

// Slot r of the first half of a window goes to slot (own rank) of the second half of rank r's, itself included.
__global__ void exchange(ncclDevComm comm, ncclWindow_t window, size_t bytes, int context, unsigned signal,
                         uint64_t least, int* result) {
  ncclGin gin(comm, context);
  const size_t half = size_t(comm.nRanks) * kSlot;
  for (int r = 0; r < comm.nRanks; ++r)
    gin.put(ncclTeamWorld(comm), r, window, half + comm.rank * kSlot, window, r * kSlot, bytes,
            ncclGin_StrongSignalInc{signal});
  *result = wait_for(gin, signal, least) ? 1 : 0;
  gin.flush(ncclCoopThread());
}

__global__ void values(ncclDevComm comm, ncclWindow_t window, unsigned signal, uint64_t least, int* result) {
  ncclGin gin(comm, 1);
  const size_t half = size_t(comm.nRanks) * kSlot;
  for (int r = 0; r < comm.nRanks; ++r)
    gin.putValue(ncclTeamWorld(comm), r, window, half + comm.rank * kSlot + 8, uint64_t(0xABCD0000) + comm.rank,
                 ncclGin_WeakSignalAdd{signal, 10});
  *result = wait_for(gin, signal, least) ? 1 : 0;
}

__global__ void fetch(ncclDevComm comm, ncclWindow_t window, int* result) {
  ncclGin gin(comm, 0);
  const size_t half = size_t(comm.nRanks) * kSlot;
  for (int r = 0; r < comm.nRanks; ++r)
    gin.get(ncclTeamWorld(comm), r, window, comm.rank * kSlot, window, half + r * kSlot, 5000);
  gin.flush(ncclCoopThread());
  *result = 1;
}

// `count` puts of odd sizes from each thread to the next rank, a signal of 1 behind each; thread t uses context t % 2.
__global__ void many(ncclDevComm comm, ncclWindow_t window, int count, unsigned signal, uint64_t base0, uint64_t base1,
                     int* result) {
  const int context = threadIdx.x % kContexts;
  ncclGin gin(comm, context);
  const size_t half = size_t(comm.nRanks) * kSlot;
  const int next = (comm.rank + 1) % comm.nRanks;
  for (int i = 0; i < count; ++i) {
    const size_t bytes = 1 + (threadIdx.x * 977 + i * 131) % 2000, at = threadIdx.x * 2048;
    gin.put(ncclTeamWorld(comm), next, window, half + comm.rank * kSlot + at, window, next * kSlot + at, bytes,
            ncclGin_WeakSignalAdd{signal, 1});
  }
  __syncthreads();
  if (threadIdx.x >= kContexts) return;
  const uint64_t least = (context == 0 ? base0 : base1) + uint64_t(count) * blockDim.x / kContexts;
  result[context] = wait_for(gin, signal, least) && gin.readSignal(signal) == least;
}

// Ranks 0 and 1: a put of 16 bytes and its signal, there and back.
__global__ void ping_pong(ncclDevComm comm, ncclWindow_t window, int rounds, unsigned signal, uint64_t base,
                          uint64_t* ns, int* result) {
  ncclGin gin(comm, 0);
  *result = 1;
  if (comm.rank > 1) return;
  const size_t half = size_t(comm.nRanks) * kSlot;
  const int peer = 1 - comm.rank;
  const uint64_t begin = now_ns();
  for (int i = 1; i <= rounds && *result; ++i) {
    if (comm.rank == 1 && !wait_for(gin, signal, base + i)) *result = 0;
    gin.put(ncclTeamWorld(comm), peer, window, half + comm.rank * kSlot, window, peer * kSlot, 16,
            ncclGin_WeakSignalInc{signal});
    if (comm.rank == 0 && !wait_for(gin, signal, base + i)) *result = 0;
  }
  *ns = now_ns() - begin;
}

unsigned char byte_of(int from, int to, size_t at) { return static_cast<unsigned char>(from * 16 + to + at * 3); }

void run(int ranks, int rank, ncclUniqueId id, int operations) {
  int devices = 0, version = 0;
  CUDA(cudaGetDeviceCount(&devices));
  CUDA(cudaSetDevice(rank % devices));
  NCCL(ncclGetVersion(&version));
  say(rank, "NCCL %d at run time, headers of %d, %d GPUs", version, NCCL_VERSION_CODE, devices);
  for (auto [what, attribute] : {std::pair("GPUDirect RDMA with CUDA VMM (110)", 110),
                                 std::pair("GPUDirect RDMA (116)", 116), std::pair("DMA-BUF (124)", 124)}) {
    using Ask = int (*)(int*, int, int);
    const auto ask = reinterpret_cast<Ask>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuDeviceGetAttribute"));
    int value = -1;
    if (ask) ask(&value, attribute, rank % devices);
    say(rank, "condition %s: %s", what, value == 1 ? "holds" : "FAILS");
  }
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, id, rank));
  ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL(ncclCommQueryProperties(comm, &props));
  say(rank, "device API %d, GIN type %d (2 is PROXY), railed GIN type %d, %d LSA teams, host RMA %d",
      props.deviceApiSupport, props.ginType, props.railedGinType, props.nLsaTeams, props.hostRmaSupport);
  if (!props.deviceApiSupport || props.ginType != NCCL_GIN_TYPE_PROXY) {
    say(rank, "refused: GIN of type PROXY is not there");
    if (worst == 0) worst = 2;
    ncclCommDestroy(comm);
    return;
  }
  const size_t half = size_t(ranks) * kSlot;
  char* memory = nullptr;
  NCCL(ncclMemAlloc(reinterpret_cast<void**>(&memory), 2 * half));
  ncclWindow_t window = nullptr;
  NCCL(ncclCommWindowRegister(comm, memory, 2 * half, &window, NCCL_WIN_COLL_SYMMETRIC));
  if (!check(rank, "a window", window != nullptr)) return;
  ncclDevComm device;
  ncclDevCommRequirements_t wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  wanted.ginContextCount = kContexts;
  wanted.ginSignalCount = kSignals;
  wanted.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  NCCL(ncclDevCommCreate(comm, &wanted, &device));

  std::vector<unsigned char> sent(2 * half, 0xEE), got(2 * half);
  for (int to = 0; to < ranks; ++to)
    for (size_t at = 0; at < kSlot; ++at) sent[to * kSlot + at] = byte_of(rank, to, at);
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int* result = nullptr;
  uint64_t* ns = nullptr;
  CUDA(cudaMallocHost(&result, sizeof(int) * kContexts));
  CUDA(cudaMallocHost(&ns, sizeof *ns));
  int* flag = nullptr;  // a barrier, out of NCCL's own all-reduce
  CUDA(cudaMalloc(&flag, sizeof(int)));
  auto barrier = [&] {
    ncclAllReduce(flag, flag, 1, ncclInt, ncclSum, comm, stream);
    return cudaStreamSynchronize(stream) == cudaSuccess;
  };
  auto arrived = [&](size_t bytes, auto expected) {
    cudaMemcpy(got.data(), memory, 2 * half, cudaMemcpyDeviceToHost);
    for (int from = 0; from < ranks; ++from)
      for (size_t at = 0; at < kSlot; ++at) {
        const unsigned char want = at < bytes ? expected(from, at) : 0xEE;
        if (got[half + from * kSlot + at] == want) continue;
        say(rank, "slot of rank %d, byte %zu: got %d, expected %d", from, at, got[half + from * kSlot + at], want);
        return false;
      }
    return true;
  };
  auto clear = [&] {
    cudaMemcpy(memory, sent.data(), 2 * half, cudaMemcpyHostToDevice);
    return barrier();
  };
  uint64_t signals[kContexts][kSignals] = {};
  auto mine = [&](int from, size_t at) { return byte_of(from, rank, at); };
  for (size_t bytes : {size_t(1), size_t(17), size_t(4096), size_t(65537), kSlot}) {
    for (int context = 0; context < kContexts; ++context) {
      CUDA(clear() ? cudaSuccess : cudaErrorUnknown);
      exchange<<<1, 1, 0, stream>>>(device, window, bytes, context, 3, signals[context][3] += ranks, result);
      CUDA(cudaStreamSynchronize(stream));
      const std::string what = "put of " + std::to_string(bytes) + " B to all, context " + std::to_string(context);
      if (!check(rank, what.c_str(), *result && arrived(bytes, mine))) return;
    }
  }
  CUDA(clear() ? cudaSuccess : cudaErrorUnknown);
  values<<<1, 1, 0, stream>>>(device, window, 4, 10 * ranks, result);
  CUDA(cudaStreamSynchronize(stream));
  const bool has_values = arrived(16, [&](int from, size_t at) -> unsigned char {
    const uint64_t value = 0xABCD0000 + from;
    return at < 8 ? 0xEE : reinterpret_cast<const unsigned char*>(&value)[at - 8];
  });
  check(rank, "putValue and SignalAdd", *result && has_values);
  CUDA(clear() ? cudaSuccess : cudaErrorUnknown);
  fetch<<<1, 1, 0, stream>>>(device, window, result);
  CUDA(cudaStreamSynchronize(stream));
  check(rank, "get of 5000 B from all", arrived(5000, mine));
  CUDA(clear() ? cudaSuccess : cudaErrorUnknown);
  const int threads = 32, count = operations / threads;
  result[0] = result[1] = 0;
  many<<<1, threads, 0, stream>>>(device, window, count, 5, 0, 0, result);
  CUDA(cudaStreamSynchronize(stream));
  check(rank, (std::to_string(count * threads) + " puts with signals, none lost or doubled").c_str(),
        result[0] && result[1]);
  CUDA(barrier() ? cudaSuccess : cudaErrorUnknown);
  for (int rounds : {20, 500}) {
    CUDA(barrier() ? cudaSuccess : cudaErrorUnknown);
    ping_pong<<<1, 1, 0, stream>>>(device, window, rounds, 6, signals[0][6], ns, result);
    CUDA(cudaStreamSynchronize(stream));
    signals[0][6] += rounds;
    check(rank, "ping-pong of 16 B", *result);
    if (rank == 0) say(rank, "put of 16 B with a signal, there and back: %.1f us (%d rounds)", *ns / 1e3 / rounds, rounds);
  }
  CUDA(barrier() ? cudaSuccess : cudaErrorUnknown);
  NCCL(ncclDevCommDestroy(comm, &device));
  NCCL(ncclCommWindowDeregister(comm, window));
  NCCL(ncclMemFree(memory));
  NCCL(ncclCommDestroy(comm));
  say(rank, "done");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return fprintf(stderr, "usage: %s RANKS FIRST COUNT ID_FILE OPERATIONS\n", argv[0]), 4;
  const int ranks = atoi(argv[1]), first = atoi(argv[2]), count = atoi(argv[3]), operations = atoi(argv[5]);
  std::thread([] {
    sleep(45);
    printf("rank ?: 45 s have passed: the last line of each rank says where it hangs\n");
    fflush(stdout);
    _exit(3);
  }).detach();
  ncclUniqueId id;
  if (first == 0) {
    const int rank = 0;
    if (ncclGetUniqueId(&id) != ncclSuccess) return say(rank, "refused: ncclGetUniqueId: %s", ncclGetLastError(nullptr)), 1;
    const std::string part = std::string(argv[4]) + ".part";
    FILE* file = fopen(part.c_str(), "wb");
    if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) || rename(part.c_str(), argv[4])) return 1;
  } else {
    FILE* file = nullptr;
    for (int i = 0; i < 400 && !(file = fopen(argv[4], "rb")); ++i) usleep(50000);
    if (!file || fread(&id, sizeof id, 1, file) != 1) return 1;
    fclose(file);
  }
  std::vector<std::thread> threads;
  for (int rank = first; rank < first + count; ++rank) threads.emplace_back(run, ranks, rank, id, operations);
  for (std::thread& thread : threads) thread.join();
  fflush(stdout);
  _exit(worst);
}
