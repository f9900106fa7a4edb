#include "core/base/threads.hpp"

#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace ballast {

void in_threads(std::size_t parts, const std::function<void(std::size_t)>& work) {
  std::vector<std::exception_ptr> failed(parts);
  const auto part = [&](std::size_t p) {
    try {
      work(p);
    } catch (...) {
      failed[p] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(parts);
  try {
    while (threads.size() + 1 < parts) threads.emplace_back(part, threads.size() + 1);
  } catch (const std::system_error&) {  // the caller does the rest
  }
  if (parts > 0) part(0);
  for (std::size_t p = threads.size() + 1; p < parts; ++p) part(p);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& e : failed)
    if (e) std::rethrow_exception(e);
}

}  // namespace ballast
