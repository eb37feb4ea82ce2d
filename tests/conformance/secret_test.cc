// SPDX-License-Identifier: Apache-2.0
//
// Engines take calls of their job alone: what a peer must prove, and what an overheard hello is worth.
#include <gmock/gmock.h>

#include "tests/conformance/transfer_fixture.h"
#include "transfer/wire.h"

namespace weft::transfer::testing {
namespace {

using ::testing::HasSubstr;

class SecretTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    auto provider = GetParam().make();
    ASSERT_TRUE(provider.ok()) << provider.status().message();
    provider_ = *provider;
  }
  Side side(const std::string& name, const std::string& secret) {
    Options options;
    options.name = name;
    options.secret = secret;
    return Side::open(provider_, 1, 1000, std::move(options));
  }

  std::shared_ptr<provider::Provider> provider_;
};

TEST_P(SecretTest, EnginesOfOneJobConnect) {
  Side a = side("a", "one secret of a job"), b = side("b", "one secret of a job");
  const auto peer = a.engine->connect(b.engine->address(), soon());
  EXPECT_TRUE(peer.ok()) << peer.status().message();
  EXPECT_TRUE(b.engine->connect(a.engine->address(), soon()).ok());
}

TEST_P(SecretTest, AnotherSecretOrNoneIsRefusedAtOnce) {
  Side a = side("a", "one secret of a job");
  for (const char* wrong : {"another secret", ""}) {
    Side b = side("b", wrong);
    for (const auto& peer :
         {a.engine->connect(b.engine->address(), soon()), b.engine->connect(a.engine->address(), soon())}) {
      EXPECT_EQ(peer.status().code(), Code::kInvalid);
      EXPECT_THAT(peer.status().message(), HasSubstr("WEFT_JOB_SECRET"));
    }
    EXPECT_TRUE(a.engine->peers().empty());
  }
}

// Who takes no notice of the mark in an address calls anyway, and is not heard.
TEST_P(SecretTest, ACallWithoutTheSecretIsDropped) {
  Side a = side("a", "one secret of a job"), b = side("b", "");
  Address address = *parse_address(a.engine->address());
  address.mark = mark_of("", address.engine);
  const auto peer = b.engine->connect(to_bytes(address), soon(0.7));
  EXPECT_EQ(peer.status().code(), Code::kPeerLost);
  EXPECT_TRUE(a.engine->peers().empty());
}

// A rail without an engine, which hears and says what it likes.
struct Stranger {
  std::shared_ptr<provider::Provider> provider;
  std::unique_ptr<provider::Rail> rail;
  std::vector<char> memory = std::vector<char>(16384);
  provider::Registration registration;
  provider::Context received, sent;

  explicit Stranger(std::shared_ptr<provider::Provider> from) : provider(std::move(from)) {
    for (const provider::Nic& nic : provider->probe())
      if (nic.usable() && !rail) rail = std::move(*provider->open(nic, {}));
    registration = *rail->enroll({memory.data(), memory.size()}, kLocal);
    rail->post_recv(memory.data(), 8192, registration.lkey, &received);
  }
  ~Stranger() {
    rail->stop();
    rail->release(registration);
  }

  std::string hear() {
    std::string message;
    wait_until(soon(), [&] {
      provider::Event events[4];
      const size_t count = rail->poll(events, 4);
      for (size_t i = 0; i < count; ++i)
        if (events[i].kind == provider::EventKind::kReceived) message.assign(memory.data(), events[i].bytes);
      return !message.empty();
    });
    return message;
  }
  void say(const std::string& message, const std::string& rail_address) {
    const provider::Route to = *rail->resolve(rail_address);
    std::memcpy(memory.data() + 8192, message.data(), message.size());
    wait_until(soon(), [&] {
      provider::Event events[4];
      rail->poll(events, 4);
      return rail->post_send(to, memory.data() + 8192, message.size(), registration.lkey, &sent) !=
             provider::Posted::kAgain;
    });
    wait_until(soon(0.3), [&] {
      provider::Event events[4];
      return rail->poll(events, 4) == 99;
    });
  }
};

TEST_P(SecretTest, AHelloThatWasOverheardBeginsNothingAgain) {
  Side a = side("a", "one secret of a job"), b = side("b", "one secret of a job");
  Stranger between(provider_);
  const Address real = *parse_address(b.engine->address());
  Address tapped = real;
  tapped.rails = {between.rail->address()};
  std::thread call([&] { (void)a.engine->connect(to_bytes(tapped), soon(3)); });
  const std::string hello = between.hear();
  ASSERT_EQ(parse_head(hello)->type, MessageType::kHello);
  between.say(hello, real.rails[0]);
  call.join();
  ASSERT_TRUE(wait_until(soon(), [&] { return b.engine->peers().size() == 1; }));
  ASSERT_TRUE(b.engine->disconnect(b.engine->peers()[0]).ok());
  ASSERT_TRUE(b.engine->peers().empty());
  between.say(hello, real.rails[0]);
  EXPECT_TRUE(b.engine->peers().empty());
  // A bit of it changed, it is no hello of the job.
  std::string forged = hello;
  forged[kHeadBytes + 40] ^= 1;
  between.say(forged, real.rails[0]);
  EXPECT_TRUE(b.engine->peers().empty());
}

std::vector<Backend> some_backends() {
  std::vector<Backend> some;
  for (Backend& backend : backends())
    if (backend.label == "loopback" || backend.label.find("tcp") != std::string::npos)
      some.push_back(std::move(backend));
  return some;
}
INSTANTIATE_TEST_SUITE_P(Backends, SecretTest, ::testing::ValuesIn(some_backends()),
                         [](const auto& info) { return info.param.label; });

}  // namespace
}  // namespace weft::transfer::testing
