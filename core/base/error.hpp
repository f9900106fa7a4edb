// Errors.  Library code throws Error; main() and parallel/comm/waits decide how many ranks leave
// and how.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace ballast {

/// A problem that the user can mend: the message names the place and the remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws Error with a formatted message.
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws unless `condition`: for contracts whose breach is a user's or a caller's mistake.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(format, std::forward<Args>(args)...);
}

}  // namespace ballast
