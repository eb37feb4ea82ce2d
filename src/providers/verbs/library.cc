// SPDX-License-Identifier: Apache-2.0
//
// libibverbs at run time, and the choice of a GID.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/config.h"
#include "providers/verbs/library.h"

namespace weft::provider::ib {
namespace {

std::string gid_type_from_sysfs(const std::string& device, int port, int index) {
  std::string type;
  std::getline(
      std::ifstream(text("/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{}", device, port, index)), type);
  return type;
}

Result<Library> open_once() {
  const std::string path = config().libibverbs.empty() ? "libibverbs.so.1" : config().libibverbs;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return Status::make(Code::kUnsupported, "libibverbs: {} (Debian's package libibverbs1)", dlerror());
  Library library;
  std::string missing;
  auto find = [&](auto& function, const char* symbol, const char* version, bool is_needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlvsym(handle, symbol, version));
    if (!function && is_needed) missing += std::string(" ") + symbol;
  };
  const char* base = "IBVERBS_1.1";
  find(library.get_device_list, "ibv_get_device_list", base);
  find(library.free_device_list, "ibv_free_device_list", base);
  find(library.get_device_name, "ibv_get_device_name", base);
  find(library.open_device, "ibv_open_device", base);
  find(library.close_device, "ibv_close_device", base);
  find(library.alloc_pd, "ibv_alloc_pd", base);
  find(library.dealloc_pd, "ibv_dealloc_pd", base);
  find(library.reg_mr, "ibv_reg_mr", base);
  find(library.reg_mr_iova2, "ibv_reg_mr_iova2", "IBVERBS_1.8", false);
  find(library.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12", false);
  find(library.dereg_mr, "ibv_dereg_mr", base);
  find(library.create_cq, "ibv_create_cq", base);
  find(library.destroy_cq, "ibv_destroy_cq", base);
  find(library.create_srq, "ibv_create_srq", base);
  find(library.destroy_srq, "ibv_destroy_srq", base);
  find(library.create_qp, "ibv_create_qp", base);
  find(library.modify_qp, "ibv_modify_qp", base);
  find(library.destroy_qp, "ibv_destroy_qp", base);
  find(library.create_ah, "ibv_create_ah", base);
  find(library.destroy_ah, "ibv_destroy_ah", base);
  find(library.query_device, "ibv_query_device", base);
  find(library.query_port, "ibv_query_port", base);
  find(library.query_gid, "ibv_query_gid", base);
  find(library.query_pkey, "ibv_query_pkey", base);
  find(library.wc_status_str, "ibv_wc_status_str", base);
  library.gid_type = gid_type_from_sysfs;
  if (!missing.empty()) return Status::make(Code::kUnsupported, "libibverbs: {} lacks{}", path, missing);
  return library;
}

bool is_zero(const uint8_t* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (bytes[i]) return false;
  return true;
}

int score(const GidEntry& entry) {
  const uint8_t* raw = entry.gid.raw;
  if (is_zero(raw, 16) || is_zero(raw + 8, 8)) return -1;  // empty
  if (raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80 && entry.type.find("RoCE v2") != std::string::npos) return -1;
  const bool is_ipv4 = is_zero(raw, 10) && raw[10] == 0xff && raw[11] == 0xff;
  return (entry.type.find("RoCE v2") != std::string::npos ? 2 : 0) + (is_ipv4 ? 1 : 0);
}

}  // namespace

int choose_gid(const std::vector<GidEntry>& entries) {
  int best = -1, best_score = -1;
  for (const GidEntry& entry : entries)
    if (const int its = score(entry); its > best_score) {
      best = entry.index;
      best_score = its;
    }
  return best;
}

uint32_t completion_entries_max() {
  std::error_code error;
  if (std::filesystem::is_empty("/sys/class/infiniband", error) || error) return 0;
  const Result<Library> library = open_library();
  if (!library.ok()) return 0;
  uint32_t least = 0;
  int count = 0;
  ibv_device** devices = library->get_device_list(&count);
  for (int i = 0; devices && i < count; ++i) {
    ibv_context* context = library->open_device(devices[i]);
    if (!context) continue;
    ibv_device_attr attr{};
    if (library->query_device(context, &attr) == 0 && attr.max_cqe > 0)
      least = std::min(least ? least : UINT32_MAX, static_cast<uint32_t>(attr.max_cqe));
    library->close_device(context);
  }
  if (devices) library->free_device_list(devices);
  return least;
}

Result<Library> open_library() {
  static const Result<Library> once = open_once();
  return once;
}

}  // namespace weft::provider::ib
