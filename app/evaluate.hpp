// Held-out loss over the validation split.
#pragma once
#include "app/session.hpp"

namespace ballast {

struct Evaluation {
  double loss = 0;  ///< mean token loss over the held-out tokens
  std::int64_t loss_tokens = 0, samples = 0;
};

/// Forward passes over the first `samples` validation samples (0: all), spread over the mesh like a training batch.  Collective.
Evaluation evaluate(Session& session, std::int64_t samples);

}  // namespace ballast
