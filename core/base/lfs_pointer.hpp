// Git LFS keeps a few lines of text, a pointer, in place of a large file that was not fetched.
#pragma once
#include <string>

namespace ballast {

/// Errors: the file is a pointer.  One that cannot be read is none: who reads it says why.
void refuse_lfs_pointer(const std::string& path);

}  // namespace ballast
