#include "app/plan/latency.hpp"

#include <algorithm>
#include <fstream>
#include <regex>

#include "app/train/deck_options.hpp"
#include "ballast_version.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/predict/latency_model.hpp"
#include "io/profile/profile_file.hpp"

namespace ballast {
namespace {

std::string layer_text(const ModelShape& m) {
  return fmt::format("hidden {}, intermediate {}, {} query and {} key/value heads of {}{}",
                     m.hidden, m.intermediate, m.query_heads, m.kv_heads, m.head_dim,
                     m.qkv_bias ? ", qkv bias" : "");
}

/// The kind of device, whichever of them this rank has: without a GPU's number, with the host's
/// processor.
std::string hardware_text(const Device& device) {
  std::string text = std::regex_replace(device.description(), std::regex(" #[0-9]+"), "");
  if (device.space() != Space::host) return text;
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);)
    if (line.starts_with("model name"))
      return text + ", " + line.substr(std::min(line.size(), line.find(':') + 2));
  return text;
}

}  // namespace

std::map<std::string, std::string> planned_identity(const Deck& deck) {
  return {{"layer", layer_text(model_shape(deck))}, {"dtype", name(planned_type(deck))}};
}

std::map<std::string, std::string> measured_identity(const Deck& deck, const Device& device,
                                                     DType type) {
  return {{"layer", layer_text(model_shape(deck))},
          {"dtype", name(type)},
          {"hardware", hardware_text(device)},
          {"kernels", kernel_hash()}};
}

ProfileTable load_profile(const Deck& deck, std::vector<std::string>& notes, const Device* device) {
  const std::string& path = deck.text("profile.table");
  require(!path.empty(),
          "{}: profile.table names no profile table; measure one with `ballast profile`",
          deck.file);
  const ProfileTable table = read_profile(path);
  const auto here = device == nullptr ? planned_identity(deck)
                                      : measured_identity(deck, *device, planned_type(deck));
  notes = identity_differences(path, table, here, deck.boolean("profile.allow_mismatch"));
  if (const auto hardware = table.identity.find("hardware");
      device == nullptr && hardware != table.identity.end())
    notes.push_back(fmt::format("times of {}, measured on {}", path, hardware->second));
  try {
    return checked(table, deck.real("profile.repair_limit"), notes);
  } catch (const Error& e) {
    fail("{}: {}", path, e.what());
  }
}

LatencyOptions latency_options(const Deck& deck, const std::string& pattern) {
  const ModelShape m = model_shape(deck);
  const MeshShape mesh = mesh_shape(deck);
  LatencyOptions options;
  options.pattern = pattern;
  options.recompute = deck.text("recompute.mode");
  options.sp = mesh.sp;
  options.cp = mesh.cp();
  options.exchange_bytes_per_token =
      static_cast<double>(2 * (m.query_heads + m.kv_heads) * m.head_dim) *
      static_cast<double>(size_of(planned_type(deck)));
  return options;
}

std::string budget_pattern(const Deck& deck) {
  const std::string& pattern = deck.text("attention.pattern");
  return pattern == "moba" || pattern == "vertical_slash" ? pattern : "dense";
}

std::int64_t budget_block_tokens(const Deck& deck) {
  return budget_pattern(deck) == "moba" ? deck.integer("attention.moba_block") : kBlock;
}

LatencyModel latency_model(const Deck& deck, std::vector<std::string>& notes,
                           const Device* device) {
  const std::string pattern = budget_pattern(deck);
  if (!deck.text("profile.table").empty()) {
    const ProfileTable table = load_profile(deck, notes, device);
    require(pattern == "dense" || table.block_tokens == budget_block_tokens(deck),
            "{}: budgets of profile table {} count blocks of {} tokens, the deck's of {}; measure "
            "a table for the deck's with `ballast profile`",
            deck.file, deck.text("profile.table"), table.block_tokens, budget_block_tokens(deck));
    return LatencyModel(table, latency_options(deck, pattern));
  }
  const double pair_s = deck.real("costs.forward_pair_s");
  require(pair_s > 0,
          "{}: latency is predicted from a profile.table, or from costs.forward_token_s and "
          "costs.forward_pair_s above 0",
          deck.file);
  const double per_stage = static_cast<double>(
      std::max<std::int64_t>(1, model_shape(deck).layers / mesh_shape(deck).pp));
  LatencyOptions options = latency_options(deck, pattern);
  options.recompute = "none";
  return LatencyModel(
      stated_profile(deck.real("costs.forward_token_s") / per_stage, pair_s / per_stage,
                     deck.real("costs.backward_over_forward"), pattern, budget_block_tokens(deck)),
      options);
}

DstOptions dst_options(const Deck& deck) {
  DstOptions options{deck.config().dst.anchor, deck.real("dst.threshold"),
                     deck.integer("dst.base_budget"),
                     deck.get<std::vector<std::int64_t>>("dst.budgets")};
  if (options.base_budget == 0) options.base_budget = deck.integer("attention.moba_top_k");
  if (options.candidates.empty()) options.candidates = default_candidates(options.base_budget);
  return options;
}

}  // namespace ballast
