// Backend of a run: device, clock and compute dtype, chosen by the deck and by what this machine
// has.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/base/tensor.hpp"
#include "core/config/config.hpp"
#include "core/observe/events.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

struct BackendChoice {
  Device* device = nullptr;
  Clock* clock = nullptr;
  DType dtype = DType::f32;
  std::string note;  ///< one line when the deck's wish could not be met, or not well, else ""

  std::unique_ptr<Device> owned_device, owned_pinned;
  std::unique_ptr<Clock> owned_clock;
};

/// Which rank has no GPU, and why, or "": a run takes GPUs on all ranks or on none.  Collective.
std::string missing_gpu(const Communicator& world);

/// run.backend = "cuda" takes the GPU of this rank's number on its machine on every rank, or, when
/// any rank has none, the host on all of them with `note` saying why.  More ranks than GPUs on a
/// machine share them, and `note` says so.  Collective.
BackendChoice choose_backend(const Config& config, const Communicator& world);

/// On GPUs: micro-batches of any length up to `most_tokens` are to come, whose matrix products load
/// their kernels now rather than in whichever step needs them (cuda::expect_lengths).
void expect_lengths(const BackendChoice& backend, std::int64_t most_tokens);

/// On GPUs: matrix products choose their algorithms in the first steps, as they otherwise do once a
/// long run pays for it (cuda::try_products_after): for measurements of such runs.
void choose_products_early(const BackendChoice& backend);
/// Whether they wait with it, as a choice takes up to seconds (cuda::hold_trials).
void hold_choices(const BackendChoice& backend, bool held);
/// How many have waited so far; 0 on the host.
std::int64_t choices_put_off(const BackendChoice& backend);

}  // namespace ballast
