#include "core/config/deck_schema.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>

#include "core/base/nearest_name.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_rows.hpp"

namespace ballast {
namespace {

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

}  // namespace

std::span<const BlockSpec> deck_blocks() {
  static const std::vector<BlockSpec> blocks = {
      {"run", "the run as a whole"},
      {"mesh", "degrees of the rank mesh; their product is the number of ranks"},
      {"model", "decoder-only Transformer as in Qwen2.5, Qwen3 and Llama 3"},
      {"data", "samples"},
      {"batching", "which samples form a step, and how they share micro-batches"},
      {"chunk", "dependent chunks of long samples (batching.method = \"chunkflow\")"},
      {"pipeline", "pipeline schedules (mesh.pp stages)"},
      {"attention", "attention pattern"},
      {"ring", "ring attention over context-parallel ranks"},
      {"dst", "dynamic sparsity tuning (SparseBalance)"},
      {"sab", "sparsity-aware batching (batching.method = \"sab\")"},
      {"loss", "training objective"},
      {"dpo", "direct preference optimization (loss.kind = \"dpo\")"},
      {"curriculum", "order of packing groups over the run"},
      {"optimizer", "AdamW or Muon, learning-rate schedule and ZeRO"},
      {"recompute", "activations recomputed in backward instead of kept"},
      {"lora", "low-rank adapters (LoRA) in place of full fine-tuning"},
      {"costs", "component times that the planner takes as given"},
      {"checkpoint", "checkpoints and restart"},
      {"trace", "event trace"},
      {"profile", "profile tables of layer latency and link speed"},
      {"eval", "held-out loss, needle accuracy and generated texts"},
  };
  return blocks;
}

std::span<const KeySpec> deck_schema() {
  static const std::vector<KeySpec> keys = deck_rows();
  return keys;
}

std::span<const RetiredKey> retired_keys() {
  static const std::vector<RetiredKey> keys = {
      {"profile.pattern", "attention.pattern", "`ballast profile` measures the pattern of the run"},
      {"profile.block_tokens", "attention.moba_block",
       "budgets count the blocks of the pattern of the run"},
  };
  return keys;
}

const RetiredKey* find_retired(const std::string& path) {
  for (const RetiredKey& key : retired_keys())
    if (key.path == path) return &key;
  return nullptr;
}

const Config& default_config() {
  static const Config config;
  return config;
}

const KeySpec& key_filling(const void* member) {
  for (const KeySpec& spec : deck_schema())
    if (spec.member == member) return spec;
  throw std::logic_error("no key of the deck schema fills this member of Config");
}

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
    const std::string range = std::isfinite(v) ? range_text(spec) : "a finite number";
    return fmt::format("{} = {} is out of range: it must be {}{}{}", spec.path(), text, range,
                       spec.unit.empty() ? "" : " ", spec.unit);
  };
  const auto word = [&](const std::string& v) -> std::string {
    // The system would end a file's name there; a prompt may hold it as any byte.
    if (v.find('\0') != std::string::npos && spec.path() != "eval.generate_prompts")
      return fmt::format("{} = {} holds a NUL character; leave it out", spec.path(), quoted(v));
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
  const auto real = [&](double v) { return number(v, to_text(v)); };
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
        "command line replaces the shape that stood before it; model.weights of the command line "
        "replaces a\n"
        "preset of the deck.\n";
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

namespace {
bool holds(const SwitchedOn& on, const Config& config) {
  const KeySpec& by = key_filling(on.switch_member);
  const DeckValue value = by.value(config);
  return (std::find(on.values.begin(), on.values.end(), value) != on.values.end()) != on.except;
}

/// What keeps the key from being read, or the one key that switches it on; null where it is read.
const ReadWhen* off_by(const KeySpec& spec, const Config& config) {
  for (const ReadWhen& when : spec.when) {
    if (when.size() == 1)
      if (const ReadWhen* off = off_by(key_filling(when.front().switch_member), config)) return off;
    const auto on = [&](const SwitchedOn& one) {
      return holds(one, config) && off_by(key_filling(one.switch_member), config) == nullptr;
    };
    if (std::none_of(when.begin(), when.end(), on)) return &when;
  }
  return nullptr;
}

/// "a = 1 and b = 2", the switches as they are; "1 or 2", or "c = 3 or another d", as they must be.
std::string state_of(const ReadWhen& when, const Config& config) {
  std::string text;
  for (const SwitchedOn& one : when) {
    const KeySpec& by = key_filling(one.switch_member);
    text +=
        fmt::format("{}{} = {}", text.empty() ? "" : " and ", by.path(), to_text(by.value(config)));
  }
  return text;
}
std::string needs_of(const ReadWhen& when) {
  if (when.size() == 1 && when.front().except) return "";
  std::string text;
  for (const SwitchedOn& one : when) {
    std::string values;
    for (const DeckValue& value : one.values)
      values += (values.empty() ? "" : " or ") + to_text(value);
    if (when.size() > 1) {
      const std::string path = key_filling(one.switch_member).path();
      values = one.except ? "another " + path : path + " = " + values;
    }
    text += (text.empty() ? "" : ", or ") + values;
  }
  return "it is read with " + text;
}
}  // namespace

std::vector<Problem> without_effect(const Config& config) {
  std::vector<Problem> list;
  for (const KeySpec& spec : deck_schema()) {
    if (config.from.of(spec.path()).origin != Origin::command_line) continue;
    const ReadWhen* off = off_by(spec, config);
    if (off == nullptr) continue;
    Problem& problem = list.emplace_back(
        Problem{{spec.path()},
                fmt::format("{} has no effect with {}", spec.path(), state_of(*off, config)),
                needs_of(*off)});
    for (const SwitchedOn& one : *off)
      problem.keys.push_back(key_filling(one.switch_member).path());
  }
  return list;
}

}  // namespace ballast
