#include "core/config/deck.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/config/deck_schema.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/presets.hpp"

namespace ballast {
namespace {

/// The keys of a model's shape with their values.
std::vector<std::pair<std::string, DeckValue>> shape_values(const ModelShape& s) {
  return {{"model.layers", s.layers},
          {"model.hidden", s.hidden},
          {"model.intermediate", s.intermediate},
          {"model.query_heads", s.query_heads},
          {"model.kv_heads", s.kv_heads},
          {"model.head_dim", s.head_dim},
          {"model.vocabulary", s.vocabulary},
          {"model.qkv_bias", s.qkv_bias},
          {"model.qk_norm", s.qk_norm},
          {"model.tied_embedding", s.tied_embedding},
          {"model.rms_eps", s.rms_eps},
          {"model.rope_theta", s.rope_theta},
          {"model.original_context", s.original_context},
          {"model.yarn_factor", s.yarn_factor},
          {"model.llama3_factor", s.llama3_factor},
          {"model.llama3_low", s.llama3_low},
          {"model.llama3_high", s.llama3_high}};
}

/// Shape keys that stretch a model's context: choices of a run rather than of the model.
const std::set<std::string>& context_keys() {
  static const std::set<std::string> keys = {"model.rope_theta",  "model.original_context",
                                             "model.yarn_factor", "model.llama3_factor",
                                             "model.llama3_low",  "model.llama3_high"};
  return keys;
}

}  // namespace

const DeckValue& Deck::value(const std::string& path) const {
  if (const auto found = entries_.find(path); found != entries_.end()) return found->second.value;
  const KeySpec* spec = find_key(path);
  if (spec == nullptr) throw std::logic_error("the deck schema has no key " + path);
  return spec->default_value;
}

Origin Deck::origin(const std::string& path) const {
  const auto found = entries_.find(path);
  return found == entries_.end() ? Origin::unset : found->second.origin;
}

void Deck::set(const std::string& path, DeckValue value, std::string place, Origin origin) {
  const KeySpec* spec = find_key(path);
  if (spec == nullptr) throw std::logic_error("the deck schema has no key " + path);
  if (spec->default_value.index() != value.index())
    throw std::logic_error(fmt::format("deck key {} is {}, not {}", path,
                                       type_name(spec->default_value), type_name(value)));
  entries_[path] = {std::move(value), std::move(place), origin};
}

void Deck::apply_preset() {
  const std::string preset = text("model.preset");
  const auto& known = model_presets();
  if (std::find(known.begin(), known.end(), preset) == known.end()) return;
  for (auto& [path, value] : shape_values(model_preset(preset)))
    if (!is_set(path)) set(path, std::move(value), "preset " + preset, Origin::preset);
}

void Deck::drop_shape() {
  for (const auto& [path, value] : shape_values(ModelShape()))
    if (context_keys().count(path) == 0) entries_.erase(path);
}

std::vector<Problem> Deck::apply_weights(const ModelShape& shape) {
  const std::set<std::string>& free = context_keys();
  const std::string folder = text("model.weights");
  if (origin("model.weights") == Origin::command_line && origin("model.preset") == Origin::file)
    entries_.erase("model.preset");
  Deck stated = *this;
  stated.apply_preset();
  std::vector<Problem> problems;
  std::vector<std::string> of_preset;
  for (auto& [path, value] : shape_values(shape)) {
    const bool contradicts =
        stated.is_set(path) && free.count(path) == 0 && stated.value(path) != value;
    if (contradicts && stated.origin(path) == Origin::preset)
      of_preset.push_back(fmt::format("{} {} against {}", path.substr(path.find('.') + 1),
                                      to_text(stated.value(path)), to_text(value)));
    else if (contradicts)
      problems.push_back({{path},
                          fmt::format("{} = {} contradicts {} in {}/config.json (model.weights)",
                                      path, to_text(stated.value(path)), to_text(value), folder),
                          "leave the key out"});
    if (!is_set(path)) set(path, std::move(value), "weights " + folder, Origin::weights);
  }
  if (!of_preset.empty())
    problems.push_back(
        {{"model.preset"},
         fmt::format("model.preset = {} is another shape than {}/config.json (model.weights): {}",
                     quoted(text("model.preset")), folder, fmt::join(of_preset, ", ")),
         "set model.preset = \"custom\", the shape comes from the weights"});
  return problems;
}

bool Deck::states_shape() const {
  Deck stated = *this;
  stated.apply_preset();
  const auto values = shape_values(ModelShape());
  return std::all_of(values.begin(), values.end(),
                     [&](const auto& v) { return stated.is_set(v.first); });
}

Config Deck::config() const {
  Deck whole = *this;
  whole.apply_preset();
  Config config;
  config.from.file = file;
  config.from.case_name = case_name;
  for (const auto& [path, entry] : whole.entries_) {
    find_key(path)->fill(config, entry.value);
    config.from.settings[path] = {entry.origin, entry.place};
  }
  return config;
}

}  // namespace ballast
