// Work in several threads, as far as the system has them.
#pragma once
#include <cstddef>
#include <functional>

namespace ballast {

/// Calls work(0) to work(parts - 1) and returns when all have ended: the first in the caller's
/// thread, the others in threads of their own, or in the caller's too where no more can be started
/// (a limit on processes).  Throws what the first part that failed threw.
void in_threads(std::size_t parts, const std::function<void(std::size_t)>& work);

}  // namespace ballast
