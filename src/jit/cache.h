// SPDX-License-Identifier: Apache-2.0
//
// KernelCache keeps compiled kernels on disk, one file per key, safe for any number of processes.
//   KernelCache cache(config().cache_dir);
//   std::optional<std::string> cubin = cache.load(name);      // nothing on a miss or a damaged file
//   cache.store(name, *cubin);                                // a folder that cannot be written costs one
//   warning
// A file is written aside and renamed, so that readers see all of it or nothing; it starts with a checksum of
// the rest, so that a truncated one is a miss and is overwritten. Files may be deleted at any time. Threads:
// any.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace weft {

class KernelCache {
 public:
  // `folder` may start with ~/; it is made at the first store().
  explicit KernelCache(std::string_view folder);

  // `name` is a file name: letters, digits, '-', '_'.
  std::optional<std::string> load(const std::string& name) const;
  void store(const std::string& name, const std::string& payload) const;

  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const;

 private:
  std::string folder_;
};

}  // namespace weft
