#include "core/config/deck_notes.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/config/deck_schema.hpp"
#include "core/config/deck_value.hpp"

namespace ballast {
namespace {

bool stated(const Config& config, const char* key) {
  const Origin origin = config.from.of(key).origin;
  return origin == Origin::file || origin == Origin::command_line;
}

void weights_note(const Config& config, std::vector<Problem>& list) {
  const ModelConfig& model = config.model;
  if (model.weights.empty() || !stated(config, "model.initial_std") ||
      model.initial_std == default_config().model.initial_std)
    return;
  list.push_back(
      {{"model.initial_std", "model.weights"},
       fmt::format("model.initial_std = {} has no effect with model.weights = {}, whose values "
                   "training begins with",
                   to_text(model.initial_std), quoted(model.weights)),
       ""});
}

void micro_batch_note(const Config& config, std::vector<Problem>& list) {
  const BatchingConfig& batching = config.batching;
  if ((batching.method != Batching::sab && batching.method != Batching::lbb) ||
      batching.micro_batch_samples == 0 || !stated(config, "batching.micro_batch_tokens"))
    return;
  list.push_back({{"batching.micro_batch_tokens", "batching.micro_batch_samples"},
                  fmt::format("batching.micro_batch_tokens = {} bounds no micro-batch with "
                              "batching.micro_batch_samples = {}: \"{}\" puts that many samples "
                              "of any length into one, on average",
                              batching.micro_batch_tokens, batching.micro_batch_samples,
                              name(batching.method)),
                  ""});
}

void selection_note(const Config& config, std::vector<Problem>& list) {
  const AttentionConfig& attention = config.attention;
  if (attention.pattern != PatternKind::moba || attention.index != IndexOrigin::pattern ||
      attention.selection != IndexSelection::causal)
    return;
  list.push_back({{"attention.selection", "attention.pattern"},
                  "attention.selection = \"causal\" has no effect with attention.pattern = "
                  "\"moba\", which looks at no later token",
                  ""});
}

}  // namespace

std::vector<Problem> deck_notes(const Config& config) {
  std::vector<Problem> list = without_effect(config), more;
  weights_note(config, more);
  micro_batch_note(config, more);
  selection_note(config, more);
  for (Problem& note : more) {
    const bool told = std::any_of(list.begin(), list.end(), [&](const Problem& other) {
      return other.keys.front() == note.keys.front();
    });
    if (!told) list.push_back(std::move(note));
  }
  return list;
}

std::string precision_note(const Config& config, DType computes) {
  if (config.run.precision != Precision::fp32 || computes != DType::bf16 ||
      !stated(config, "run.precision"))
    return "";
  return "run.precision = \"fp32\" is for the host: CUDA computes in bf16, with fp32 sums and "
         "master weights";
}

}  // namespace ballast
