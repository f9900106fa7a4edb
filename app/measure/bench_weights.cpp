#include "app/measure/bench_weights.hpp"

#include "app/train/checkpointing.hpp"
#include "app/train/model_files.hpp"

namespace ballast {

void take_weights(Session& session, const std::string& checkpoint) {
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica,
                             session.config.optimizer.zero, {}, nullptr,
                             muon_options(session.config));
  load_base(session);
  check_all(session.mesh.world, checkpoint != "latest" && checkpoint != "best",
            fmt::format("bench setting checkpoint={}: no run folder is known here; name the file",
                        checkpoint));
  if (!checkpoint.empty())
    restore(session, optimizer, checkpoint, "", false);
  else if (!session.config.model.weights.empty())
    load_weights(session, optimizer);
}

}  // namespace ballast
