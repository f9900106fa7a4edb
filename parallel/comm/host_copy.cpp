#include "parallel/comm/host_copy.hpp"

#include <optional>

namespace ballast {

Fence copy_beside(Device& device, Queue queue, std::initializer_list<HostCopy> copies,
                  Recorder* recorder) {
  require(queue == Queue::to_host || queue == Queue::to_device,
          "copies to and from host memory have queues of their own");
  device.wait(device.fence(Queue::compute),
              queue);  // no mark of the clock lies between this and the event's begin
  std::optional<Scope> standing;
  if (device.space() == Space::host)
    standing.emplace(recorder, EventKind::copy_wait);  // it copies at once
  Scope scope(recorder, queue == Queue::to_host ? EventKind::offload : EventKind::fetch, queue);
  for (const HostCopy& copy : copies) {
    require(copy.to.bytes() == copy.from.bytes() && copy.to.contiguous() && copy.from.contiguous(),
            "copy of {} {} to {} {}", name(copy.from.dtype()), to_string(copy.from.shape()),
            name(copy.to.dtype()), to_string(copy.to.shape()));
    device.queue_copy(queue, copy.to.raw(), copy.from.raw(), copy.from.bytes());
    scope.bytes += static_cast<std::int64_t>(copy.from.bytes());
  }
  return device.fence(queue);
}

void wait_for_copy(Device& device, Fence fence, Recorder* recorder) {
  if (fence.empty()) return;
  Scope scope(recorder, EventKind::copy_wait);
  device.wait(fence, Queue::compute);
}

}  // namespace ballast
