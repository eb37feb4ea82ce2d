// SPDX-License-Identifier: Apache-2.0
//
// Every setting of Weft, once: name, type, default, help. config.cc alone reads the environment.
//   config().timeout_s                      // read once, at first use, then constant
//   for (const OptionRow& row : config_table()) ...   // what `weft info --config` prints
// The environment variable of an option is WEFT_ and its name in capitals: WEFT_TIMEOUT_S. Seconds (_s) and
// bytes (_bytes) may have a unit: 500ms, 1GiB. A value that does not parse, and a WEFT_ variable that is no
// option, is an error: config_status() returns it, Python raises it at first use, and no communicator or
// engine is made.
// Threads: config() is initialised once and immutable; config_reload() is for tests, with no other thread
// running.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "extra/settings.h"

namespace weft {

// What an option takes. Without one: whole numbers of 0 or more, numbers above 0, any text.
struct Rule {
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
  std::vector<std::string_view> words;  // a text is one of these; empty: any
  bool is_shared = false;               // ranks of one communicator must have the same value

  Rule on_all_ranks() const {
    Rule rule = *this;
    rule.is_shared = true;
    return rule;
  }
};
inline Rule any() {
  return {};
}
inline Rule between(int64_t least, int64_t most) {
  Rule rule;
  rule.least = least;
  rule.most = most;
  return rule;
}
inline Rule at_least(int64_t least) {
  return between(least, std::numeric_limits<int64_t>::max());
}
inline Rule one_of(auto... words) {
  Rule rule;
  rule.words = {words...};
  return rule;
}

// WEFT_OPTION(name, type, default, help[, rule]). Types: int64_t, double, std::string. A build may add rows:
// WEFT_EXTRA_OPTIONS.
// clang-format off: one option a line, so that additions don't touch others
#define WEFT_OPTIONS(WEFT_OPTION) \
  WEFT_OPTION(timeout_s, double, 100.0, "give up on a silent peer after this many seconds") \
  WEFT_OPTION(log, std::string, "warn", "least severe message to log: error, warn, info or debug", one_of("error", "warn", "info", "debug")) \
  WEFT_OPTION(metrics_port, int64_t, 0, "port where a process serves its counters to Prometheus, or the first free one of the 63 after it; 0: none", between(0, 65535)) \
  WEFT_OPTION(metrics_host, std::string, "127.0.0.1", "address at which counters are served: 0.0.0.0 for every network") \
  WEFT_OPTION(call_record, std::string, "", "what a lost peer or the end of a process writes its last calls to: PREFIX and the rank, for torchfrtrace") \
  WEFT_OPTION(nvtx, int64_t, 0, "1: calls are NVTX ranges, for Nsight Systems", between(0, 1)) \
  WEFT_OPTION(cache_dir, std::string, "~/.cache/weft", "compiled kernels; safe to delete") \
  WEFT_OPTION(cache_path, std::string, "", "more folders with compiled kernels, read only, with colons between") \
  WEFT_OPTION(compile, std::string, "auto", "auto: kernels that are in no cache are compiled; never: they are an error", one_of("auto", "never")) \
  WEFT_OPTION(record_kernels, std::string, "", "file to which every process adds the kernels that it used, for weft warm --recorded") \
  WEFT_OPTION(transport, std::string, "auto", "transports to choose from for each peer, with commas between, or auto") \
  WEFT_OPTION(ranks_per_node, int64_t, 0, "pretend that nodes have this many ranks; 0 asks the machine", any().on_all_ranks()) \
  WEFT_OPTION(cuda_sharing, std::string, "auto", "how GPUs share memory: auto, vmm or ipc", one_of("auto", "vmm", "ipc").on_all_ranks()) \
  WEFT_OPTION(port_windows, std::string, "auto", "where GPU ranks with port peers keep windows. device: GPU memory, which every network must reach; host: pinned memory; auto: device if every network reaches it, else only what ports write in memory of the host", one_of("auto", "device", "host").on_all_ranks()) \
  WEFT_OPTION(low_latency_line_tokens, int64_t, -1, "low-latency calls of at most this many tokens a rank send lines without fences, over NVLink or on the CPU; 0: none; -1: as many as are faster so", at_least(-1)) \
  WEFT_OPTION(low_latency_constants, std::string, "never", "which arguments low-latency kernels are compiled for. never: none; sizes: those that all calls of a buffer with such rows have; calls: also those that the number of tokens decides", one_of("never", "sizes", "calls")) \
  WEFT_OPTION(low_latency_bulk, std::string, "auto", "how rows go where P2PAllToAll bounds its SMs. auto: by bulk copies where GPUs have few SMs for many tokens; always: wherever it can be, on the CPU too; never: by loads and stores", one_of("auto", "never", "always").on_all_ranks()) \
  WEFT_OPTION(low_latency_fanout, std::string, "auto", "how low-latency calls reach other nodes. direct: a token goes to each rank, and each rank replies; node: it goes once to each node, and one sum comes back; auto: the way that the planner predicts to be shorter", one_of("auto", "direct", "node").on_all_ranks()) \
  WEFT_OPTION(deep_ep_branch, std::string, "main", "branch of DeepEP whose order of positions the constructor of the drop-in's Buffer has", one_of("main", "antgroup-opt", "mori-ep", "rocm", "hybrid-ep")) \
  WEFT_OPTION(window_reserve_bytes, int64_t, 0, "addresses to set aside per window and rank; 0 takes 256 GiB", any().on_all_ranks()) \
  WEFT_OPTION(window_bytes, int64_t, 0, "least bytes of a buffer's window; 0 takes what the buffer asks for", any().on_all_ranks()) \
  WEFT_OPTION(host_threads, int64_t, 0, "threads a host kernel runs on per rank; 0 lets the planner choose") \
  WEFT_OPTION(trace_spans, int64_t, 0, "room for spans of in-kernel traces per buffer; 0 compiles kernels without", any().on_all_ranks()) \
  WEFT_OPTION(nvrtc, std::string, "", "path of libnvrtc; empty looks in Python packages, then the system") \
  WEFT_OPTION(nvjitlink, std::string, "", "path of libnvJitLink, which links kernels with NVSHMEM's device code; empty looks beside libnvrtc, then the system") \
  WEFT_OPTION(cuda_include, std::string, "", "CUDA headers for kernels; empty looks beside libnvrtc") \
  WEFT_OPTION(check, int64_t, 0, "1: before a collective moves anything, ranks compare what they call, and refuse a call that differs; slow", between(0, 1)) \
  WEFT_OPTION(process_reads, int64_t, 1, "1: ranks on the CPU, and ranks of one process, use each other's memory where the system allows it", between(0, 1)) \
  WEFT_OPTION(huge_pages, int64_t, 1, "1: ask for huge pages under windows of CPU ranks, and large CPU buffers that collectives use again or combine writes", between(0, 1)) \
  WEFT_OPTION(algorithm_dir, std::string, "", "collective algorithms to load (XML or JSON): folders and files, with colons between; empty takes MSCCL_ALGO_DIR, MSCCL_XML_FILES or MSCCL_CONFIG") \
  WEFT_OPTION(nccl_library, std::string, "", "path of the NCCL that the transport nccl uses and compat/nccl forwards to, or none; empty takes the one that is loaded, else looks in Python packages, then the system") \
  WEFT_OPTION(nccl_include, std::string, "", "folder with nccl.h and nccl_device of that NCCL, for kernels that reach ports through its GIN; empty looks beside the library") \
  WEFT_OPTION(nccl_contexts, int64_t, 4, "contexts of NCCL's GIN that the transport nccl asks for; peers are dealt over them", between(1, 64).on_all_ranks()) \
  WEFT_OPTION(nccl_records, int64_t, 1024, "signals to a peer through NCCL's GIN that the peer may not have taken in yet; a power of two", between(4, 65536).on_all_ranks()) \
  WEFT_OPTION(nccl_forward, std::string, "", "NCCL functions that the real library is to serve, as ncclAllReduce,ncclSend, or all", any().on_all_ranks()) \
  WEFT_OPTION(nccl_device, std::string, "auto", "what communicators of compat/nccl work on: auto (the current CUDA device, if any) or cpu", one_of("auto", "cpu").on_all_ranks()) \
  WEFT_OPTION(nccl_interface, std::string, "", "network interface where ranks of compat/nccl meet; empty takes the first that is up") \
  WEFT_OPTION(nccl_report, int64_t, 0, "1 logs at exit which NCCL calls Weft served and which the real library", between(0, 1)) \
  WEFT_OPTION(program_book, std::string, "", "file of compiled collectives for compat/nccl; empty takes what weft tune wrote, then the built-in one") \
  WEFT_OPTION(job_secret, std::string, "", "secret of a job: processes prove that they know it; 16 characters or more, the same in all; never sent or shown. auto: one that the launcher gives, or that ranks agree on in torch's store") \
  WEFT_OPTION(interface, std::string, "", "network interface where ranks of several nodes hear of each other; empty takes the first that is up") \
  WEFT_OPTION(heartbeat_s, double, 1.0, "seconds without a message after which a peer gets a sign of life") \
  WEFT_OPTION(peer_dead_s, double, 10.0, "seconds without a sign of life after which a peer is lost") \
  WEFT_OPTION(proxy_provider, std::string, "auto", "network of the proxy transport: fabric:tcp, fabric:shm, verbs, ...; auto takes hardware before software") \
  WEFT_OPTION(proxy_nics, std::string, "", "NICs of the proxy transport, with commas between; a semicolon begins those of the host's next rank; empty takes one near the GPU, and ranks take turns") \
  WEFT_OPTION(proxies, int64_t, 0, "proxy threads per rank with port peers; 0 takes up to 4, no more than spare cores", between(0, 64)) \
  WEFT_OPTION(proxy_fifo, int64_t, 2048, "commands that fit the queue of a proxy thread; a power of two", between(2, 1 << 20)) \
  WEFT_OPTION(proxy_copies, std::string, "own", "CUDA context of the copies that the provider cuda makes for kernels: own, or that of the program (primary), whose threads may hold its lock while they wait", one_of("own", "primary")) \
  WEFT_OPTION(proxy_idle_s, double, 5.0, "a proxy thread without work looks only every 2 ms after so many seconds") \
  WEFT_OPTION(proxy_bytes_in_flight, int64_t, 0, "bytes that the proxy transport has under way at most; 0: by NIC family") \
  WEFT_OPTION(proxy_writes_in_flight, int64_t, 0, "writes that the proxy transport has under way at most; 0: by NIC family") \
  WEFT_OPTION(ibgda_queues, int64_t, 1, "queues of the ibgda transport to each peer", between(1, 64).on_all_ranks()) \
  WEFT_OPTION(ibgda_depth, int64_t, 1024, "entries of each such queue; a power of two", between(4, 1 << 15)) \
  WEFT_OPTION(libfabric, std::string, "", "path of libfabric; empty takes the system's, or a package's where that is older than 2.0") \
  WEFT_OPTION(nvshmem_home, std::string, "", "folder with include and lib/libnvshmem_device.a of that NVSHMEM, for kernels that reach ports by its device calls; empty looks beside the library") \
  WEFT_OPTION(nvshmem_library, std::string, "", "path of the libnvshmem_host that the transport nvshmem uses; empty takes the one that is loaded, else looks in Python packages, then the system") \
  WEFT_OPTION(libibverbs, std::string, "", "path of libibverbs; empty lets the system's loader look") \
  WEFT_OPTION(ib_port, int64_t, 0, "port that verbs uses; 0 takes the first that is active", between(0, 255)) \
  WEFT_OPTION(gid_index, int64_t, -1, "GID that verbs uses; -1 prefers RoCE v2 and IPv4", between(-1, 255)) \
  WEFT_OPTION(pkey, int64_t, 0, "P_Key of verbs, such as 0x8001: the partition of InfiniBand whose members reach each other; 0 takes the first of the port", between(0, 0xffff)) \
  WEFT_OPTION(service_level, int64_t, -1, "service level of verbs; -1 takes 3 on RoCE, 0 on InfiniBand", between(-1, 15)) \
  WEFT_OPTION(traffic_class, int64_t, -1, "traffic class of verbs on RoCE; -1 takes 104", between(-1, 255)) \
  WEFT_OPTION(rc_timeout, int64_t, 14, "verbs asks again after 4.096 us times 2 to the power of this", between(1, 31)) \
  WEFT_OPTION(rc_retry, int64_t, 7, "how often verbs asks again before a connection is broken", between(0, 7)) \
  WEFT_OPTION(rnr_timer, int64_t, 12, "pause of verbs for receivers that are behind, as a code of InfiniBand; 12 is 0.64 ms", between(0, 31)) \
  WEFT_OPTION(tls, int64_t, 0, "1: what ranks say over TCP to meet, and pages over TCP, is encrypted by the job's secret (TLS 1.3); takes OpenSSL 3", between(0, 1).on_all_ranks())

// clang-format on

struct Config {
#define WEFT_OPTION(name, type, initial, help, ...) type name = initial;
  WEFT_OPTIONS(WEFT_OPTION)
  WEFT_EXTRA_OPTIONS(WEFT_OPTION)
#undef WEFT_OPTION
};

struct OptionRow {
  std::string variable;  // WEFT_TIMEOUT_S
  std::string type;      // what it takes
  std::string initial;
  std::string value;
  std::string source;  // "default" or "environment"; "environment (refused)" keeps the default
  std::string help;
  bool is_shared;
};

// The settings; a refused one has its default.
const Config& config();
std::vector<OptionRow> config_table();

// Errors: kInvalid with every variable that is refused: its name, what was given, what is allowed, and for an
// unknown name the nearest known one.
Status config_status();
void config_reload();

// The secret that a launcher made up for the ranks that it starts; WEFT_JOB_SECRET takes precedence. Call
// it before other threads run.
void use_job_secret(const std::string& secret);
// WEFT_JOB_SECRET=auto, and nothing has come for it yet.
bool awaits_job_secret();

// How a variable of another library was used: "UCCL_IB_SL=3 is WEFT_SERVICE_LEVEL", or why it is not used.
struct ForeignVariable {
  std::string text;
  bool is_used;
};
// Takes UCCL-EP's variables as values of Weft's options where these have none of their own, and says what was made of
// each variable that begins with UCCL_, in the order of names. For its drop-in alone; before other threads run.
// Called again, it says the same.
std::vector<ForeignVariable> take_uccl_variables();

// "WEFT_NAME=value" of each option that ranks must share, a line each, in the table's order.
std::string shared_settings();

// Gives another library's variable a value while that library reads it; one that the user has set stays. Not while other
// threads read the environment.
class VariableWhile {
 public:
  VariableWhile(const char* name, const std::string& value);
  ~VariableWhile();
  VariableWhile(const VariableWhile&) = delete;

 private:
  const char* name_;
  bool is_ours_;
};

// A path with a leading ~/ replaced by the home folder (HOME, else the user database).
std::string expand_home(std::string_view path);

}  // namespace weft
