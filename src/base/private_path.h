// SPDX-License-Identifier: Apache-2.0
//
// Opens folders and files that hold code, so that nobody but this user and root can have put them there, nor put others
// in their place afterwards.
//   WEFT_TRY_ASSIGN(FileDescriptor folder, open_private_folder("/home/ada/.cache/weft"));
//   WEFT_TRY_ASSIGN(FileDescriptor file, open_private_file(folder, "/home/ada/.cache/weft", "copy.cubin"));
// Every part of the path is opened by itself, links are followed by hand, and what has been opened is asked, not what
// stands at a path: so what was checked is what is read.
// A part must belong to this user or to root, and nobody else may write it. On the way to the folder, one that others
// can write is allowed if it is sticky, as /tmp is: nobody there can replace what another one owns. Where the process is
// in a user namespace without all users, the owner that stands for all of the others counts as root on the way.
// Errors: kCapacity for what is there and not allowed: the part, what it is, and the command that helps; kSystem for
// what cannot be opened. Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft {

// A relative path begins at the working directory. What it returns serves openat() and readdir().
Result<FileDescriptor> open_private_folder(const std::string& path);

// A file of an open folder, to be read: no link. `path` is the folder's, for messages.
Result<FileDescriptor> open_private_file(const FileDescriptor& folder, const std::string& path,
                                         const std::string& name);

// All of a file that must be private, with the folder that it is in. kCapacity, too, for one of more than `bytes_max`.
Result<std::string> read_private(const std::string& path, uint64_t bytes_max);

// All bytes of an open file; `name` for messages.
Result<std::string> read_whole(const FileDescriptor& file, const std::string& name);

}  // namespace weft
