// SPDX-License-Identifier: Apache-2.0
#include "base/process_name.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/deadline.h"
#include "base/process_watch.h"

namespace weft {
namespace {

ProcessName name_of(pid_t pid) {
  ProcessName name = this_process_name();
  name.pid = pid;
  name.started = process_start(pid);
  return name;
}

TEST(NamedProcess, TellsHowAnotherProcessEnds) {
  const pid_t child = fork();
  if (child == 0)
    for (;;) pause();
  const ProcessName name = name_of(child);
  const NamedProcess process(name);
  EXPECT_TRUE(process.is_known());
  EXPECT_FALSE(process.has_ended());
  EXPECT_EQ(process.fate(), "is running");
  kill(child, SIGKILL);
  EXPECT_TRUE(wait_until(Deadline::after_s(20), [&] { return process.has_ended(); }));
  EXPECT_EQ(process.fate(), "was killed by signal 9");
  EXPECT_TRUE(process.was_killed());
  EXPECT_EQ(process.who().rfind("pid " + std::to_string(child) + " on ", 0), 0u);
  waitpid(child, nullptr, 0);
  const NamedProcess late(name);
  EXPECT_TRUE(late.has_ended());
  EXPECT_EQ(late.fate(), "died");
}

TEST(NamedProcess, ANumberThatIsUsedAgainIsAnotherProcess) {
  ProcessName name = name_of(getppid());
  ++name.started;
  EXPECT_TRUE(NamedProcess(name).has_ended());
}

TEST(NamedProcess, OtherHostsAndThisProcessAreNotKnown) {
  ProcessName elsewhere = name_of(getppid());
  ++elsewhere.host;
  for (const ProcessName& name : {elsewhere, this_process_name(), ProcessName{}}) {
    const NamedProcess process(name);
    EXPECT_FALSE(process.is_known());
    EXPECT_FALSE(process.has_ended());
    EXPECT_EQ(process.fate(), "");
  }
}

TEST(NamedProcess, NamesOfMachinesMayBeAnything) {
  ProcessName name;
  name.pid = 7;
  for (char& letter : name.machine) letter = '\n';
  EXPECT_EQ(NamedProcess(name).who(), "pid 7 on " + std::string(sizeof name.machine, '?'));
}

}  // namespace
}  // namespace weft
