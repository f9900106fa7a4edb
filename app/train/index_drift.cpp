#include "app/train/index_drift.hpp"

#include "app/train/communicator_join.hpp"
#include "parallel/pattern/recall.hpp"

namespace ballast {
std::vector<DriftRow> IndexDrift::measure() {
  const AttentionOptions& options = session_.options.attention;
  const OutsideSteps quiet(session_.recorder);
  const StepPlan plan = planner_.evaluation({sample_});
  const std::vector<MicroBatch> mine = plan.list(session_.mesh.at.dp);
  ChunkStores stores = session_.chunk_stores(plan);
  std::vector<DriftRow> rows;
  const auto measure_made = [&](int m, const AttentionInputs& in, const AttentionAxes& axes,
                                const std::vector<AttentionWork>& made) {
    const CommunicatorJoin ring(session_.mesh.ring(mine[m].sp));
    const KeyAxis axis = key_axis(axes);
    const int first_head =
        session_.mesh.sequence(mine[m].sp).rank() * static_cast<int>(in.q.size(1));
    // The same queries every time: what differs is weights and indexes.
    const std::vector<SampledQuery> queries = sample_queries(
        axes, axis, options.recall_rows, options.whole_tokens(), options.recall_seed, 0, in.layer);
    const auto held = [&](const std::vector<AttentionWork>& calls) {
      return measure_recall(axes, axis, queries, in, calls, first_head, ring);
    };
    const auto [kept, fresh] = before_.try_emplace({m, in.layer}, made);
    if (fresh) return;
    const std::vector<RecallRow> now = held(made), before = held(kept->second);
    // All ranks of a ring have the same; a group's others have other heads.
    for (std::size_t h = 0; h < now.size() && session_.mesh.ring(mine[m].sp).rank() == 0; ++h)
      rows.push_back({in.layer, now[h].head, now[h].queries, now[h].mean, before[h].mean});
    kept->second = made;
  };
  const auto prepare = [&](int m) {
    session_.index_made = [&, m](const AttentionInputs& in, const AttentionAxes& axes,
                                 const std::vector<AttentionWork>& made) {
      measure_made(m, in, axes, made);
    };
    return session_.prepare(plan, m, 0, stores.at(m));
  };
  run_stage(plan.schedule(session_.mesh.at.dp), static_cast<int>(mine.size()), session_.model,
            session_.links, {prepare, {}, {}, nullptr}, nullptr);
  session_.index_made = nullptr;
  return rows;
}

}  // namespace ballast
