// SPDX-License-Identifier: Apache-2.0
//
// Mail is the messages of a team: up to kMessageBytes each, in order per peer.
//   WEFT_TRY_ASSIGN(std::unique_ptr<Mail> mail, Mail::open(engine));
//   if (mail->has_room()) WEFT_TRY_ASSIGN(auto transfer, mail->send(peer, bytes));
//   WEFT_TRY(mail->receive([&](const Peer& from, std::string_view bytes) { ... }));
// Threads: the holder of the team's mutex.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "transfer/engine.h"

namespace weft::nccl_rma {

class Mail {
 public:
  using Take = std::function<void(const std::shared_ptr<transfer::Peer>& from, std::string_view bytes)>;

  static Result<std::unique_ptr<Mail>> open(transfer::Engine& engine);

  bool has_room();
  bool is_sent();  // all of it, as far as this process is concerned
  // Only where there is room. Errors: those of the engine.
  Result<std::shared_ptr<transfer::Transfer>> send(const std::shared_ptr<transfer::Peer>& to,
                                                   std::string_view bytes);
  // Hands over what has come, without waiting; whether anything had. Errors: kClosed once the engine is.
  Result<bool> receive(const Take& take);

 private:
  static constexpr uint32_t kSlots = 64;  // of either box

  explicit Mail(transfer::Engine& engine)
      : engine_(engine), outbox_(bytes_of_box()), inbox_(bytes_of_box()) {}
  static size_t bytes_of_box();
  Status post_receive(uint32_t slot);
  void sweep();

  struct Under {
    std::shared_ptr<transfer::Transfer> transfer;
    uint32_t slot;
  };
  transfer::Engine& engine_;
  std::vector<char> outbox_, inbox_;
  std::shared_ptr<transfer::Memory> outbox_memory_, inbox_memory_;
  std::vector<uint32_t> free_;
  std::deque<Under> sending_, receiving_;
};

}  // namespace weft::nccl_rma
