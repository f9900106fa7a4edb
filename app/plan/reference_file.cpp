#include "app/plan/reference_file.hpp"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>

#include "ballast_version.hpp"
#include "io/deck/deck_difference.hpp"
#include "io/files/text_file.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "io/model/safetensors.hpp"

namespace ballast {
namespace {

constexpr const char* kFormat = "ballast reference log probabilities";
// 1: without a checksum, marked by the weights alone; 2: by the ends of each tensor alone
constexpr std::int64_t kVersion = 3;

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

/// What the model computes beside its weights, and these: names, shapes and values of every tensor
/// of the folder that training begins with; without one, what initial values follow from.
std::uint64_t mark_of_model(const Config& config, const ModelShape& shape) {
  constexpr std::int64_t kPiece = 1 << 22;  // elements read at once
  const double settings[] = {shape.rms_eps,
                             shape.rope_theta,
                             shape.yarn_factor,
                             static_cast<double>(shape.original_context),
                             shape.llama3_factor,
                             shape.llama3_low,
                             shape.llama3_high,
                             static_cast<double>(shape.query_heads),
                             static_cast<double>(shape.kv_heads),
                             static_cast<double>(shape.qkv_bias + 2 * shape.qk_norm),
                             static_cast<double>(shape.tied_embedding)};
  std::uint64_t mark = XXH64(settings, sizeof settings, 1);
  const auto add = [&](const void* data, std::size_t bytes) { mark = XXH64(data, bytes, mark); };
  if (config.model.weights.empty()) {
    const std::int64_t sizes[] = {shape.layers,       shape.hidden,
                                  shape.intermediate, shape.head_dim,
                                  shape.vocabulary,   static_cast<std::int64_t>(config.run.seed)};
    add(sizes, sizeof sizes);
    add(&config.model.initial_std, sizeof config.model.initial_std);
    return mark;
  }
  const Safetensors files(config.model.weights);
  std::vector<std::string> names = files.names();
  std::sort(names.begin(), names.end());
  std::vector<float> piece;
  for (const std::string& name : names) {
    const SafetensorsEntry& entry = files.entry(name);
    add(name.data(), name.size());
    add(entry.shape.data(), entry.shape.size() * sizeof(std::int64_t));
    for (std::int64_t begin = 0; begin < entry.numel(); begin += kPiece) {
      piece.resize(static_cast<std::size_t>(std::min(kPiece, entry.numel() - begin)));
      files.read(name, begin, piece);
      add(piece.data(), piece.size() * sizeof(float));
    }
  }
  return mark;
}

std::uint64_t checksum(const ReferenceValues& values) {
  const std::uint64_t chosen =
      XXH64(values.chosen.data(), values.chosen.size() * sizeof(double), 0);
  return XXH64(values.rejected.data(), values.rejected.size() * sizeof(double), chosen);
}

/// What attends otherwise under `config` than when `file` was written; "" for nothing.
std::string other_attention(const hdf5::Handle& file, const Config& config,
                            const std::string& path) {
  if (!hdf5::exists(file, "deck")) {  // older files name the pattern alone
    const std::string before = hdf5::read_text_attribute(file, "attention");
    if (before == name(config.attention.pattern)) return "";
    return fmt::format("attention.pattern: {} before, {} now", before,
                       name(config.attention.pattern));
  }
  std::vector<std::string> found;
  for (const DeckDifference& d :
       deck_differences(hdf5::read_text(file, "deck"), config.effective_deck(), path))
    if (d.key.starts_with("attention.") || d.key == "dst.enabled" || d.key == "dst.base_budget")
      found.push_back(d.text());
  return fmt::format("{}", fmt::join(found, "; "));
}

bool is_reference(const hdf5::Handle& file) {
  return hdf5::has_attribute(file, "format") &&
         hdf5::read_text_attribute(file, "format") == kFormat;
}

}  // namespace

void check_reference_target(const Config& config) {
  const std::string& path = config.dpo.reference;
  const std::string why = unwritable(path + ".new");
  require(why.empty(), "dpo.reference = \"{}\" cannot be written: {}", path, why);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  bool ours = false;
  try {
    hdf5::silence();
    ours = std::filesystem::is_regular_file(path, ignored) && is_reference(hdf5::open_file(path));
  } catch (const Error&) {  // no HDF5 file
  }
  require(
      ours,
      "dpo.reference = \"{}\": this is there, holds no reference log probabilities and would be "
      "replaced; choose another name",
      path);
}

void need_reference(const Config& config) {
  std::error_code ignored;
  require(std::filesystem::is_regular_file(config.dpo.reference, ignored),
          "dpo.reference: {} is no file; `ballast reference DECK` writes it", config.dpo.reference);
}

ReferenceValues read_reference(const Config& config, const ModelShape& shape,
                               const Dataset& dataset) {
  need_reference(config);
  const std::string& path = config.dpo.reference;
  hdf5::silence();
  const hdf5::Handle file = hdf5::open_file(path);
  require(is_reference(file), "dpo.reference: {} holds no reference log probabilities", path);
  require(hdf5::read_int_attribute(file, "format_version") == kVersion,
          "dpo.reference: {} is of format {}, this program reads {}; run `ballast reference` again",
          path, hdf5::read_int_attribute(file, "format_version"), kVersion);
  require(hdf5::read_uint_attribute(file, "data") == mark_of_data(dataset),
          "dpo.reference: {} was computed from other data (tokens, template or masks) than {}; run "
          "`ballast reference` again",
          path, dataset.description());
  const std::uint64_t model = hdf5::read_uint_attribute(file, "model");
  require(model == mark_of_model(config, shape),
          "dpo.reference: {} was computed with another model ({}) than that which training begins "
          "with (weights, or keys of block model); run `ballast reference` again",
          path, hdf5::read_text_attribute(file, "weights_from"));
  ReferenceValues values{hdf5::read_vector<double>(file, "chosen"),
                         hdf5::read_vector<double>(file, "rejected"), model, ""};
  if (const std::string other = other_attention(file, config, path); !other.empty())
    values.note = fmt::format(
        "dpo.reference was computed with other attention ({}): the first loss is not ln 2", other);
  const auto samples = static_cast<std::size_t>(dataset.samples());
  require(values.chosen.size() == samples && values.rejected.size() == samples,
          "dpo.reference: {} holds {} pairs, the data {}", path, values.chosen.size(), samples);
  require(hdf5::read_uint_attribute(file, "checksum") == checksum(values),
          "dpo.reference: {} is damaged: its values are not those that were written; run `ballast "
          "reference` again",
          path);
  return values;
}

void write_reference(const Config& config, const ModelShape& shape, const Dataset& dataset,
                     const ReferenceValues& values) {
  const std::string &path = config.dpo.reference, &weights = config.model.weights;
  const std::string fresh = path + ".new";
  std::error_code error, ignored;
  try {
    hdf5::Handle file = hdf5::create_file(fresh);
    hdf5::write_attribute(file, "format", std::string(kFormat));
    hdf5::write_attribute(file, "format_version", kVersion);
    hdf5::write_attribute(file, "git_hash", std::string(git_hash()));
    hdf5::write_attribute(file, "data", mark_of_data(dataset));
    hdf5::write_attribute(file, "data_from", dataset.description());
    hdf5::write_attribute(file, "model", mark_of_model(config, shape));
    hdf5::write_attribute(file, "weights_from",
                          weights.empty() ? std::string("initial values") : weights);
    hdf5::write_text(file, "deck", config.effective_deck());
    hdf5::write_attribute(file, "checksum", checksum(values));
    hdf5::write_vector<double>(file, "chosen", values.chosen);
    hdf5::write_vector<double>(file, "rejected", values.rejected);
    file.close(fresh);
  } catch (const Error& e) {
    std::filesystem::remove(fresh, ignored);
    fail("dpo.reference: {} cannot be written: {}; look at the space and rights on its disk", path,
         e.what());
  }
  std::filesystem::rename(fresh, path, error);
  require(!error, "{} cannot be renamed to {}: {}", fresh, path, error.message());
}

}  // namespace ballast
