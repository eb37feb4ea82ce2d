// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/mlx5_device_queue.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/random.h"
#include "transports/ibgda/mlx5_commands.h"

namespace weft::ibgda {
namespace {

using mlx5::Command;
using mlx5::CommandCode;

constexpr uint64_t kPage = 4096;
constexpr uint32_t kLogReads = 4;             // 16 reads and adds under way
constexpr uint32_t kNotReadyRetries = 7;      // for ever
constexpr uint32_t kLogMessage = 30;          // bytes of an entry
constexpr uint32_t kRoceSourcePort = 0xc000;  // the first of those that RoCE v2 may use
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

// Where the parts of a queue lie in its room.
struct Layout {
  uint64_t completions, record, cq_record, bytes;
};
Layout layout_of(uint32_t blocks) {
  const uint64_t ring = uint64_t{blocks} * kBlockBytes;
  return {ring, 2 * ring, 2 * ring + kBlockBytes, (2 * ring + 2 * kBlockBytes + kPage - 1) / kPage * kPage};
}

// Errors: kUnsupported.
Result<mlx5dv_devx_umem*> register_room(const Opened& nic, const QueueRoom& room, uint64_t bytes,
                                        RoomWay way) {
  mlx5dv_devx_umem_in in{room.data(), bytes, kAccess, ~(kPage - 1), 0, -1};
  RoomFile file;
  if (way == RoomWay::kDmabuf) {
    WEFT_TRY_ASSIGN(file, room.file());
    in.addr = reinterpret_cast<void*>(file.offset);
    in.comp_mask = MLX5DV_UMEM_MASK_DMABUF;
    in.dmabuf_fd = file.file.get();
  }
  mlx5dv_devx_umem* umem = nic.direct.devx.umem_reg(nic.context, &in);
  if (umem) return umem;
  return Status::make(Code::kUnsupported, "{} does not take queues of {}: {}", nic.name, nic.rooms->name(),
                      std::strerror(errno));
}

}  // namespace

std::string choose_room_way(Opened& nic) {
  std::string why;
  const auto add = [&](std::string_view way, const std::string& reason) {
    why += text("{}{}: {}", why.empty() ? "" : "; ", way, reason);
  };
  nic.way = RoomWay::kNone;
  mlx5dv_pd pd{};
  mlx5dv_obj object{};
  object.pd = {nic.pd, &pd};
  if (const int error = nic.direct.init_obj(&object, MLX5DV_OBJ_PD); error != 0) {
    add("mlx5dv_init_obj", std::strerror(error));
    return why;
  }
  nic.pd_number = pd.pdn;
  const uint64_t bytes = layout_of(16).bytes;
  auto room = nic.rooms->make(bytes);
  if (!room.ok()) {
    add("memory", room.status().message());
    return why;
  }
  for (const auto& [way, name] :
       {std::pair{RoomWay::kDmabuf, "DMA-BUF"}, {RoomWay::kPeerMemory, "peer memory"}}) {
    const std::string no_peers = way == RoomWay::kPeerMemory ? nic.rooms->no_peer_memory() : "";
    if (!no_peers.empty()) {
      add(name, no_peers);
      continue;
    }
    const auto umem = register_room(nic, **room, bytes, way);
    if (!umem.ok()) {
      add(name, umem.status().message());
      continue;
    }
    nic.direct.devx.umem_dereg(*umem);
    nic.way = way;
    break;
  }
  return why;
}

Status DeviceQueue::open() {
  WEFT_TRY(make_room());
  WEFT_TRY(create_cq());
  WEFT_TRY(create_qp());
  WEFT_TRY(doorbell_.open(*nic_, uar_->reg_addr));
  at_.doorbell = doorbell_.at();
  WEFT_TRY(to_init());
  psn_ = static_cast<uint32_t>(random_key()) & 0xffffff;
  return {};
}

Status DeviceQueue::make_room() {
  const uint32_t blocks = std::bit_ceil(blocks_);
  const Layout layout = layout_of(blocks);
  WEFT_TRY_ASSIGN(room_, nic_->rooms->make(layout.bytes));
  std::byte* data = room_->data();
  at_ = {data,
         data + layout.completions,
         reinterpret_cast<uint32_t*>(data + layout.record),
         nullptr,
         blocks,
         blocks,
         0};
  const std::vector<uint8_t> fresh(uint64_t{blocks} * kBlockBytes, kNotYetByte);
  WEFT_TRY(room_->write(at_.completions, fresh.data(), fresh.size()));
  WEFT_TRY_ASSIGN(umem_, register_room(*nic_, *room_, layout.bytes, nic_->way));
  uar_ = nic_->direct.devx.alloc_uar(nic_->context, MLX5DV_UAR_ALLOC_TYPE_NC);
  return uar_ ? Status() : failed("allocating a doorbell page", nic_->name);
}

namespace {

// A command that makes an object; null, with errno, where the NIC refuses it.
mlx5dv_devx_obj* make(const Opened& nic, const Command& command,
                      std::array<uint8_t, mlx5::kAnswerBytes>& answer) {
  return nic.direct.devx.obj_create(nic.context, command.bytes.data(), command.bytes.size(), answer.data(),
                                    answer.size());
}

Status refused(const char* what, const Opened& nic, const void* answer) {
  return logged(Status::from_errno(errno, "ibgda: {} on {} (status {}, syndrome {})", what, nic.name,
                                   mlx5::get_field(answer, mlx5::kStatus),
                                   mlx5::get_field(answer, mlx5::kSyndrome)));
}

}  // namespace

// One completion for each block, in order, never held up by one that nobody took.
Status DeviceQueue::create_cq() {
  namespace cq = mlx5::cq;
  uint32_t event_queue = 0;
  errno = nic_->direct.devx.query_eqn(nic_->context, 0, &event_queue);
  if (errno != 0) return failed("asking for an event queue", nic_->name);
  const Layout layout = layout_of(at_.blocks);
  Command command(CommandCode::kCreateCq);
  command.set(cq::kContext + cq::kRecordIsUmem, 1);
  command.set(cq::kContext + cq::kIgnoresOverrun, 1);
  command.set(cq::kContext + cq::kRecordUmem, umem_->umem_id);
  command.set(cq::kContext + cq::kRecordAt, layout.cq_record);
  command.set(cq::kContext + cq::kLogEntries, static_cast<uint32_t>(std::countr_zero(at_.entries)));
  command.set(cq::kContext + cq::kUar, uar_->page_id);
  command.set(cq::kContext + cq::kEventQueue, event_queue);
  command.set(cq::kIsUmem, 1);
  command.set(cq::kUmem, umem_->umem_id);
  command.set(cq::kUmemOffset, layout.completions);
  std::array<uint8_t, mlx5::kAnswerBytes> answer{};
  cq_ = make(*nic_, command, answer);
  if (!cq_) return refused("making a completion queue in device memory", *nic_, answer.data());
  cq_number_ = static_cast<uint32_t>(mlx5::get_field(answer.data(), cq::kNumber));
  return {};
}

Status DeviceQueue::create_qp() {
  namespace qp = mlx5::qp;
  Command command(CommandCode::kCreateQp);
  command.set(qp::kContext + qp::kService, qp::kReliable);
  command.set(qp::kContext + qp::kPathState, qp::kMigrated);
  command.set(qp::kContext + qp::kPd, nic_->pd_number);
  command.set(qp::kContext + qp::kUar, uar_->page_id);
  command.set(qp::kContext + qp::kLogBlocks, static_cast<uint32_t>(std::countr_zero(at_.blocks)));
  command.set(qp::kContext + qp::kReceives, qp::kNoReceives);
  command.set(qp::kContext + qp::kSendCq, cq_number_);
  command.set(qp::kContext + qp::kReceiveCq, cq_number_);
  command.set(qp::kContext + qp::kRecordIsUmem, 1);
  command.set(qp::kContext + qp::kRecordUmem, umem_->umem_id);
  command.set(qp::kContext + qp::kRecordAt, layout_of(at_.blocks).record);
  command.set(qp::kIsUmem, 1);
  command.set(qp::kUmem, umem_->umem_id);
  command.set(qp::kUmemOffset, 0);
  std::array<uint8_t, mlx5::kAnswerBytes> answer{};
  qp_ = make(*nic_, command, answer);
  if (!qp_) return refused("making a queue pair in device memory", *nic_, answer.data());
  at_.number = static_cast<uint32_t>(mlx5::get_field(answer.data(), qp::kNumber));
  return {};
}

Status DeviceQueue::change(const char* what, void* command) {
  mlx5::set_field(command, mlx5::qp::kNumber, at_.number);
  std::array<uint8_t, mlx5::kAnswerBytes> answer{};
  const int error =
      nic_->direct.devx.obj_modify(qp_, command, mlx5::kCommandBytes, answer.data(), answer.size());
  if (error == 0) return {};
  errno = error > 0 ? error : errno;
  return refused(what, *nic_, answer.data());
}

Status DeviceQueue::to_init() {
  namespace qp = mlx5::qp;
  Command command(CommandCode::kResetToInit);
  command.set(qp::kContext + qp::kPathState, qp::kMigrated);
  command.set(qp::kPath + qp::kPathPort, nic_->port.port);
  command.set(qp::kPath + qp::kPathPkey, nic_->port.pkey_index);
  command.set(qp::kContext + qp::kTakesReads, 1);
  command.set(qp::kContext + qp::kTakesWrites, 1);
  command.set(qp::kContext + qp::kTakesAtomics, 1);
  command.set(qp::kContext + qp::kAtomicMode, qp::kAtomicsOf8Bytes);
  return change("starting a queue pair", command.bytes.data());
}

namespace {

// The way to the peer; its MAC address is what the kernel knows of the GID.
Status set_path(const Opened& nic, const ibv_ah_attr& way, bool is_ethernet, Command& command) {
  namespace qp = mlx5::qp;
  command.set(qp::kPath + qp::kPathPort, way.port_num);
  if (way.is_global) {
    command.set(qp::kPath + qp::kPathSourceGid, way.grh.sgid_index);
    command.set(qp::kPath + qp::kPathHops, way.grh.hop_limit);
    command.set(qp::kPath + qp::kPathClass, way.grh.traffic_class);
    for (uint32_t word = 0; word < 4; ++word) {
      uint32_t part = 0;
      std::memcpy(&part, reinterpret_cast<const char*>(&way.grh.dgid) + 4 * word, sizeof part);
      command.set(qp::kPath + mlx5::Field{qp::kPathGid.at + 32 * word, 32}, big_endian(part));
    }
  }
  if (!is_ethernet) {
    command.set(qp::kPath + qp::kPathIsGlobal, way.is_global);
    command.set(qp::kPath + qp::kPathLid, way.dlid);
    command.set(qp::kPath + qp::kPathLevel, way.sl);
    return {};
  }
  ibv_ah_attr asked = way;
  ibv_ah* handle = nic.verbs.create_ah(nic.pd, &asked);
  if (!handle) return failed("asking for the address of a peer", nic.name);
  mlx5dv_ah ah{};
  mlx5dv_obj object{};
  object.ah = {handle, &ah};
  errno = nic.direct.init_obj(&object, MLX5DV_OBJ_AH);
  const bool is_known = errno == 0 && ah.av;
  if (is_known) {
    const uint8_t* mac = ah.av->rmac;
    command.set(qp::kPath + qp::kPathMacHigh, uint32_t{mac[0]} << 8 | mac[1]);
    command.set(qp::kPath + qp::kPathMacLow,
                uint32_t{mac[2]} << 24 | uint32_t{mac[3]} << 16 | uint32_t{mac[4]} << 8 | mac[5]);
  }
  nic.verbs.destroy_ah(handle);
  if (!is_known) return failed("mlx5dv_init_obj of an address", nic.name);
  command.set(qp::kPath + qp::kPathSourcePort, kRoceSourcePort);
  command.set(qp::kPath + qp::kPathDscp, way.grh.traffic_class >> 2);
  command.set(qp::kPath + qp::kPathPriority, way.sl & 7u);
  return {};
}

}  // namespace

Status DeviceQueue::to_ready(const QueueAddress& peer) {
  namespace qp = mlx5::qp;
  const Route route = route_to(*nic_, peer);
  Command receive(CommandCode::kInitToReceive);
  WEFT_TRY(set_path(*nic_, route.way, peer.is_ethernet != 0, receive));
  receive.set(qp::kContext + qp::kMtu, route.mtu);
  receive.set(qp::kContext + qp::kLogMessageMax, kLogMessage);
  receive.set(qp::kContext + qp::kRemoteNumber, peer.number);
  receive.set(qp::kContext + qp::kLogReadsIn, kLogReads);
  receive.set(qp::kContext + qp::kNotReadyTimer, static_cast<uint32_t>(config().rnr_timer));
  receive.set(qp::kContext + qp::kReceivePsn, peer.psn);
  WEFT_TRY(change("connecting a queue pair", receive.bytes.data()));
  Command send(CommandCode::kReceiveToSend);
  send.set(qp::kPath + qp::kPathAckTimeout, static_cast<uint32_t>(config().rc_timeout));
  send.set(qp::kContext + qp::kRetries, static_cast<uint32_t>(config().rc_retry));
  send.set(qp::kContext + qp::kNotReadyRetries, kNotReadyRetries);
  send.set(qp::kContext + qp::kLogReadsOut, kLogReads);
  send.set(qp::kContext + qp::kSendPsn, psn_);
  return change("connecting a queue pair", send.bytes.data());
}

Status DeviceQueue::connect(std::string_view address) {
  WEFT_TRY_ASSIGN(const QueueAddress peer, read_address(address));
  return to_ready(peer);
}

// Both are made anew, as the ones in memory of the host.
Status DeviceQueue::reset() {
  close();
  return open();
}

uint32_t DeviceQueue::posted() const {
  uint32_t word = 0;
  (void)logged(room_->read(&word, at_.record + kRecordOfSends, sizeof word));
  return big_endian(word) & 0xffffu;
}

// A refusal is read again: a copy may have taken its reason from before. A device that no longer answers says nothing.
Completion DeviceQueue::completion(uint32_t index) const {
  Completion found{};
  const auto* entries = reinterpret_cast<const Completion*>(at_.completions);
  const Completion* at = entries + (index & (at_.entries - 1));
  Status read = logged(room_->read(&found, at, sizeof found));
  if (read.ok() && opcode_of(found.last) == kRefused) read = logged(room_->read(&found, at, sizeof found));
  if (!read.ok()) found.last = kNotYet << 28;
  return found;
}

Status DeviceQueue::put_entry(uint32_t index, const Entry& entry) {
  WEFT_TRY(room_->write(at_.ring + (index & (at_.blocks - 1)) * kBlockBytes, &entry, sizeof entry));
  const uint32_t word = record_word(index + 1);
  return room_->write(at_.record + kRecordOfSends, &word, sizeof word);
}

void DeviceQueue::close() {
  doorbell_.close();
  const mlx5::Devx& devx = nic_->direct.devx;
  if (qp_) devx.obj_destroy(qp_);
  if (cq_) devx.obj_destroy(cq_);
  if (uar_) devx.free_uar(uar_);
  if (umem_) devx.umem_dereg(umem_);
  qp_ = cq_ = nullptr;
  uar_ = nullptr;
  umem_ = nullptr;
  room_.reset();
}

}  // namespace weft::ibgda
