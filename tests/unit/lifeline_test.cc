// SPDX-License-Identifier: Apache-2.0
#include "providers/lifeline.h"

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <optional>

namespace weft::provider {
namespace {

using namespace std::chrono_literals;
using Clock = Lifeline::Clock;

SocketAddress local(uint16_t port) {
  const in_addr self{htonl(INADDR_LOOPBACK)};
  return socket_address(AF_INET, &self, port);
}

// Whether it is over after so many looks; time passes as if each had waited.
bool is_over_after(Lifeline& line, int looks) {
  auto now = Clock::now();
  for (int i = 0; i < looks; ++i, now += 200ms)
    if (line.is_over(now)) return true;
  return false;
}

TEST(Lifeline, IsOverOnceItsListenerIsGone) {
  std::optional<Listener> listener = Listener::at(local(0));
  ASSERT_NE(listener->port(), 0);
  Lifeline line;
  line.dial(local(listener->port()));
  EXPECT_FALSE(is_over_after(line, 5));
  listener.reset();
  EXPECT_TRUE(is_over_after(line, 10));
}

TEST(Lifeline, LeavesTimeForWhatWasSaidLast) {
  std::optional<Listener> listener = Listener::at(local(0));
  Lifeline line;
  line.dial(local(listener->port()));
  EXPECT_FALSE(is_over_after(line, 5));
  listener.reset();
  const auto now = Clock::now() + 10s;
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(line.is_over(now + i * 1ms));
}

TEST(Lifeline, SaysNothingOfAPlaceThatNeverTookIt) {
  std::optional<Listener> listener = Listener::at(local(0));
  const uint16_t port = listener->port();
  listener.reset();
  for (const SocketAddress& there : {local(port), local(0), SocketAddress()}) {
    Lifeline line;
    line.dial(there);
    EXPECT_FALSE(is_over_after(line, 10));
  }
}

TEST(Lifeline, HasNoAddressThatNeedsAnInterface) {
  in6_addr local_to_a_link{};
  local_to_a_link.s6_addr[0] = 0xfe;
  local_to_a_link.s6_addr[1] = 0x80;
  local_to_a_link.s6_addr[15] = 1;
  EXPECT_EQ(socket_address(AF_INET6, &local_to_a_link, 1).length, 0u);
  EXPECT_EQ(socket_address(AF_INET6, &in6addr_loopback, 1).length, sizeof(sockaddr_in6));
  EXPECT_EQ(socket_address(AF_UNIX, &in6addr_loopback, 1).length, 0u);
}

}  // namespace
}  // namespace weft::provider
