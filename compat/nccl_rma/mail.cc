// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl_rma/mail.h"

#include <cstring>

#include "compat/nccl_rma/wire.h"

namespace weft::nccl_rma {

size_t Mail::bytes_of_box() {
  return size_t{kSlots} * kMessageBytes;
}

Result<std::unique_ptr<Mail>> Mail::open(transfer::Engine& engine) {
  std::unique_ptr<Mail> mail(new Mail(engine));
  WEFT_TRY_ASSIGN(mail->outbox_memory_,
                  engine.enroll({mail->outbox_.data(), bytes_of_box()}, transfer::kLocal));
  WEFT_TRY_ASSIGN(mail->inbox_memory_,
                  engine.enroll({mail->inbox_.data(), bytes_of_box()}, transfer::kLocal));
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    mail->free_.push_back(slot);
    WEFT_TRY(mail->post_receive(slot));
  }
  return mail;
}

void Mail::sweep() {
  while (!sending_.empty() && sending_.front().transfer->is_finished()) {
    free_.push_back(sending_.front().slot);
    sending_.pop_front();
  }
}

bool Mail::has_room() {
  if (free_.empty()) sweep();
  return !free_.empty();
}

bool Mail::is_sent() {
  sweep();
  return sending_.empty();
}

Result<std::shared_ptr<transfer::Transfer>> Mail::send(const std::shared_ptr<transfer::Peer>& to,
                                                       std::string_view bytes) {
  const uint32_t slot = free_.back();
  const uint64_t offset = uint64_t{slot} * kMessageBytes;
  std::memcpy(outbox_.data() + offset, bytes.data(), bytes.size());
  WEFT_TRY_ASSIGN(std::shared_ptr<transfer::Transfer> sent,
                  engine_.send(to, outbox_memory_, offset, bytes.size(), {}));
  free_.pop_back();
  sending_.push_back({sent, slot});
  return sent;
}

Status Mail::post_receive(uint32_t slot) {
  transfer::How how;
  how.timeout_s = kLongestWait_s;
  WEFT_TRY_ASSIGN(auto posted,
                  engine_.recv(nullptr, inbox_memory_, uint64_t{slot} * kMessageBytes, kMessageBytes, how));
  receiving_.push_back({std::move(posted), slot});
  return {};
}

Result<bool> Mail::receive(const Take& take) {
  bool has_come = false;
  // At most a lap, so that who sends all the time does not keep the caller here.
  for (uint32_t i = 0; i < kSlots && receiving_.front().transfer->is_finished(); ++i) {
    const Under came = std::move(receiving_.front());
    receiving_.pop_front();
    if (came.transfer->phase() == transfer::Phase::kDone) {
      take(came.transfer->peer(),
           {inbox_.data() + uint64_t{came.slot} * kMessageBytes, came.transfer->bytes()});
      has_come = true;
    }
    WEFT_TRY(post_receive(came.slot));
  }
  return has_come;
}

}  // namespace weft::nccl_rma
