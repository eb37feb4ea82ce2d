// SPDX-License-Identifier: Apache-2.0
//
// The meeting: a thread on one host that every rank connects to, and that passes on what each of them says.
// open_meeting() of tcp_bootstrap.h starts one; how ranks take part in it is in tcp_bootstrap.cc.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/file_descriptor.h"
#include "bootstrap/door.h"
#include "bootstrap/tcp_bootstrap.h"

namespace weft {

// What opens the door: the ticket's own key, and the secret of the job.
std::string key_of(const MeetingTicket& ticket);

// A listening socket; not open where that fails, and errno says why.
FileDescriptor listen_at(const SocketAddress& address);

// Starts the thread that serves who knows the key. `size`: how many ranks will come, where rank 0's bootstrap serves
// them: then nobody is let in any more once rank 0 has gone. 0: as many as the first of them says. Errors: those of
// Stream::check().
Status serve_meeting(FileDescriptor listener, std::string key, int size);

// Where the meeting listens; `bytes` is set to the address's length.
SocketAddress address_of(const MeetingTicket& ticket, socklen_t& bytes);

}  // namespace weft
