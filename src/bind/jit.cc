// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/config.h"
#include "base/private_path.h"
#include "bind/bind.h"
#include "jit/compile.h"
#include "jit/host_compile.h"
#include "jit/host_kernels.h"
#include "jit/host_launch.h"
#include "jit/notice.h"
#include "jit/source.h"
#include "jit/toolchain.h"
#include "moe/kernel_keys.h"
#include "transports/nccl/device_headers.h"
#include "transports/nvshmem/device_library.h"

namespace nb = nanobind;

namespace weft {
namespace {

nb::bytes as_bytes(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

Compiled compile_for_python(const KernelKey& key, const std::string& arch,
                            const std::optional<std::string>& cache_dir) {
  nb::gil_scoped_release unlocked;
  if (!cache_dir) return value_or_throw(compile_kernel(key, arch, nullptr));
  const KernelCache cache(*cache_dir, config().cache_path);
  return value_or_throw(compile_kernel(key, arch, &cache));
}

struct Sources {
  std::shared_ptr<const DeviceSources> of_mesh;
};

// The kernels of calls as they run among mapped peers.
std::vector<KernelKey> on_mapped_mesh(std::vector<KernelKey> keys) {
  for (KernelKey& key : keys) key.mesh_type = "MappedMesh";
  return keys;
}

void bind_keys_of_calls(nb::module_& module) {
  module.def(
      "high_throughput_keys",
      [](uint32_t ranks, uint32_t row_bytes, uint32_t scale_words, uint32_t top_k, uint32_t element,
         uint32_t combine_row_bytes, const std::string& architecture) {
        const RowFormat format{row_bytes, scale_words, top_k, 8, element, combine_row_bytes};
        return on_mapped_mesh(high_throughput_keys(format, ranks, limits_of(architecture)));
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("row_bytes"), nb::arg("scale_words"), nb::arg("top_k"),
      nb::arg("element"), nb::arg("combine_row_bytes"), nb::arg("architecture"),
      "The kernels of a dispatch and its combine: src/moe/kernel_keys.h.");
  module.def(
      "low_latency_keys",
      [](uint32_t ranks, uint32_t experts, uint32_t top_k, int64_t payload, uint32_t row_bytes,
         uint32_t scale_bytes, bool has_weights, int64_t reply, const std::string& architecture) {
        constexpr uint32_t kTokens = 128;  // plays no part in what is compiled
        LowLatencyDispatchFacts facts{kTokens, kTokens, top_k, experts, 8, payload, row_bytes, scale_bytes};
        facts.has_weights = has_weights;
        return on_mapped_mesh(
            low_latency_keys({ranks, kTokens, top_k, experts}, facts, reply, limits_of(architecture)));
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("experts"), nb::arg("top_k"), nb::arg("payload"),
      nb::arg("row_bytes"), nb::arg("scale_bytes"), nb::arg("has_weights"), nb::arg("reply"),
      nb::arg("architecture"), "The kernels of a low-latency dispatch and its combine.");
}

void bind_keys(nb::module_& module) {
  nb::class_<Sources>(module, "DeviceSources",
                      "What a mesh brings beside Weft's headers: transports/transport.h.")
      .def_prop_ro("headers", [](const Sources& sources) { return sources.of_mesh->headers; })
      .def_prop_ro("options", [](const Sources& sources) { return sources.of_mesh->options; });
  module.def(
      "nccl_device_sources",
      [](const std::string& folder, int gin_type, uint64_t dev_comm_bytes) {
        return Sources{value_or_throw(
            nccl_link::device_sources(folder, static_cast<nccl_link::GinType>(gin_type), dev_comm_bytes))};
      },
      nb::arg("folder"), nb::arg("gin_type"), nb::arg("dev_comm_bytes") = 0,
      "NCCL's device headers in a folder as NVRTC takes them, for one back end of GIN.");
  module.def(
      "nvshmem_device_sources",
      [](const std::string& library_path, const std::string& version) {
        return Sources{value_or_throw(nvshmem_link::device_sources(
            value_or_throw(nvshmem_link::find_device_library(library_path, version))))};
      },
      nb::arg("library_path"), nb::arg("version"),
      "NVSHMEM's device code beside a host library, as kernels with ports are linked with it.");
  nb::class_<KernelKey>(module, "KernelKey",
                        "What makes one compiled kernel differ from another: src/jit/jit.h.")
      .def(
          "__init__",
          [](KernelKey* key, std::string file, std::string name, std::string args_type, std::string mesh_type,
             std::vector<std::pair<std::string, int64_t>> shape, uint32_t threads_per_block,
             uint32_t blocks_per_sm, std::string prelude, const Sources& sources) {
            new (key) KernelKey{std::move(file),      std::move(name),    std::move(args_type),
                                std::move(mesh_type), std::move(shape),   threads_per_block,
                                blocks_per_sm,        std::move(prelude), sources.of_mesh};
          },
          nb::kw_only(), nb::arg("file"), nb::arg("name"), nb::arg("args_type"), nb::arg("mesh_type"),
          nb::arg("shape"), nb::arg("threads_per_block"), nb::arg("blocks_per_sm") = 1,
          nb::arg("prelude") = "", nb::arg("sources") = Sources{})
      .def_ro("file", &KernelKey::file)
      .def_ro("name", &KernelKey::name)
      .def_ro("args_type", &KernelKey::args_type)
      .def_ro("mesh_type", &KernelKey::mesh_type)
      .def_ro("shape", &KernelKey::shape)
      .def_ro("threads_per_block", &KernelKey::threads_per_block)
      .def_ro("blocks_per_sm", &KernelKey::blocks_per_sm)
      .def_ro("prelude", &KernelKey::prelude);
  nb::class_<KernelRow>(module, "KernelRow", "One kernel of the list in src/jit/kernel_list.h.")
      .def_ro("file", &KernelRow::file)
      .def_ro("name", &KernelRow::name)
      .def_ro("args_type", &KernelRow::args_type)
      .def_ro("mesh_type", &KernelRow::mesh_type)
      .def_ro("shape_type", &KernelRow::shape_type)
      .def_ro("threads_per_block", &KernelRow::threads_per_block)
      .def_ro("typical", &KernelRow::typical);
  nb::class_<Compiled>(module, "Compiled", "Machine code of one kernel and where it came from.")
      .def_prop_ro("cubin", [](const Compiled& compiled) { return as_bytes(compiled.cubin); })
      .def_ro("log", &Compiled::log)
      .def_ro("source", &Compiled::source)
      .def_ro("cache_name", &Compiled::cache_name)
      .def_ro("is_cached", &Compiled::is_cached);
}

}  // namespace

void bind_jit(nb::module_& module) {
  bind_keys(module);
  bind_keys_of_calls(module);
  module.def(
      "compile_host_kernel",
      [](const KernelKey& key, const std::string& cache_dir) {
        const KernelCache cache(cache_dir, config().cache_path);
        return value_or_throw(without_gil([&] { return compile_to_cache(key, cache); }));
      },
      nb::arg("key"), nb::arg("cache_dir"),
      "Compiles a generated kernel (a key with a prelude) for this CPU; False if it was in the cache.");
  module.def(
      "why_not_private",
      [](const std::string& folder) {
        const Status is_private = open_private_folder(folder).status();
        return is_private.code() == Code::kCapacity ? is_private.message() : std::string();
      },
      nb::arg("folder"), "Why a folder may hold no code, where another user can change it; else nothing.");
  module.def("architecture", &architecture, nb::arg("major"), nb::arg("minor"));
  module.def(
      "trace_blocks_only", &trace_blocks_only, nb::arg("is_on"),
      "Whether traces of kernels, where WEFT_TRACE_SPANS asks for any, hold whole blocks and no more.");
  module.def("keep_off_terminal", &CompileNotice::keep_off_terminal);
  module.def(
      "finish_preparing", [] { without_gil([] { return Jit::finish_preparing(), 0; }); },
      "Returns when no kernel is being compiled ahead any more: before the process ends.");
  module.def("kernel_table", [] {
    nb::list rows;
    for (const KernelRow& row : kernel_table()) rows.append(nb::cast(row));
    return rows;
  });
  module.def(
      "set_toolchain",
      [](std::string nvrtc, std::vector<std::string> include_dirs, std::string device_dir) {
        set_toolchain({std::move(nvrtc), std::move(include_dirs), std::move(device_dir)});
      },
      nb::arg("nvrtc"), nb::arg("include_dirs"), nb::arg("device_dir"));
  module.def("compile_kernel", &compile_for_python, nb::arg("key"), nb::arg("architecture"),
             nb::arg("cache_dir") = nb::none(),
             "Compiles for a GPU architecture (sm_90a); needs NVRTC but no GPU.");
  module.def(
      "kernel_source",
      [](const KernelKey& key) {
        const KernelRow* row = find_kernel(key.name, key.mesh_type);
        return kernel_source(key, row ? row->args_bytes : 0, row ? row->mesh_bytes : 0);
      },
      nb::arg("key"), "The generated source that NVRTC gets for a key.");
  module.def("host_kernel_ns", &host_kernel_ns,
             "Processor time that the calling thread has spent in kernels on the host since it first asked.");
}

}  // namespace weft
