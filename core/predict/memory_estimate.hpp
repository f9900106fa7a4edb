// Memory estimate of one rank, by category, from the deck's numbers alone.  The categories are
// those of core/base/device.hpp, so that the estimate stands beside the measured peaks of the
// trace.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "core/base/device.hpp"
#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"

namespace ballast {

/// What one rank holds and computes.
struct MemoryInputs {
  ModelShape model;
  std::int64_t parameters = 0;  ///< trainable elements of this rank's stage
  std::int64_t frozen = 0;      ///< others: values alone
  int replicas = 1;             ///< ranks that hold the same parameters
  int zero = 0;                 ///< optimizer.zero
  DType type = DType::f32;      ///< of parameter values and activations; sums are fp64 beside fp64,
                                ///< fp32 otherwise
  bool last_stage = true;
  std::int64_t tokens =
      0;  ///< local tokens of the largest micro-batch: the fullest context-parallel rank's
  std::int64_t activation_bytes =
      0;  ///< kept from forward to backward (StageModel::activation_bytes)
  std::int64_t recomputed_bytes = 0;  ///< of one layer: recomputed in backward, hence scratch
  std::int64_t head_chunk_tokens = 1024;
  int cp = 1;                           ///< context-parallel ranks
  int sp = 1;                           ///< Ulysses ranks; `tokens` is one's part
  int kv_buffers = 0, dkv_buffers = 1;  ///< of the rank's RingPlan
  // Dependent chunks; 0 without.
  std::int64_t layers = 0;  ///< of the stage
  std::int64_t stored_tokens =
      0;  ///< local tokens of the longest sample, whose keys, values and their gradients are stored
  std::int64_t window_tokens =
      0;  ///< offload: local tokens of a window, two of which are on the device, and the stored
          ///< ones in host memory; 0: all on the device
  std::int64_t stored_inputs = 0;  ///< tokens of chunks whose stage input waits for a recompute
  bool host = true;                ///< reductions over MPI need receive space
};

struct MemoryEstimate {
  std::array<std::int64_t, kMemoryCategories> bytes{};  ///< by MemoryCategory
  std::int64_t total() const;  ///< of the device: without what is offloaded
  std::int64_t operator[](MemoryCategory category) const {
    return bytes[static_cast<std::size_t>(category)];
  }
};

/// Peak bytes of a training step.  Counts every tensor of more than a few rows; index lists and
/// message copies inside MPI are not in it.
MemoryEstimate estimate_memory(const MemoryInputs& inputs);

/// "1.50 GiB", "12.0 MiB", "640 B".
std::string bytes_text(double bytes);

}  // namespace ballast
