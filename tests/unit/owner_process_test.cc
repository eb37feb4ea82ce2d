// SPDX-License-Identifier: Apache-2.0
#include "base/owner_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace weft {
namespace {

// What `body` returns in a forked child.
template <class Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(OwnerProcess, RefusesAForkedChildByName) {
  const OwnerProcess owner;
  EXPECT_TRUE(owner.check("engine").ok());
  EXPECT_EQ(owner.pid(), getpid());
  EXPECT_EQ(in_child([&] {
              const Status status = owner.check("engine");
              const std::string words =
                  text("engine: got one of process {}, from which this process ({}) was forked", getppid(),
                       getpid());
              return status.code() == Code::kInvalid && status.message().starts_with(words) ? 7 : 1;
            }),
            7);
  EXPECT_TRUE(owner.is_this());
}

TEST(OwnerProcess, OfAChildIsItsOwn) {
  const OwnerProcess parents;
  EXPECT_EQ(in_child([&] {
              const OwnerProcess childs;
              if (!childs.is_this() || childs.pid() != getpid()) return 1;
              return in_child([&] { return childs.is_this() || parents.is_this() ? 1 : 7; });
            }),
            7);
}

TEST(OwnerProcess, EndsObjectsWhereTheyWereMade) {
  struct Counted {
    int* ended;
    ~Counted() { ++*ended; }
  };
  int ended = 0;
  std::shared_ptr<Counted> counted = ended_by_owner(std::make_unique<Counted>(&ended));
  ended = 0;
  EXPECT_EQ(in_child([&] {
              counted.reset();
              return ended == 0 ? 7 : 1;
            }),
            7);
  counted.reset();
  EXPECT_EQ(ended, 1);
}

TEST(OwnerProcess, OnePerProcessBeginsAnewInAChild) {
  static OnePerProcess<int> numbers;
  numbers.get() = 3;
  EXPECT_EQ(in_child([&] { return numbers.get() == 0 && &numbers.get() == &numbers.get() ? 7 : 1; }), 7);
  EXPECT_EQ(numbers.get(), 3);
}

}  // namespace
}  // namespace weft
