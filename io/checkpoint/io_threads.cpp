#include "io/checkpoint/io_threads.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace ballast {

std::size_t io_threads() {
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  return std::clamp<std::size_t>(cores / 2, std::min<std::size_t>(cores, 2), 4);
}

void in_io_threads(std::size_t parts, const std::function<void(std::size_t, std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr problem;
  const auto run = [&](std::size_t thread) {
    try {
      for (std::size_t part; (part = next++) < parts;) work(part, thread);
    } catch (...) {
      next = parts;
      const std::lock_guard lock(mutex);
      if (!problem) problem = std::current_exception();
    }
  };
  std::vector<std::jthread> others;
  try {
    for (std::size_t t = 1; t < std::min(io_threads(), parts); ++t) others.emplace_back(run, t);
  } catch (const std::system_error&) {  // no more threads: those there are do the work
  }
  run(0);
  others.clear();  // joins
  if (problem) std::rethrow_exception(problem);
}

}  // namespace ballast
