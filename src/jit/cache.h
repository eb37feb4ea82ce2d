// SPDX-License-Identifier: Apache-2.0
//
// KernelCache keeps compiled kernels on disk, one file per key, safe for any number of processes.
//   KernelCache cache(config().cache_dir, config().cache_path);
//   std::optional<std::string> cubin = cache.load(name);      // nothing on a miss or a damaged file
//   cache.store(name, *cubin);                                // a folder that cannot be written costs one
//   warning
// A file is written aside and renamed, so that readers see all of it or nothing; it starts with a checksum of
// the rest, so that a truncated one is a miss and is overwritten. Files may be deleted at any time.
// Code that is loaded from here runs in this process. So folder and files are made for their owner alone, and are
// opened by the rules of base/private_path.h: a file that another user owns, can write or could replace is a miss,
// with a warning that names the part of the path and the remedy. The folders of cache_path are looked at after the
// first one, by the same rules, and are never written: an image brings them, owned by root.
// Threads: any.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft {

// Makes `folder`, writable by its owner alone, unless it is there; makes sure that it may hold code.
// Errors: kCapacity when it cannot be made or written, or a part of its path is another's to write: the part, why, and
// the remedy.
Status prepare_cache(const std::string& folder);

// Removes what processes that were killed left half written in `folder`, an hour ago or more. Once per
// process.
void remove_leftovers(const std::string& folder);

class KernelCache {
 public:
  // A file that has been checked: load what is open, not what stands at the path.
  struct File {
    FileDescriptor descriptor;
    std::string path;  // for messages
  };

  // Folders may start with ~/; the first is made at the first store(). read_only: colons between.
  explicit KernelCache(std::string_view folder, std::string_view read_only = {});

  // `name` is a file name: letters, digits, '-', '_'.
  std::optional<std::string> load(const std::string& name) const;
  // A kernel whose name starts with `prefix`, the first by name: for callers that do not know the rest of the name.
  std::optional<std::string> load_like(const std::string& prefix) const;
  // `file` (with its extension) in the first folder that has it and where it may be loaded from.
  std::optional<File> open(const std::string& file) const;
  void store(const std::string& name, const std::string& payload) const;

  const std::string& folder() const { return folders_.front(); }
  std::string path(const std::string& name) const;

 private:
  std::vector<std::string> folders_;  // the first is written
};

}  // namespace weft
