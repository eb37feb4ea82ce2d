// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/region_name.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <system_error>

#include "base/random.h"
#include "base/same_host.h"
#include "base/text.h"

namespace weft::provider {
namespace {

// Where shm_open() keeps its objects on Linux.
constexpr const char* kFolder = "/dev/shm";

// The start of the names that processes of this host give.
std::string prefix_here() {
  return text("weft-{}-", this_process().host);
}

bool is_gone(pid_t pid) {
  return kill(pid, 0) != 0 && errno == ESRCH;
}

// The process that gave a name which starts with `prefix`; 0 for another name.
pid_t owner_of(const std::string& name, const std::string& prefix) {
  pid_t pid = 0;
  if (name.starts_with(prefix)) std::from_chars(name.data() + prefix.size(), name.data() + name.size(), pid);
  return pid;
}

}  // namespace

std::string fresh_region_name() {
  return text("{}{}-{}", prefix_here(), getpid(), random_key());
}

void remove_regions_of_the_dead() {
  const std::string prefix = prefix_here();
  std::error_code error;
  std::filesystem::directory_iterator files(kFolder, error), end;
  for (; !error && files != end; files.increment(error)) {
    const pid_t owner = owner_of(files->path().filename(), prefix);
    std::error_code ignored;
    if (owner > 0 && is_gone(owner)) std::filesystem::remove(files->path(), ignored);
  }
}

}  // namespace weft::provider
