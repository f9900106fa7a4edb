// A device in place of the host's, whose memory and copies are the host's: for tests that add
// queues as a GPU has them.
#pragma once
#include "core/base/device.hpp"

namespace ballast::testing {

class HostStandIn : public Device {
 public:
  Space space() const override { return Space::host; }
  void* allocate(std::size_t bytes) override { return host_.allocate(bytes); }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    host_.deallocate(pointer, bytes);
  }
  void zero(void* pointer, std::size_t bytes) override { host_.zero(pointer, bytes); }
  void copy(void* to, Space to_space, const void* from, Space from_space,
            std::size_t bytes) override {
    host_.copy(to, to_space, from, from_space, bytes);
  }
  void synchronize() override {}

 private:
  Device& host_ = host_device();  ///< the real one: made before it is replaced
};

}  // namespace ballast::testing
