#include "app/train/pair_reference.hpp"

#include "app/plan/reference_file.hpp"

namespace ballast {

std::vector<PairLogProbabilities> read_pair_reference(Session& session) {
  if (session.config.dpo.reference_free) return {};
  const Communicator& world = session.mesh.world;
  std::vector<PairLogProbabilities> pairs(static_cast<std::size_t>(session.dataset->samples()));
  together(world, [&] {
    if (world.rank() != 0) return;
    const ReferenceValues values =
        read_reference(session.config, session.options.model, *session.dataset);
    for (std::size_t p = 0; p < pairs.size(); ++p)
      pairs[p] = {values.chosen[p], values.rejected[p]};
    session.reference_model = values.model;
    session.reference_note = values.note;
  });
  session.reference_model =
      std::stoull(world.broadcast(fmt::to_string(session.reference_model), 0));
  static_assert(sizeof(PairLogProbabilities) == 2 * sizeof(double));
  Tensor all = Tensor::wrap(&pairs.data()->chosen, {2 * static_cast<std::int64_t>(pairs.size())},
                            DType::f64);
  world.broadcast(all, 0);
  return pairs;
}

void load_pairs(Session& session) {
  if (trains_pairs(session.config))
    session.pairs = std::make_unique<PairObjective>(session.config.dpo, session.mesh,
                                                    read_pair_reference(session));
}

void write_pair_reference(const Session& session, const std::vector<PairLogProbabilities>& pairs) {
  together(session.mesh.world, [&] {
    if (session.mesh.world.rank() != 0) return;
    ReferenceValues values;
    for (const PairLogProbabilities& pair : pairs) {
      values.chosen.push_back(pair.chosen);
      values.rejected.push_back(pair.rejected);
    }
    write_reference(session.config, session.options.model, *session.dataset, values);
  });
}

}  // namespace ballast
