#include "app/train/pair_reference.hpp"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>

#include "ballast_version.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "io/model/safetensors.hpp"

namespace ballast {
namespace {

constexpr const char* kFormat = "ballast reference log probabilities";

/// Tokens and targets of every pair, so that another tokenizer, template or mask is other data.
std::uint64_t mark_of_data(const Dataset& dataset) {
  std::uint64_t mark = 0;
  std::vector<std::int32_t> ids;
  for (std::int64_t s = 0; s < dataset.samples(); ++s) {
    const std::int64_t tokens = dataset.length(s), chosen = dataset.chosen_tokens(s);
    ids.resize(static_cast<std::size_t>(2 * tokens));
    const std::span<std::int32_t> all(ids);
    dataset.tokens(s, 0, tokens, all.first(static_cast<std::size_t>(tokens)));
    dataset.targets(s, 0, tokens, all.last(static_cast<std::size_t>(tokens)));
    mark = XXH64(&chosen, sizeof chosen, mark);
    mark = XXH64(ids.data(), ids.size() * sizeof(std::int32_t), mark);
  }
  return mark;
}

/// Names, shapes and elements at both ends of every tensor of the folder that training begins with;
/// without one, what initial values follow from.
std::uint64_t mark_of_weights(const Config& config, const ModelShape& shape) {
  constexpr std::int64_t kEnds = 4096;
  std::uint64_t mark = 1;
  const auto add = [&](const void* data, std::size_t bytes) { mark = XXH64(data, bytes, mark); };
  if (config.model.weights.empty()) {
    const std::int64_t sizes[] = {shape.layers,       shape.hidden,
                                  shape.intermediate, shape.query_heads,
                                  shape.kv_heads,     shape.head_dim,
                                  shape.vocabulary,   static_cast<std::int64_t>(config.run.seed)};
    add(sizes, sizeof sizes);
    add(&config.model.initial_std, sizeof config.model.initial_std);
    return mark;
  }
  const Safetensors files(config.model.weights);
  std::vector<std::string> names = files.names();
  std::sort(names.begin(), names.end());
  std::vector<float> ends;
  for (const std::string& name : names) {
    const SafetensorsEntry& entry = files.entry(name);
    add(name.data(), name.size());
    add(entry.shape.data(), entry.shape.size() * sizeof(std::int64_t));
    const std::int64_t count = std::min(entry.numel(), kEnds);
    ends.resize(static_cast<std::size_t>(count));
    for (const std::int64_t begin : {std::int64_t{0}, entry.numel() - count}) {
      files.read(name, begin, ends);
      add(ends.data(), ends.size() * sizeof(float));
    }
  }
  return mark;
}

std::vector<PairLogProbabilities> read_file(const Session& session) {
  const std::string& path = session.config.dpo.reference;
  require(std::filesystem::is_regular_file(path),
          "dpo.reference: {} is no file; `ballast reference DECK` writes it", path);
  hdf5::silence();
  const hdf5::Handle file = hdf5::open_file(path);
  require(
      hdf5::has_attribute(file, "format") && hdf5::read_text_attribute(file, "format") == kFormat,
      "dpo.reference: {} holds no reference log probabilities", path);
  require(hdf5::read_uint_attribute(file, "data") == mark_of_data(*session.dataset),
          "dpo.reference: {} was computed from other data (tokens, template or masks) than {}; run "
          "`ballast reference` again",
          path, session.dataset->description());
  require(hdf5::read_uint_attribute(file, "weights") ==
              mark_of_weights(session.config, session.options.model),
          "dpo.reference: {} was computed with other weights ({}) than those that training begins "
          "with; run `ballast reference` again",
          path, hdf5::read_text_attribute(file, "weights_from"));
  const auto chosen = hdf5::read_vector<double>(file, "chosen"),
             rejected = hdf5::read_vector<double>(file, "rejected");
  const auto samples = static_cast<std::size_t>(session.dataset->samples());
  require(chosen.size() == samples && rejected.size() == samples,
          "dpo.reference: {} holds {} pairs, the data {}", path, chosen.size(), samples);
  std::vector<PairLogProbabilities> pairs;
  for (std::size_t p = 0; p < samples; ++p) pairs.push_back({chosen[p], rejected[p]});
  return pairs;
}

}  // namespace

std::vector<PairLogProbabilities> read_pair_reference(const Session& session) {
  if (session.config.dpo.reference_free) return {};
  const Communicator& world = session.mesh.world;
  std::vector<PairLogProbabilities> pairs(static_cast<std::size_t>(session.dataset->samples()));
  together(world, [&] {
    if (world.rank() == 0) pairs = read_file(session);
  });
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
    const std::string& path = session.config.dpo.reference;
    const std::string fresh = path + ".new";
    std::vector<double> chosen, rejected;
    for (const PairLogProbabilities& pair : pairs) {
      chosen.push_back(pair.chosen);
      rejected.push_back(pair.rejected);
    }
    {
      hdf5::Handle file = hdf5::create_file(fresh);
      hdf5::write_attribute(file, "format", std::string(kFormat));
      hdf5::write_attribute(file, "format_version", std::int64_t{1});
      hdf5::write_attribute(file, "git_hash", std::string(git_hash()));
      hdf5::write_attribute(file, "data", mark_of_data(*session.dataset));
      hdf5::write_attribute(file, "data_from", session.dataset->description());
      hdf5::write_attribute(file, "weights",
                            mark_of_weights(session.config, session.options.model));
      const std::string& weights = session.config.model.weights;
      hdf5::write_attribute(file, "weights_from",
                            weights.empty() ? std::string("initial values") : weights);
      hdf5::write_vector<double>(file, "chosen", chosen);
      hdf5::write_vector<double>(file, "rejected", rejected);
      file.close(fresh);
    }
    std::error_code error;
    std::filesystem::rename(fresh, path, error);
    require(!error, "{} cannot be renamed to {}: {}", fresh, path, error.message());
  });
}

}  // namespace ballast
