// SPDX-License-Identifier: Apache-2.0
//
// A rail of the provider `cuda`. Which side copies:
//   the peer's memory is of a GPU     this rail, by copy engines
//   both are of hosts                 this rail, by process_vm_writev or process_vm_readv, a part at each poll
//   own GPU, the peer's host          the peer's rail, on request, as no other process reaches that memory from a GPU
// An immediate is a word in the lane to the peer: stored by the GPU behind the copy, or by the host.
#pragma once

#include <deque>
#include <set>

#include "providers/cuda/memory.h"

namespace weft::provider::cuda {

class CudaRail : public Rail {
 public:
  CudaRail(Nic nic, int device) : nic_(std::move(nic)), device_(device) {}
  ~CudaRail() override;
  Status open();

  const Caps& caps() const override { return nic_.caps; }
  const Nic& nic() const override { return nic_; }
  std::string address() const override;
  Result<Route> resolve(std::string_view address) override;
  void forget(Route route) override;
  Result<Registration> enroll(const Range& range, uint32_t access) override;
  void release(Registration& registration) override;
  Posted post_write(const RmaOp& op) override { return post(op, kRemoteWrite); }
  Posted post_read(const RmaOp& op) override { return post(op, kRemoteRead); }
  Posted post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) override;
  Posted post_recv(void* data, uint64_t bytes, void* lkey, Context* context) override;
  std::string refusal() const override { return refusal_; }
  bool is_route_broken() const override { return is_route_broken_; }
  uint32_t pages_per_post(Route) const override { return kRequests; }
  Posted post_pages(Route to, Piece* pieces, uint32_t count, Context* context) override;
  size_t poll(Event* events, size_t max) override;

 private:
  // An operation of one request, or of many.
  struct Asked {
    Context* context;
    uint64_t left;
    std::string error;
  };
  // A peer that this rail writes to.
  struct Out {
    std::shared_ptr<PeerMemory> peer;
    SharedMemory shared;
    Pinned pinned;  // the lane, for words of the GPU
    bool is_greeted = false;
    std::array<uint64_t, kRows> words{};
    std::map<uint64_t, std::shared_ptr<Asked>> requested;  // by the request's number
    std::array<uint64_t, kStreams> marks{};                // the last of its copies
    bool is_lost = false;
    Lane& lane() const { return *reinterpret_cast<Lane*>(shared.data()); }
  };
  // A peer that writes to this rail.
  struct In {
    std::shared_ptr<PeerMemory> peer;
    SharedMemory shared;
    std::array<uint64_t, kStreams> marks{};
    Lane& lane() const { return *reinterpret_cast<Lane*>(shared.data()); }
  };
  // Under way on a stream.
  struct Running {
    uint64_t mark = 0;
    Context* context = nullptr;
    uint64_t bytes = 0;
    std::shared_ptr<In> served;  // a request of a peer, instead of an own operation
    uint64_t request = 0;
    bool has_imm = false;
    uint32_t imm = 0;
  };
  // The end of the list's last page, so that a page behind it joins it.
  struct PageEnds {
    Found theirs;                   // of the last page
    const Enrolled* own = nullptr;  // of the last page
    bool has_their_device = false, has_own_device = false;
    bool for_kernel = true;  // kernels of this GPU reach all of them
  };
  // Between hosts: a part at each poll.
  struct HostCopy {
    std::shared_ptr<Out> out;
    RmaOp op;
    Access way;
    uint64_t done = 0;
    bool is_moved() const { return done == op.piece.bytes; }
  };
  struct Receive {
    void* data;
    uint64_t bytes;
    Context* context;
  };

  Posted post(const RmaOp& op, Access way);
  Posted post_word(Out& out, const RmaOp& op);
  Posted post_copy(Out& out, const RmaOp& op, Access way, const Found& theirs);
  Posted post_requests(Out& out, const RmaOp& op, Access way, const Piece* pieces, uint32_t count);
  Posted post_page_copies(Out& out, const Piece* pieces, uint32_t count, Context* context, bool for_kernel);
  std::string look_at(const Out& out, const Piece& piece, PageEnds& ends) const;
  Posted post_host_pages(const Out& out, const Piece* pieces, uint32_t count, Context* context);
  Status mark_running(Out& out, uint32_t stream, Context* context, uint64_t bytes);
  Posted post_host_copy(std::shared_ptr<Out> out, const RmaOp& op, Access way);
  bool has_word(const Out& out, uint32_t row) const;
  void put_word(Out& out, uint32_t imm);
  bool greet(Out& out);
  Posted failed(Context* context, std::string why);
  Posted no_route(const std::shared_ptr<Out>& out);
  uint32_t next_stream() { return stream_ = (stream_ + 1) % kStreams; }
  std::shared_ptr<Out> find(Route route) const;
  Result<std::shared_ptr<PeerMemory>> memory_of(const Contact& contact);

  void take_hellos();
  Route route_to(const In& in) const;
  void take_words(In& in);
  void take_messages(In& in);
  void take_requests(const std::shared_ptr<In>& in);
  std::string serve(const std::shared_ptr<In>& in, const Request& request, uint64_t number);
  void reply(In& in, uint64_t request, const std::string& error);
  void take_replies(Out& out);
  void take_passed();
  void move_host_copies();
  bool advance(HostCopy& copy);
  void look_around();
  static std::set<Context*> operations_of(const Out& out);
  void lose(Out& out);

  Nic nic_;
  const int device_;  // -1: none
  std::unique_ptr<Copies> copies_;
  SharedMemory shared_;  // the control page
  std::unique_ptr<OwnMemory> own_;
  Contact contact_;
  std::map<Route, std::shared_ptr<Out>> outs_;
  std::vector<std::shared_ptr<Out>> leaving_;  // forgotten, with copies under way
  std::vector<std::shared_ptr<In>> ins_;
  std::map<uint64_t, std::weak_ptr<PeerMemory>> memories_;  // by the key of their control page
  std::array<std::deque<Running>, kStreams> running_;
  std::deque<HostCopy> host_copies_;
  std::deque<Receive> receives_;
  std::deque<Event> events_;
  std::vector<Stretch> stretches_;
  Route next_route_ = 1;
  uint32_t stream_ = 0;
  uint32_t hellos_taken_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t polls_ = 0;
  std::string refusal_;
  bool is_route_broken_ = false;
};

}  // namespace weft::provider::cuda
