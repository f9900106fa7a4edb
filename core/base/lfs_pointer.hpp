// Git LFS keeps a few lines of text, a pointer, in place of a large file that was not fetched.
#pragma once
#include <string>

namespace ballast {

/// Whether the file is a pointer.  One that cannot be read is none: who reads it says why.
bool is_lfs_pointer(const std::string& path);
/// Errors: the file is a pointer.
void refuse_lfs_pointer(const std::string& path);

}  // namespace ballast
