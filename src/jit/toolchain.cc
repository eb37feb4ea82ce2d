// SPDX-License-Identifier: Apache-2.0
#include "jit/toolchain.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "base/config.h"
#include "base/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

std::mutex& toolchain_mutex() {
  static std::mutex mutex;
  return mutex;
}
Toolchain& current_toolchain() {
  static Toolchain current;
  return current;
}

// What is tried, in order, when nobody named a library. Bare names go through the loader's search.
const char* const kSystemLibraries[] = {"libnvrtc.so.13", "libnvrtc.so.12",
                                        "/usr/local/cuda/lib64/libnvrtc.so"};

// NVRTC looks for its built-ins by bare name, and some builds (13.0) cannot find them beside themselves: load
// those that lie there first.
void load_builtins_next_to(const fs::path& library) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(library.parent_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("libnvrtc-builtins.so.") && name.find("alt") == std::string::npos)
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
}

// The file that a handle was loaded from, found through one of its functions.
std::string file_of(const void* function, const std::string& otherwise) {
  Dl_info info;
  return dladdr(function, &info) && info.dli_fname ? info.dli_fname : otherwise;
}

}  // namespace

void set_toolchain(Toolchain toolchain) {
  std::lock_guard lock(toolchain_mutex());
  current_toolchain() = std::move(toolchain);
}

Toolchain toolchain() {
  std::lock_guard lock(toolchain_mutex());
  Toolchain out = current_toolchain();
  if (!config().nvrtc.empty()) out.nvrtc = config().nvrtc;
  if (!config().cuda_include.empty()) out.include_dirs = {config().cuda_include};
  if (out.include_dirs.empty()) out.include_dirs = {"/usr/local/cuda/include"};
  return out;
}

// ---- the library -----------------------------------------------------------------------------------------

struct Nvrtc::Functions {
  using Program = void*;
  int (*nvrtcVersion)(int*, int*);
  const char* (*nvrtcGetErrorString)(int);
  int (*nvrtcCreateProgram)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*nvrtcDestroyProgram)(Program*);
  int (*nvrtcCompileProgram)(Program, int, const char* const*);
  int (*nvrtcGetCUBINSize)(Program, size_t*);
  int (*nvrtcGetCUBIN)(Program, char*);
  int (*nvrtcGetProgramLogSize)(Program, size_t*);
  int (*nvrtcGetProgramLog)(Program, char*);
};

Status Nvrtc::load(const std::string& path) {
  if (path.find('/') != std::string::npos) load_builtins_next_to(path);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return Status::make(Code::kUnsupported, "{}", dlerror());
  auto functions = std::make_unique<Functions>();
#define WEFT_NVRTC_FUNCTION(name)                                                       \
  functions->name = reinterpret_cast<decltype(functions->name)>(dlsym(library, #name)); \
  if (!functions->name) return Status::make(Code::kUnsupported, "{} has no {}", path, #name);
  WEFT_NVRTC_FUNCTION(nvrtcVersion)
  WEFT_NVRTC_FUNCTION(nvrtcGetErrorString)
  WEFT_NVRTC_FUNCTION(nvrtcCreateProgram)
  WEFT_NVRTC_FUNCTION(nvrtcDestroyProgram)
  WEFT_NVRTC_FUNCTION(nvrtcCompileProgram)
  WEFT_NVRTC_FUNCTION(nvrtcGetCUBINSize)
  WEFT_NVRTC_FUNCTION(nvrtcGetCUBIN)
  WEFT_NVRTC_FUNCTION(nvrtcGetProgramLogSize)
  WEFT_NVRTC_FUNCTION(nvrtcGetProgramLog)
#undef WEFT_NVRTC_FUNCTION
  int major = 0;
  int minor = 0;
  functions->nvrtcVersion(&major, &minor);
  if (major < 12)
    return Status::make(Code::kUnsupported, "{} is NVRTC {}.{}; Weft needs 12.0 or newer", path, major,
                        minor);
  path_ = file_of(reinterpret_cast<const void*>(functions->nvrtcVersion), path);
  std::error_code ignored;
  version_ = major * 1000 + minor * 10;
  identity_ = text("{}.{}, {} bytes", major, minor, fs::file_size(path_, ignored));
  functions_ = functions.release();  // the library stays open as long as the process
  return Status();
}

Result<const Nvrtc*> Nvrtc::open() {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Nvrtc>> opened;
  const std::string wanted = toolchain().nvrtc;
  std::lock_guard lock(mutex);
  if (auto known = opened.find(wanted); known != opened.end()) return known->second.get();

  std::vector<std::string> paths(std::begin(kSystemLibraries), std::end(kSystemLibraries));
  if (!wanted.empty()) paths = {wanted};
  std::string tried;
  for (const std::string& path : paths) {
    auto nvrtc = std::make_unique<Nvrtc>();
    const Status status = nvrtc->load(path);
    if (status.ok()) return (opened[wanted] = std::move(nvrtc)).get();
    tried += (tried.empty() ? "" : "; ") + status.message();
  }
  return logged(Status::make(
      Code::kUnsupported,
      "no NVRTC to compile kernels with (pip install nvidia-cuda-nvrtc, or set WEFT_NVRTC): {}", tried));
}

Result<NvrtcOutput> Nvrtc::compile(const std::string& source, const std::vector<NvrtcHeader>& headers,
                                   const std::vector<std::string>& options) const {
  auto pointers = [](const auto& items, auto member) {
    std::vector<const char*> out;
    for (const auto& item : items) out.push_back(member(item).c_str());
    return out;
  };
  const auto texts = pointers(headers, [](const NvrtcHeader& h) -> const std::string& { return h.text; });
  const auto names = pointers(headers, [](const NvrtcHeader& h) -> const std::string& { return h.name; });
  const auto flags = pointers(options, [](const std::string& o) -> const std::string& { return o; });

  Functions::Program program = nullptr;
  int result = functions_->nvrtcCreateProgram(&program, source.c_str(), "weft_kernel.cu",
                                              static_cast<int>(names.size()), texts.data(), names.data());
  if (result != 0)
    return logged(Status::make(Code::kSystem, "NVRTC: {}", functions_->nvrtcGetErrorString(result)));
  struct Destroy {
    const Functions* functions;
    Functions::Program* program;
    ~Destroy() { functions->nvrtcDestroyProgram(program); }
  } destroy{functions_, &program};

  result = functions_->nvrtcCompileProgram(program, static_cast<int>(flags.size()), flags.data());
  NvrtcOutput out;
  size_t bytes = 0;
  if (functions_->nvrtcGetProgramLogSize(program, &bytes) == 0 && bytes > 1) {
    out.log.resize(bytes);
    functions_->nvrtcGetProgramLog(program, out.log.data());
    out.log.resize(bytes - 1);  // its terminating zero
  }
  if (result != 0)
    return logged(
        Status::make(Code::kSystem, "NVRTC: {}\n{}", functions_->nvrtcGetErrorString(result), out.log));
  result = functions_->nvrtcGetCUBINSize(program, &bytes);
  if (result == 0) {
    out.cubin.resize(bytes);
    result = functions_->nvrtcGetCUBIN(program, out.cubin.data());
  }
  if (result != 0 || out.cubin.empty())
    return logged(Status::make(Code::kSystem, "NVRTC gave no machine code: {}",
                               functions_->nvrtcGetErrorString(result)));
  return out;
}

}  // namespace weft
