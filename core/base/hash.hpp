// Hash of plans: order-sensitive, 64 bits, the same on every machine of one byte order.
#pragma once
#include <cstdint>
#include <type_traits>

namespace ballast {

class Hash {
 public:
  template <class T>
  Hash& add(T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    std::uint64_t x = value_ ^ (static_cast<std::uint64_t>(value) + 0x9E3779B97F4A7C15ull);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;  // splitmix64's finaliser
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    value_ = (x ^ (x >> 31)) + 0x632BE59BD9B4E019ull * ++count_;
    return *this;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x243F6A8885A308D3ull, count_ = 0;
};

}  // namespace ballast
