// Work on parts of a file by a few threads: one alone neither sums nor moves bytes as fast as a
// storage takes them.
#pragma once
#include <cstddef>
#include <functional>

namespace ballast {

/// Threads for checkpoint work beside training: half of this process's cores, between 2 and 4, and
/// one where there is one core.
std::size_t io_threads();

/// Runs work(part, thread) for parts 0 to `parts` - 1, each once, on at most io_threads() threads,
/// of which this is number 0.  The first error ends the rest and is thrown here.
void in_io_threads(std::size_t parts,
                   const std::function<void(std::size_t part, std::size_t thread)>& work);

}  // namespace ballast
