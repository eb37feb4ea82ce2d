// SPDX-License-Identifier: Apache-2.0
//
// Opens folders and files that hold code. Only this user and root can have put them there, or can put others in their
// place afterwards.
//   WEFT_TRY_ASSIGN(FileDescriptor folder, open_private_folder("/home/ada/.cache/weft"));
//   WEFT_TRY_ASSIGN(FileDescriptor file, open_private_file(folder, "/home/ada/.cache/weft", "copy.cubin"));
// Every part of the path is opened by itself, and links are followed by hand. Checks ask the open descriptor, not the
// path, so the file that was checked is the file that is read.
// A part must belong to this user or to root, and must not be writable by others. On the way to the folder, a part that
// others can write is allowed if it is sticky, as /tmp is: there users cannot replace the files of another user. Where
// the process is in a user namespace without all users, the owner that stands for all of the others counts as root on
// the way.
// Errors: kCapacity for a part that is not allowed: it names the part, what is wrong with it, and the command that
// helps; kSystem for a part that cannot be opened. Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft {

// A relative path begins at the working directory. The descriptor serves openat() and readdir().
Result<FileDescriptor> open_private_folder(const std::string& path);

// A file of an open folder, to be read: no link. `path` is the folder's, for messages.
Result<FileDescriptor> open_private_file(const FileDescriptor& folder, const std::string& path,
                                         const std::string& name);

// All of a file that must be private, with the folder that it is in. kCapacity, too, for one of more than `bytes_max`.
Result<std::string> read_private(const std::string& path, uint64_t bytes_max);

// All bytes of an open file; `name` for messages.
Result<std::string> read_all(const FileDescriptor& file, const std::string& name);

}  // namespace weft
