// SPDX-License-Identifier: Apache-2.0
#include "jit/host_compile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/config.h"
#include "base/deadline.h"
#include "base/digest.h"
#include "base/log.h"
#include "jit/cache.h"
#include "jit/host_kernels.h"
#include "jit/notice.h"
#include "jit/source.h"
#include "jit/toolchain.h"

extern char** environ;

namespace weft {
namespace {

constexpr char kEntry[] = "weft_host_kernel";
constexpr double kCompileSeconds = 300;

// How a kernel is compiled, and where it is kept. Of a generated one: as users have it.
struct Way {
  std::string compiler = "c++";
  std::vector<std::string> options;
  std::string sources;  // the folder that has kernels/ and transports/
  KernelCache cache{config().cache_dir, config().cache_path};
  bool may_compile = true;
};

// No contraction: the interpreter's sums must come out bit for bit.
std::vector<std::string> compiler_options(std::string level) {
  std::vector<std::string> options{
      "-std=c++20", std::move(level), "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared", "-x",
      "c++"};
  constexpr std::string_view sanitizers = WEFT_SANITIZE;  // of this library: tools/sanitize
  if (!sanitizers.empty()) options.insert(options.end(), {text("-fsanitize={}", sanitizers), "-g1", "-O1"});
  return options;
}

Way way_of(const KernelKey& key) {
  Way way;
#ifndef WEFT_HOST_KERNELS
  // A part of the library, whatever WEFT_COMPILE and WEFT_CACHE_DIR say: from the checkout, and kept in its build folder.
  if (key.prelude.empty()) {
    way.compiler = WEFT_KERNEL_COMPILER;
    way.options = compiler_options("-O1");
    way.sources = WEFT_KERNEL_SOURCES;
    way.cache = KernelCache(WEFT_KERNEL_FOLDER);
    return way;
  }
#endif
  way.options = compiler_options("-O3");
  way.sources = toolchain().device_dir;
  way.may_compile = config().compile != "never";
  return way;
}

// Constants of a generated kernel; of another the struct of run-time fields, and sizes as this library knows them.
std::string shape_source(const KernelKey& key) {
  std::string out = key.prelude;
  if (key.prelude.empty()) {
    const KernelRow& row = *find_kernel(key.name, key.mesh_type);
    for (const auto& [type, bytes] :
         {std::pair(row.args_type, row.args_bytes), {row.mesh_type, row.mesh_bytes}})
      out += text("static_assert(sizeof(weft::{}) == {}, \"build Weft again: tools/dev-build\");\n", type,
                  bytes);
    return out + text("using Shape = weft::{};\n", row.shape_type);
  }
  out += "struct Shape {\n";
  for (const auto& [name, value] : key.shape)
    out += text("  static constexpr int64_t {} = {};\n", name, value);
  return out + "};\n";
}

std::string host_source(const KernelKey& key) {
  std::string out = text("#include \"{}\"\n", key.file);
  for (const std::string_view header : mesh_headers(key.mesh_type)) out += text("#include \"{}\"\n", header);
  out += shape_source(key);
  out += text(
      "extern \"C\" __attribute__((visibility(\"default\")))\n"
      "void {}(const void* args, const void* mesh, const void* shape, const weft::HostThread* place) {\n"
      "  weft::host_thread = *place;\n"
      "  weft::{}<weft::{}, Shape>(*static_cast<const weft::{}*>(args),\n"
      "                            *static_cast<const weft::{}*>(mesh), {});\n"
      "}\n",
      kEntry, key.name, key.mesh_type, key.args_type, key.mesh_type,
      key.prelude.empty() ? "*static_cast<const Shape*>(shape)" : "Shape{}");
  return out;
}

std::string digest_of(const std::string& source, const Way& way) {
  Digest digest;
  digest.add(source);
  for (const std::string& option : way.options) digest.add(option);
  for (const NvrtcHeader& header : headers_of(source, way.sources)) digest.add(header.name).add(header.text);
  return digest.hex().substr(0, 40);
}

// Runs the compiler; its words are in `log`.
Status run_compiler(const std::vector<std::string>& arguments, const std::string& log) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t compiler = 0;
  const int failed = posix_spawnp(&compiler, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed)
    return Status::make(Code::kUnsupported, "compiling for the host needs a C++ compiler: c++: {}",
                        strerror(failed));
  int outcome = 0;
  const bool ended = wait_until(Deadline::after_s(kCompileSeconds),
                                [&] { return waitpid(compiler, &outcome, WNOHANG) != 0; });
  if (!ended) {
    kill(compiler, SIGKILL);
    waitpid(compiler, &outcome, 0);
    return Status::make(Code::kSystem, "the C++ compiler took more than {} s", kCompileSeconds);
  }
  if (WIFEXITED(outcome) && WEXITSTATUS(outcome) == 0) return Status();
  const Result<std::string> words = read_file(log);
  const std::string said = words.ok() ? words->substr(0, 4000) : "no output";
  if (said.find(strerror(ENOSPC)) != std::string::npos)
    return Status::make(Code::kCapacity, "{}: {}", log.substr(0, log.rfind('/')), strerror(ENOSPC));
  return Status::make(Code::kSystem, "the C++ compiler refuses a generated kernel: {}", said);
}

// What is compiled for a key, how, and its name in a cache.
struct HostSource {
  explicit HostSource(const KernelKey& key)
      : way(way_of(key)),
        text_of(host_source(key)),
        file(text("{}-{}.so", key.name, digest_of(text_of, way))) {}

  Way way;
  std::string text_of, file;
};

// Compiles to `path`. Errors: kCapacity when the folder of `path` cannot take it.
Status build(const HostSource& wanted, const std::string& path) {
  static std::atomic<unsigned> count{0};
  const std::string aside = text("{}.{}.{}", path, getpid(), count.fetch_add(1));
  const std::string file = aside + ".cc.tmp", log = aside + ".log.tmp", object = aside + ".tmp";
  std::ofstream out(file);
  out << wanted.text_of << std::flush;
  Status status;
  if (!out) {
    status = Status::make(Code::kCapacity, "{}: {}", file, strerror(errno));
  } else {
    std::vector<std::string> arguments{wanted.way.compiler};
    arguments.insert(arguments.end(), wanted.way.options.begin(), wanted.way.options.end());
    arguments.insert(arguments.end(), {"-I" + wanted.way.sources, file, "-o", object});
    status = run_compiler(arguments, log);
  }
  // Whatever the umask, no other user may write a file that processes will load.
  if (status.ok() && (chmod(object.c_str(), 0700) != 0 || rename(object.c_str(), path.c_str()) != 0))
    status = Status::make(Code::kCapacity, "{}: {}", path, strerror(errno));
  for (const std::string& left : {file, log, object}) unlink(left.c_str());
  return status;
}

// A path of an open file that nothing else is loaded by: the loader takes an object that it knows by the same path
// for the same one, and descriptors are used again.
std::string path_of(const FileDescriptor& file) {
  static std::atomic<unsigned> count{0};
  std::string path = "/proc";
  for (unsigned left = count++; left; left /= 2) path += left % 2 ? "/." : "/";
  return text("{}/self/fd/{}", path, file.get());
}

Result<HostEntry> load(const KernelCache::File& file) {
  // Lives as long as the process, like the kernel.
  void* object = dlopen(path_of(file.descriptor).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* entry = object ? dlsym(object, kEntry) : nullptr;
  if (!entry) return Status::make(Code::kUnsupported, "loading {}: {}", file.path, dlerror());
  log_info("jit: loaded {}", file.path);
  return reinterpret_cast<HostEntry>(entry);
}

Result<HostEntry> load_from(const KernelCache& cache, const std::string& file) {
  const std::optional<KernelCache::File> built = cache.open(file);
  if (built) return load(*built);
  return Status::make(Code::kCapacity, "{}/{}: what was just compiled cannot be opened", cache.folder(),
                      file);
}

// Held by the process that compiles a kernel, while others wait for it. Without a file to lock, or in time, everyone
// compiles: that takes longer, and no harm is done.
class CompileTurn {
 public:
  explicit CompileTurn(const std::string& path)
      : path_(path + ".turn.tmp"), file_(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (file_ >= 0)
      wait_until(Deadline::after_s(kCompileSeconds), [&] { return flock(file_, LOCK_EX | LOCK_NB) == 0; });
  }
  ~CompileTurn() {
    if (file_ < 0) return;
    unlink(path_.c_str());
    close(file_);
  }
  CompileTurn(const CompileTurn&) = delete;

 private:
  const std::string path_;
  const int file_;
};

// Into the folder of the cache, unless another process has done so meanwhile. Errors: kCapacity when it cannot serve.
Status build_in_cache(const HostSource& wanted, const std::string& path) {
  const std::string& folder = wanted.way.cache.folder();
  WEFT_TRY(prepare_cache(folder));
  remove_leftovers(folder);
  const CompileTurn turn(path);
  return wanted.way.cache.open(wanted.file) ? Status() : build(wanted, path);
}

// In a folder of this process's own, which goes once the kernel is loaded.
Result<HostEntry> in_own_folder(const HostSource& wanted, const Status& why) {
  std::error_code error;
  std::string folder = (std::filesystem::temp_directory_path(error) / "weft-kernel-XXXXXX").string();
  if (error || !mkdtemp(folder.data()))
    return Status::make(Code::kCapacity, "no folder for a compiled kernel: {}; nor {}: {}", why.message(),
                        folder, strerror(errno));
  const std::string file = "kernel.so";
  const Status built = build(wanted, folder + "/" + file);
  Result<HostEntry> entry = built.ok() ? load_from(KernelCache(folder), file) : Result<HostEntry>(built);
  std::filesystem::remove_all(folder, error);
  return entry;
}

}  // namespace

Result<HostEntry> compile_on_host(const KernelKey& key) {
  const HostSource wanted(key);
  const KernelCache& cache = wanted.way.cache;
  if (const std::optional<KernelCache::File> kept = cache.open(wanted.file)) return load(*kept);
  if (!wanted.way.may_compile)
    return Status::make(Code::kUnsupported,
                        "kernel {} for this CPU is in no cache, and WEFT_COMPILE is never; `weft warm "
                        "--recorded` compiles ahead",
                        key.name);
  const CompileNotice notice(key.name, "this CPU");
  const std::string path = cache.folder() + "/" + wanted.file;
  const Status built = build_in_cache(wanted, path);
  if (built.ok()) return load_from(cache, wanted.file);
  if (built.code() != Code::kCapacity) return built;
  log_warn(
      "jit: the kernel cache cannot be used, so every process compiles its kernels again: {} (set "
      "WEFT_CACHE_DIR)",
      built.message());
  return in_own_folder(wanted, built);
}

Result<bool> compile_to_cache(const KernelKey& key, const KernelCache& cache) {
  HostSource wanted(key);
  wanted.way.cache = cache;
  if (cache.open(wanted.file)) return false;
  const CompileNotice notice(key.name, "this CPU");
  WEFT_TRY(build_in_cache(wanted, cache.folder() + "/" + wanted.file));
  return true;
}

}  // namespace weft
