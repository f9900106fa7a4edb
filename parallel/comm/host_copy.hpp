// Copies between a device and pinned host memory that run beside computation.
#pragma once
#include <initializer_list>
#include <utility>

#include "core/base/tensor.hpp"
#include "core/observe/events.hpp"

namespace ballast {

struct HostCopy {
  Tensor to, from;  ///< same bytes; both contiguous
};

/// Queues copies and returns at once on a GPU (the host backend copies before it returns), all to
/// the host (Queue::to_host, an `offload` event) or all to the device (Queue::to_device, a `fetch`
/// event).  They begin when the computation queued so far is done, hence find what it wrote and may
/// write where it read.  Until the returned fence has been waited for, computation neither reads
/// nor overwrites the targets, nor overwrites or frees the sources.
Fence copy_beside(Device& device, Queue queue, std::initializer_list<HostCopy> copies,
                  Recorder* recorder);

/// Computation that is queued from now on begins after `fence`; the host does not wait.  A
/// `copy_wait` event times how long computation stands still for that.
void wait_for_copy(Device& device, Fence fence, Recorder* recorder);

}  // namespace ballast
