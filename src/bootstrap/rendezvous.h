// SPDX-License-Identifier: Apache-2.0
//
// The server of a rendezvous: a thread that every rank connects to, and that passes on what each of them says.
// open_rendezvous() of tcp_bootstrap.h starts one. tcp_bootstrap.cc is the side of the ranks.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/file_descriptor.h"
#include "bootstrap/listener.h"
#include "bootstrap/tcp_bootstrap.h"

namespace weft {

// The listener's key: the id's own, and the secret of the job.
std::string key_of(const UniqueId& unique_id);

// A listening socket; not open where that fails, and errno says why.
FileDescriptor listen_at(const SocketAddress& address);

// Starts the thread that serves clients with this key. `size`: how many ranks will come, where rank 0's bootstrap
// serves them: then no client is accepted any more once rank 0 has gone. 0: as many as the first of them says. Errors:
// those of
// Stream::check().
Status serve_rendezvous(FileDescriptor listener, std::string key, int size);

// Where the rendezvous listens; `bytes` is set to the address's length.
SocketAddress address_of(const UniqueId& unique_id, socklen_t& bytes);

}  // namespace weft
