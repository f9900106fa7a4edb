// Against Hugging Face Transformers: log probabilities of every token, loss and all gradients of
// the models under tests/reference, whose make_reference.py computed them in fp32; read as any
// Hugging Face folder, run on one rank and on every mesh of the ranks at hand.
#include <filesystem>

#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"
#include "kernels/model/stage_model.hpp"
#include "parallel/context/ring_attention.hpp"
#include "parallel/optimizer/zero.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "parallel/pipeline/stage_executor.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::elements;

struct Reference {
  explicit Reference(const std::string& name)
      : folder((std::filesystem::path(BALLAST_TESTS_DIR) / "reference" / name).string()),
        file(folder + "/reference.safetensors") {
    for (int s = 0; file.contains("tokens." + std::to_string(s)); ++s) {
      tokens.push_back(read("tokens." + std::to_string(s)));
      log_probabilities.push_back(read("log_probabilities." + std::to_string(s)));
      targets += static_cast<std::int64_t>(tokens.back().size()) - 1;
    }
    loss = read("loss").at(0);
  }
  std::vector<double> read(const std::string& name) const {
    std::vector<double> values(static_cast<std::size_t>(file.entry(name).numel()));
    file.read(name, 0, std::span<double>(values));
    return values;
  }
  std::string folder;
  Safetensors file;
  std::vector<std::vector<double>> tokens, log_probabilities;  // [sample][token (, word)]
  std::int64_t targets = 0;
  double loss = 0;
};

/// The model of a reference on this rank of a mesh, loaded as `train` does: each rank reads its
/// shard.
struct Loaded {
  Loaded(const Reference& reference, const Mesh& mesh, DType type, int zero)
      : shape(read_huggingface_config(reference.folder)),
        parameters(parameter_table(shape), type, host_device(), mesh.replica.size(), 1 << 14),
        model(shape, 0, shape.layers, parameters, {}, nullptr, 40),
        optimizer(parameters, mesh.replica, zero, {}, nullptr),
        ring{mesh.cp, plan_ring(mesh.at.cp(mesh.shape), mesh.shape.cp_outer, mesh.shape.cp_inner)} {
    for (const ShardRun& run : optimizer.runs()) {
      Tensor part = optimizer.state().master.rows(run.at, run.at + run.count());
      read_huggingface_weights(reference.folder, parameters.table(), run.begin, run.end, part);
    }
    optimizer.values_from_master();
  }

  /// `target(sample, position)`: -1 where there is no loss.
  MicroBatchWork prepare(const Reference& reference, const MicroBatch& micro_batch, int cp,
                         const std::function<std::int32_t(std::int64_t, std::int64_t)>& target,
                         double scale) const {
    const SequenceLayout layout(LayoutKind::zigzag, micro_batch.tokens(), cp, 1);
    MicroBatchWork work;
    const auto mine = local_tokens(micro_batch, layout, ring.plan.rank);
    const auto n = static_cast<std::int64_t>(mine.size());
    for (Tensor* t : {&work.batch.tokens, &work.batch.targets, &work.batch.positions})
      *t = Tensor::empty({n}, DType::i32);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t sample = micro_batch.segments[mine[i].segment].sample,
                         position = mine[i].position;
      work.batch.tokens.data<std::int32_t>()[i] =
          static_cast<std::int32_t>(reference.tokens[sample][position]);
      work.batch.targets.data<std::int32_t>()[i] = target(sample, position);
      work.batch.positions.data<std::int32_t>()[i] = static_cast<std::int32_t>(position);
      work.batch.segment.push_back(mine[i].segment);
    }
    work.attention = std::make_unique<RingAttention>(
        ring, dense_source(micro_batch, layout, ring.plan.rank, nullptr), nullptr);
    work.batch.loss_scale = scale;
    return work;
  }

  ModelShape shape;
  Parameters parameters;
  StageModel model;
  ShardedOptimizer optimizer;
  RingGroup ring;
};

MicroBatch all_samples(const Reference& reference) {
  MicroBatch packed;
  for (std::size_t s = 0; s < reference.tokens.size(); ++s)
    packed.segments.push_back(
        {static_cast<std::int64_t>(s), 0, static_cast<std::int64_t>(reference.tokens[s].size())});
  return packed;
}

class TransformersParity : public ::testing::TestWithParam<const char*> {};

TEST_P(TransformersParity, LogProbabilityOfEveryWord) {
  const Reference reference(GetParam());
  const Communicator self;
  const Mesh alone(self, MeshShape());
  for (const DType type : {DType::f32, DType::f64}) {
    Loaded loaded(reference, alone, type, 0);
    const MicroBatch packed = all_samples(reference);
    double worst = 0;
    const Communicator world = Communicator::world();
    for (std::int32_t word = world.rank(); word < loaded.shape.vocabulary;
         word += world.size()) {  // the ranks share the words
      // With one word as every token's target, the token losses are the word's negative log
      // probabilities.
      MicroBatchWork work = loaded.prepare(
          reference, packed, 1, [&](auto, auto) { return word; }, 0);
      const std::vector<double> losses =
          elements(loaded.model.forward(work.batch, {}, *work.attention, nullptr).token_loss);
      std::size_t at = 0;
      for (std::size_t s = 0; s < reference.tokens.size(); ++s)
        for (std::size_t i = 0; i < reference.tokens[s].size(); ++i, ++at)
          worst = std::max(
              worst, std::abs(losses[at] +
                              reference.log_probabilities[s][i * loaded.shape.vocabulary + word]));
    }
    EXPECT_LT(worst, 1e-5) << name(type);
  }
}

TEST_P(TransformersParity, LossAndEveryGradientOnEveryMesh) {
  const Reference reference(GetParam());
  const int ranks = Communicator::world().size();
  std::size_t turn = 0;
  for (const MeshShape& shape : testing::data_and_context_meshes(ranks)) {
    const Mesh& mesh = testing::mesh_of(shape);
    std::vector<std::pair<DType, int>> modes = {{DType::f32, 1}, {DType::f64, 2}, {DType::f64, 0}};
    if (ranks > 2)
      modes = {modes[turn++ %
                     modes.size()]};  // more ranks than cores are slow: one mode a mesh, in turn
    for (const auto& [type, zero] : modes) {
      Loaded loaded(reference, mesh, type, zero);
      // One pack on the first data-parallel rank; the others join the reduction with nothing, as
      // ranks without micro-batches do.
      const auto next = [&](std::int64_t s, std::int64_t i) {
        const auto& tokens = reference.tokens[s];
        return i + 1 < static_cast<std::int64_t>(tokens.size())
                   ? static_cast<std::int32_t>(tokens[i + 1])
                   : -1;
      };
      loaded.optimizer.begin_step();
      double loss = 0;
      if (mesh.at.dp == 0) {
        MicroBatchWork work = loaded.prepare(reference, all_samples(reference), shape.cp(), next,
                                             1.0 / static_cast<double>(reference.targets));
        StageActivationsPtr saved;
        loss = loaded.model.forward(work.batch, {}, *work.attention, &saved).loss_sum();
        loaded.model.backward(work.batch, std::move(saved), *work.attention, {});
      }
      loaded.optimizer.end_round();
      loaded.optimizer.reduce_gradients();
      const double norm = std::sqrt(loaded.optimizer.squared_norm());
      loss = mesh.replica.all_reduce(loss) / static_cast<double>(reference.targets);
      EXPECT_NEAR(loss, reference.loss, 1e-6) << describe(shape);
      // Each rank compares its shard; the sums of all parameters are joined at once.
      const auto& table = loaded.parameters.table();
      const auto& slices = loaded.optimizer.slices();
      std::vector<double> sums(2 * table.size(), 0.0);
      double squares = 0;
      for (std::size_t p = 0; p < table.size(); ++p) {
        const std::vector<double> expected = reference.read("gradient." + table[p].name);
        const std::int64_t first = loaded.parameters.offset(table[p].name),
                           last = first + table[p].numel();
        for (double g : expected) squares += g * g;
        for (std::size_t b = 0; b < slices.size(); ++b) {
          const std::vector<double> slice = elements(loaded.optimizer.shard_gradient(b));
          const std::int64_t begin = slices[b].begin;
          for (std::int64_t i = std::max(first, begin); i < std::min(last, slices[b].end); ++i) {
            const double wanted = expected[static_cast<std::size_t>(i - first)],
                         difference = slice[static_cast<std::size_t>(i - begin)] - wanted;
            sums[2 * p] += difference * difference;
            sums[2 * p + 1] += wanted * wanted;
          }
        }
      }
      Tensor joined =
          Tensor::wrap(sums.data(), {static_cast<std::int64_t>(sums.size())}, DType::f64);
      mesh.replica.all_reduce(joined);
      for (std::size_t p = 0; p < table.size(); ++p) {
        ASSERT_GT(sums[2 * p + 1], 0) << table[p].name;
        EXPECT_LT(std::sqrt(sums[2 * p] / sums[2 * p + 1]), 1e-5)
            << table[p].name << ", " << name(type) << ", " << describe(shape);
      }
      EXPECT_NEAR(norm / std::sqrt(squares), 1, 1e-6) << describe(shape);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, TransformersParity,
                         ::testing::Values("qwen2", "qwen2_yarn", "llama3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace ballast
