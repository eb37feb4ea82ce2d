// SPDX-License-Identifier: Apache-2.0
#include "jit/host_compile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/config.h"
#include "base/deadline.h"
#include "base/digest.h"
#include "base/log.h"
#include "jit/host_kernels.h"
#include "jit/source.h"
#include "jit/toolchain.h"

extern char** environ;

namespace weft {
namespace {

constexpr char kEntry[] = "weft_host_kernel";
constexpr double kCompileSeconds = 300;
// No contraction: the interpreter's sums must come out bit for bit.
const std::vector<std::string> kOptions{
    "-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared", "-x", "c++"};

std::string host_source(const KernelKey& key) {
  std::string shape;
  for (const auto& [name, value] : key.shape)
    shape += text("  static constexpr int64_t {} = {};\n", name, value);
  std::string out = text("#include \"{}\"\n", key.file);
  for (const std::string_view header : mesh_headers(key.mesh_type)) out += text("#include \"{}\"\n", header);
  out += key.prelude + "struct Shape {\n" + shape + "};\n";
  out += text(
      "extern \"C\" __attribute__((visibility(\"default\")))\n"
      "void {}(const void* args, const void* mesh, const weft::HostThread* place) {\n"
      "  weft::host_thread = *place;\n"
      "  weft::{}<weft::{}, Shape>(*static_cast<const weft::{}*>(args),\n"
      "                            *static_cast<const weft::{}*>(mesh), Shape{});\n"
      "}\n",
      kEntry, key.name, key.mesh_type, key.args_type, key.mesh_type, "{}");
  return out;
}

std::string digest_of(const std::string& source, const std::string& device_dir) {
  Digest digest;
  digest.add(source);
  for (const std::string& option : kOptions) digest.add(option);
  for (const NvrtcHeader& header : headers_of(source, device_dir)) digest.add(header.name).add(header.text);
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
  return Status::make(Code::kSystem, "the C++ compiler refuses a generated kernel: {}",
                      words.ok() ? words->substr(0, 4000) : "no output");
}

Status build(const std::string& source, const std::string& device_dir, const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const std::string aside = text("{}.{}", path, getpid());
  const std::string file = aside + ".cc", log = aside + ".log";
  std::ofstream(file) << source;
  std::vector<std::string> arguments{"c++"};
  arguments.insert(arguments.end(), kOptions.begin(), kOptions.end());
  arguments.insert(arguments.end(), {"-I" + device_dir, file, "-o", aside});
  Status status = run_compiler(arguments, log);
  if (status.ok() && rename(aside.c_str(), path.c_str()) != 0)
    status = Status::from_errno(errno, "renaming to {}", path);
  for (const std::string& left : {file, log, aside}) unlink(left.c_str());
  return status;
}

}  // namespace

Result<HostEntry> compile_on_host(const KernelKey& key) {
  const std::string device_dir = toolchain().device_dir;
  const std::string source = host_source(key);
  const std::string path =
      text("{}/{}-{}.so", expand_home(config().cache_dir), key.name, digest_of(source, device_dir));
  if (access(path.c_str(), R_OK) != 0) WEFT_TRY(build(source, device_dir, path));
  void* object =
      dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // lives as long as the process, like the kernel
  void* entry = object ? dlsym(object, kEntry) : nullptr;
  if (!entry) return Status::make(Code::kUnsupported, "loading {}: {}", path, dlerror());
  log_info("jit: loaded {}", path);
  return reinterpret_cast<HostEntry>(entry);
}

}  // namespace weft
