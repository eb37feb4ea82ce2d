// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: what an engine makes of sequences of messages and immediates, from strangers and from a peer of its
// job that keeps the seals and numbers right and says anything else. The input is a list of steps: a byte that chooses,
// then what the step takes. Afterwards the engine must hear an honest peer as before, and have as many peers.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/deadline.h"
#include "base/log.h"
#include "providers/loopback/loopback.h"
#include "tests/support/stranger.h"
#include "transfer/engine.h"

using namespace weft;
using namespace weft::transfer;
using namespace weft::transfer::testing;

namespace {

constexpr const char* kSecret = "the secret of a fuzzed job";

void require(bool holds) {
  if (!holds) std::abort();  // what libFuzzer reports
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  bool is_over() const { return rest_.empty(); }
  template <class T>
  T get() {
    T value{};
    const size_t bytes = std::min(sizeof value, rest_.size());
    std::memcpy(&value, rest_.data(), bytes);
    rest_.remove_prefix(bytes);
    return value;
  }
  std::string text() {
    const size_t wanted = get<uint8_t>();
    const size_t bytes = std::min(wanted, rest_.size());
    std::string value(rest_.substr(0, bytes));
    rest_.remove_prefix(bytes);
    return value;
  }

 private:
  std::string_view rest_;
};

class Bench {
 public:
  Bench() {
    Options options;
    options.provider = network_;
    options.nics = {network_->probe()[0]};
    options.name = "fuzzed";
    options.secret = kSecret;
    options.has_worker = false;
    options.stage_slots = 2;
    options.stage_slot_bytes = 4096;
    engine_ = std::move(*Engine::open(std::move(options)));
    memory_ = *engine_->enroll({bytes_, sizeof bytes_}, provider::kRemoteRead | provider::kRemoteWrite);
    stranger_ = std::make_unique<Stranger>(network_, "another");
    start_insider();
  }
  ~Bench() { engine_->close(); }

  void run(Input input) {
    while (!input.is_over()) step(input);
    for (int i = 0; i < 200; ++i) engine_->progress();
  }

  // An honest peer is heard.
  void check() {
    Insider honest(network_, kSecret);
    honest.meanwhile = [this] { engine_->progress(); };
    require(honest.connect(engine_->address()));
    const auto peers = engine_->peers();
    require(peers.size() <= 2);
    std::shared_ptr<Peer> its;
    for (const auto& peer : peers)
      if (peer->id() == to_text(honest.id())) its = peer;
    require(its != nullptr);
    auto receive = *engine_->recv(its, memory_, 0, sizeof bytes_, {});
    require(honest.say(honest.message(MessageType::kEager, "heard")));
    require(
        honest.write_imm(with_token(encode_imm(ImmClass::kCount, honest.slot(), 3), honest.keys().token)));
    require(wait_until(Deadline::after_s(10), [&] {
      honest.poll();
      return receive->is_finished();
    }));
    require(receive->status().ok() && receive->bytes() == 5 && std::memcmp(bytes_, "heard", 5) == 0);
    const auto counter = *engine_->imm_counter(its, 3);
    require(wait_until(Deadline::after_s(10), [&] {
      honest.poll();
      return counter->value() == 1;
    }));
  }

 private:
  void start_insider() {
    insider_.reset();
    insider_ = std::make_unique<Insider>(network_, kSecret);
    insider_->meanwhile = [this] { engine_->progress(); };
    require(insider_->connect(engine_->address()));
  }
  std::shared_ptr<Peer> its() {
    for (const auto& peer : engine_->peers())
      if (peer->id() == to_text(insider_->id())) return peer;
    return nullptr;
  }

  void step(Input& input) {
    const std::string& rail = insider_->there().rails[0];
    switch (input.get<uint8_t>() % 8) {
      case 0: {
        const auto type = static_cast<MessageType>(1 + input.get<uint8_t>() % 16);
        (void)insider_->say(insider_->message(type, input.text()));
        break;
      }
      case 1:
        (void)stranger_->say(input.text(), rail);
        break;
      case 2: {  // in the name of the insider, without its key
        const auto type = static_cast<MessageType>(1 + input.get<uint8_t>() % 16);
        const uint32_t number = input.get<uint8_t>();
        (void)stranger_->say(to_bytes({type, insider_->id(), insider_->life(), number, 0}, input.text()),
                             rail);
        break;
      }
      case 3:
        (void)stranger_->write_imm(input.get<uint64_t>(), insider_->inbox_there(), rail);
        break;
      case 4:
        (void)insider_->write_imm(with_token(input.get<uint32_t>(), insider_->keys().token));
        break;
      case 5:
        for (int polls = input.get<uint8_t>(); polls > 0; --polls) engine_->progress();
        break;
      case 6:
        if (const auto peer = its()) switch (input.get<uint8_t>() % 3) {
            case 0:
              (void)engine_->recv(peer, memory_, 0, input.get<uint16_t>() % sizeof bytes_, {});
              break;
            case 1:
              (void)engine_->send(peer, memory_, 0, input.get<uint16_t>() % sizeof bytes_, {});
              break;
            default:
              (void)engine_->disconnect(peer);
          }
        break;
      default:
        if (!its()) start_insider();
    }
    engine_->progress();
  }

  std::shared_ptr<provider::Loopback> network_ = std::make_shared<provider::Loopback>();
  std::unique_ptr<Engine> engine_;
  char bytes_[16384] = {};
  std::shared_ptr<Memory> memory_;
  std::unique_ptr<Stranger> stranger_;
  std::unique_ptr<Insider> insider_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool is_quiet = (set_log_sink([](LogLevel, const std::string&) {}), true);
  (void)is_quiet;
  if (size > 4096) return 0;
  Bench bench;
  bench.run(Input(data, size));
  bench.check();
  return 0;
}
