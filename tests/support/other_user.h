// SPDX-License-Identifier: Apache-2.0
//
// Plays another user of this host: runs a function in a process of its own, as `nobody`.
//   if (!can_be_another_user()) GTEST_SKIP() << "only root can become another user";
//   EXPECT_EQ(as_another_user([] { return attack() ? 0 : 1; }), 0);
// Threads: any; the function runs in a fork, so it makes system calls and little else.
#pragma once

#include <grp.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace weft::testing {

inline constexpr uid_t kNobody = 65534;

inline bool can_be_another_user() {
  return geteuid() == 0;
}

// What the function returns (0 to 125); 126 where it could not become that user, 127 where it was killed.
inline int as_another_user(const std::function<int()>& attack) {
  const pid_t child = fork();
  if (child == 0) {
    const bool is_other = setgroups(0, nullptr) == 0 && setgid(kNobody) == 0 && setuid(kNobody) == 0;
    _exit(is_other ? attack() : 126);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 127;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 127;
}

}  // namespace weft::testing
