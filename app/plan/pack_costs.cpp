#include "app/plan/pack_costs.hpp"

#include <algorithm>
#include <map>
#include <memory>

#include "app/plan/latency.hpp"
#include "core/config/run_options.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/memory_estimate.hpp"
#include "kernels/model/layer.hpp"
#include "kernels/model/stage_model.hpp"

namespace ballast {
namespace {

DType compute_type(const Deck& deck) {
  if (deck.text("run.backend") == "cuda") return DType::bf16;
  return deck.text("run.precision") == "fp64" ? DType::f64 : DType::f32;
}

/// Latency models over one table by degree and recomputation.
class TableTimes {
 public:
  TableTimes(const Deck& deck, std::vector<std::string>& notes)
      : table_(load_profile(deck, notes)),
        options_(latency_options(deck, deck.text("attention.pattern"))),
        layers_(static_cast<int>(model_shape(deck).layers)) {
    full_ = std::any_of(table_.rows.begin(), table_.rows.end(),
                        [](const ProfileRow& r) { return r.recompute == "full"; });
  }
  double seconds(const MicroBatch& pack, int ranks, int layers) {
    const LayerTime kept = model("none", ranks).predict(pack);
    // Without a measured series, recomputation costs one more forward.
    const double again =
        full_ ? model("full", ranks).predict(pack).total_s() : kept.total_s() + kept.forward_s;
    return (layers_ - layers) * kept.total_s() + layers * again +
           model("none", ranks).head(pack.tokens()).total_s();
  }
  /// Kept by one layer; 0 where it was not measured.
  double kept_bytes(bool recomputed, std::int64_t tokens) {
    return recomputed && !full_ ? 0
                                : model(recomputed ? "full" : "none", 1).activation_bytes(tokens);
  }

 private:
  const LatencyModel& model(const std::string& recompute, int ranks) {
    auto& made = models_[{recompute, ranks}];
    if (!made) {
      LatencyOptions options = options_;
      options.recompute = recompute;
      options.sp = ranks;
      made = std::make_unique<LatencyModel>(table_, options);
    }
    return *made;
  }
  ProfileTable table_;
  LatencyOptions options_;
  int layers_;
  bool full_ = false;
  std::map<std::pair<std::string, int>, std::unique_ptr<LatencyModel>> models_;
};

/// Memory estimate of `check` for one rank's part of a pack; activations as measured where the
/// table has them.
double rank_bytes(const Deck& deck, const RunOptions& options, std::int64_t tokens, int ranks,
                  int layers, TableTimes* table) {
  const MeshShape& mesh = options.mesh;
  const ModelShape& model = options.model;
  MemoryInputs in;
  in.model = model;
  in.parameters = model.parameters();
  in.replicas = mesh.replicas();
  in.zero = static_cast<int>(deck.integer("optimizer.zero"));
  in.type = compute_type(deck);
  const std::int64_t shares = std::int64_t{ranks} * mesh.cp();
  in.tokens = (tokens + shares - 1) / shares;
  const RecomputeOptions recompute{Recompute::full, layers};
  in.activation_bytes =
      StageModel::activation_bytes(model, model.layers, true, in.tokens, in.type, recompute);
  const double kept = table ? table->kept_bytes(false, in.tokens) : 0;
  if (kept > 0) {
    const double input = table->kept_bytes(true, in.tokens);
    const double a_recomputed =
        input > 0 ? input
                  : static_cast<double>(Layer::kept_bytes(model, in.tokens, in.type, Keep::input));
    in.activation_bytes =
        static_cast<std::int64_t>(kept * static_cast<double>(model.layers - layers) +
                                  a_recomputed * layers) +
        StageModel::activation_bytes(model, 0, true, in.tokens, in.type, {});
  }
  if (layers > 0)
    in.recomputed_bytes = Layer::kept_bytes(model, in.tokens, in.type, Keep::all) -
                          Layer::kept_bytes(model, in.tokens, in.type, Keep::input);
  in.head_chunk_tokens = deck.integer("model.head_chunk_tokens");
  in.cp = mesh.cp();
  in.sp = ranks;
  in.host = deck.text("run.backend") == "host";
  return static_cast<double>(estimate_memory(in).total());
}

}  // namespace

int recomputed_layers(const Deck& deck) {
  if (deck.text("recompute.mode") != "full") return 0;
  const int layers = static_cast<int>(deck.integer("recompute.layers")),
            all = static_cast<int>(model_shape(deck).layers);
  return layers < 0 ? all : layers;
}

std::optional<PackCosts> pack_costs(const Deck& deck, std::vector<std::string>& notes) {
  const RunOptions options = RunOptions::from(deck);
  PackCosts costs;
  std::shared_ptr<TableTimes> table;
  if (!deck.text("profile.table").empty()) {
    table = std::make_shared<TableTimes>(deck, notes);
    costs.seconds = [table](const MicroBatch& pack, int ranks, int layers) {
      return table->seconds(pack, ranks, layers);
    };
  } else if (deck.is_set("costs.forward_token_s")) {
    const double token = deck.real("costs.forward_token_s"),
                 pair = deck.real("costs.forward_pair_s"),
                 backward = deck.real("costs.backward_over_forward");
    const double cp = options.mesh.cp(), exchange = deck.real("costs.exchange_token_s"),
                 all = static_cast<double>(std::max<std::int64_t>(1, options.model.layers));
    costs.seconds = [=](const MicroBatch& pack, int ranks, int layers) {
      const double tokens = static_cast<double>(pack.tokens()), r = ranks;
      return ((token * tokens + pair * pack.attention_pairs()) * (1 + backward + layers / all) +
              exchange * tokens * (1 - 1 / r)) /
             (r * cp);
    };
  } else {
    return std::nullopt;
  }
  costs.bytes = [deck, options, table](std::int64_t tokens, int ranks, int layers) {
    return rank_bytes(deck, options, tokens, ranks, layers, table.get());
  };
  return costs;
}

}  // namespace ballast
