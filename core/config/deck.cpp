#include "core/config/deck.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/model/model_shape.hpp"

namespace ballast {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// Optimal string alignment distance: insertions, deletions, substitutions and swaps of neighbours.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

/// TOML basic string: quotes, backslashes and control characters escaped.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
          out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
        else
          out += c;
    }
  }
  return out + '"';
}

/// TOML float: shortest text that reads back as the same number.
std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string number_text(double value) {
  return std::floor(value) == value && std::abs(value) < 1e15 ? fmt::format("{:.0f}", value)
                                                              : fmt::format("{}", value);
}

/// Problem of one number against the key's bounds.
bool in_range(const KeySpec& spec, double value) {
  if (!std::isfinite(value)) return false;
  if (spec.minimum && (spec.above ? value <= *spec.minimum : value < *spec.minimum)) return false;
  if (spec.maximum && (spec.below ? value >= *spec.maximum : value > *spec.maximum)) return false;
  return true;
}

/// Allowed values as a list of TOML strings.
std::string listed(const std::vector<std::string>& values) {
  std::string text;
  for (const auto& v : values) text += (text.empty() ? "" : ", ") + quoted(v);
  return text;
}

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

const KeySpec* find_key(const std::string& path) {
  static const std::map<std::string, const KeySpec*> keys = [] {
    std::map<std::string, const KeySpec*> map;
    for (const KeySpec& spec : deck_schema()) map[spec.path()] = &spec;
    return map;
  }();
  const auto found = keys.find(path);
  return found == keys.end() ? nullptr : found->second;
}

const BlockSpec* find_block(const std::string& name) {
  for (const BlockSpec& block : deck_blocks())
    if (block.name == name) return &block;
  return nullptr;
}

std::vector<std::string> block_keys(const std::string& block) {
  std::vector<std::string> names;
  for (const KeySpec& spec : deck_schema())
    if (spec.block == block) names.push_back(spec.key);
  return names;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates) {
  if (name.empty() || name.size() > 64) return "";
  std::string best;
  std::size_t best_distance = 0;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(lower(name), lower(candidate));
    if (best.empty() || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  // One slip for every three letters, at least one; two names with nothing in common are not near.
  const std::size_t letters = std::max(name.size(), best.size());
  return best_distance <= std::max<std::size_t>(1, letters / 3) && best_distance < letters ? best
                                                                                           : "";
}

std::string to_text(const DeckValue& value) {
  const auto list = [](const auto& values, auto&& one) {
    std::string text;
    for (const auto& v : values) text += (text.empty() ? "" : ", ") + one(v);
    return "[" + text + "]";
  };
  return std::visit(Overloaded{
                        [](bool v) -> std::string { return v ? "true" : "false"; },
                        [](std::int64_t v) { return fmt::to_string(v); },
                        [](double v) { return real_text(v); },
                        [](const std::string& v) { return quoted(v); },
                        [&](const std::vector<std::int64_t>& v) {
                          return list(v, [](std::int64_t x) { return fmt::to_string(x); });
                        },
                        [&](const std::vector<double>& v) { return list(v, real_text); },
                        [&](const std::vector<std::string>& v) { return list(v, quoted); },
                    },
                    value);
}

const char* type_name(const DeckValue& value) {
  static constexpr const char* names[] = {
      "true or false",      "an integer",        "a number",      "text",
      "a list of integers", "a list of numbers", "a list of text"};
  return names[value.index()];
}

std::string range_text(const KeySpec& spec) {
  std::string text;
  if (spec.minimum) text = (spec.above ? "above " : "at least ") + number_text(*spec.minimum);
  if (spec.maximum)
    text += (text.empty() ? "" : " and ") + std::string(spec.below ? "below " : "at most ") +
            number_text(*spec.maximum);
  return text;
}

std::string value_problem(const KeySpec& spec, const DeckValue& value) {
  const auto number = [&](double v, const std::string& text) -> std::string {
    if (in_range(spec, v)) return "";
    const std::string range = range_text(spec);
    return fmt::format("{} = {} is out of range: it must be {}{}{}", spec.path(), text,
                       range.empty() ? "finite" : range, spec.unit.empty() ? "" : " ", spec.unit);
  };
  const auto word = [&](const std::string& v) -> std::string {
    if (spec.allowed.empty() ||
        std::find(spec.allowed.begin(), spec.allowed.end(), v) != spec.allowed.end())
      return "";
    const std::string near = nearest_name(v, spec.allowed);
    return fmt::format("{} = {} is not a known value{}; allowed: {}", spec.path(), quoted(v),
                       near.empty() ? "" : " (did you mean " + quoted(near) + "?)",
                       listed(spec.allowed));
  };
  const auto first = [](const auto& values, auto&& check) -> std::string {
    for (const auto& v : values)
      if (std::string problem = check(v); !problem.empty()) return problem;
    return "";
  };
  const auto integer = [&](std::int64_t v) {
    return number(static_cast<double>(v), fmt::to_string(v));
  };
  const auto real = [&](double v) { return number(v, real_text(v)); };
  return std::visit(Overloaded{
                        [](bool) -> std::string { return ""; },
                        [&](std::int64_t v) { return integer(v); },
                        [&](double v) { return real(v); },
                        [&](const std::string& v) { return word(v); },
                        [&](const std::vector<std::int64_t>& v) { return first(v, integer); },
                        [&](const std::vector<double>& v) { return first(v, real); },
                        [&](const std::vector<std::string>& v) { return first(v, word); },
                    },
                    value);
}

const DeckValue& Deck::value(const std::string& path) const {
  if (const auto found = entries_.find(path); found != entries_.end()) return found->second.value;
  const KeySpec* spec = find_key(path);
  if (spec == nullptr) throw std::logic_error("the deck schema has no key " + path);
  return spec->default_value;
}

bool Deck::block_set(const std::string& block) const {
  const auto next = entries_.lower_bound(block + ".");
  return next != entries_.end() && next->first.compare(0, block.size() + 1, block + ".") == 0;
}

std::string Deck::place(const std::string& path) const {
  const auto found = entries_.find(path);
  return found == entries_.end() ? "default" : found->second.place;
}

void Deck::set(const std::string& path, DeckValue value, std::string place) {
  const KeySpec* spec = find_key(path);
  if (spec == nullptr) throw std::logic_error("the deck schema has no key " + path);
  if (spec->default_value.index() != value.index())
    throw std::logic_error(fmt::format("deck key {} is {}, not {}", path,
                                       type_name(spec->default_value), type_name(value)));
  entries_[path] = {std::move(value), std::move(place)};
}

void Deck::apply_preset() {
  const std::string preset = text("model.preset");
  const auto& known = model_presets();
  if (std::find(known.begin(), known.end(), preset) == known.end()) return;
  for (auto& [path, value] : shape_values(model_preset(preset)))
    if (!is_set(path)) set(path, std::move(value), "preset " + preset);
}

void Deck::drop_shape() {
  for (const auto& [path, value] : shape_values(ModelShape()))
    if (context_keys().count(path) == 0) entries_.erase(path);
}

std::vector<std::string> Deck::apply_weights(const ModelShape& shape) {
  const std::set<std::string>& free = context_keys();
  const std::string folder = text("model.weights");
  Deck stated = *this;
  stated.apply_preset();
  std::vector<std::string> problems, of_preset;
  for (auto& [path, value] : shape_values(shape)) {
    const bool contradicts =
        stated.is_set(path) && free.count(path) == 0 && stated.value(path) != value;
    if (contradicts && stated.place(path).starts_with("preset "))
      of_preset.push_back(fmt::format("{} {} against {}", path.substr(path.find('.') + 1),
                                      to_text(stated.value(path)), to_text(value)));
    else if (contradicts)
      problems.push_back(fmt::format(
          "{}: {} = {} contradicts {} in {}/config.json (model.weights); leave the key out",
          stated.place(path), path, to_text(stated.value(path)), to_text(value), folder));
    if (!is_set(path)) set(path, std::move(value), "weights " + folder);
  }
  if (!of_preset.empty())
    problems.push_back(fmt::format(
        "{}: model.preset = {} is another shape than {}/config.json (model.weights): {}; set "
        "model.preset = \"custom\", the shape comes from the weights",
        place("model.preset"), quoted(text("model.preset")), folder, fmt::join(of_preset, ", ")));
  return problems;
}

bool Deck::states_shape() const {
  Deck stated = *this;
  stated.apply_preset();
  const auto values = shape_values(ModelShape());
  return std::all_of(values.begin(), values.end(),
                     [&](const auto& v) { return stated.is_set(v.first); });
}

std::string Deck::effective_toml() const {
  std::string out = "# Effective deck: every key with its value.\n";
  if (!case_name.empty()) out += "# Case " + quoted(case_name) + "\n";
  for (const BlockSpec& block : deck_blocks()) {
    out += fmt::format("\n[{}]  # {}\n", block.name, block.meaning);
    for (const KeySpec& spec : deck_schema()) {
      if (spec.block != block.name) continue;
      const DeckValue& v = value(spec.path());
      out += fmt::format("{} = {}  # {}{}{}\n", spec.key, to_text(v),
                         v == spec.default_value ? "default; " : "",
                         spec.unit.empty() ? "" : "[" + spec.unit + "] ", spec.meaning);
    }
  }
  return out;
}

std::string deck_help(const std::string& only) {
  std::string out;
  if (only.empty())
    out =
        "A deck is TOML with two flat levels: [block] and key = value.  An optional list of cases "
        "overrides keys:\n\n"
        "  [[case]]\n  name = \"flat\"\n  mesh.cp_outer = 1        # or \"mesh.cp_outer\" = 1, or "
        "mesh = { cp_outer = 1 }\n\n"
        "--case NAME picks one.  On the command line, block.key=value comes last and wins.  A "
        "model.preset of a case or of the\n"
        "command line replaces the shape that stood before it.\n";
  for (const BlockSpec& block : deck_blocks()) {
    if (!only.empty() && block.name != only) continue;
    out += fmt::format("{}[{}]  {}\n", out.empty() ? "" : "\n", block.name, block.meaning);
    for (const KeySpec& spec : deck_schema()) {
      if (spec.block != block.name) continue;
      const std::string range = range_text(spec);
      out += fmt::format("  {} = {}\n      {}\n      {}{}{}\n", spec.key,
                         to_text(spec.default_value), spec.meaning, type_name(spec.default_value),
                         spec.unit.empty() ? "" : " [" + spec.unit + "]",
                         !spec.allowed.empty() ? ": " + listed(spec.allowed)
                         : range.empty()       ? ""
                                               : ", " + range);
    }
  }
  return out;
}

}  // namespace ballast
