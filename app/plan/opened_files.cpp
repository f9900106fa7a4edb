#include "app/plan/opened_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "app/plan/deck_profile.hpp"
#include "app/plan/drift_sample.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/planned_samples.hpp"
#include "app/plan/prompts.hpp"
#include "app/plan/reference_file.hpp"
#include "core/config/run_options.hpp"
#include "core/config/segment_rule.hpp"
#include "core/model/parameter_table.hpp"
#include "io/data/dataset.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"
#include "io/profile/head_table.hpp"
#include "io/trace/recorded_indexes.hpp"

namespace ballast {

void refuse_samples_beyond_groups(const Config& config, const Dataset& data) {
  const std::vector<std::int64_t>& groups = config.batching.groups;
  if (groups.empty() || config.batching.method != Batching::hbp ||
      config.batching.long_samples != LongSamples::refuse)
    return;
  std::int64_t beyond = 0;
  for (std::int64_t s = 0; s < data.samples(); ++s) beyond += data.length(s) > groups.back();
  require(beyond == 0,
          "{} of {} samples have more tokens than the longest group's {} (batching.groups), the "
          "longest {}; add a group, or set batching.long = \"split\" or data.max_tokens",
          beyond, data.samples(), groups.back(), data.length(longest_sample(data)));
}

namespace {

/// segment_problem() of the longest document; documents are looked at one by one only where the
/// longest sample has one.
std::optional<Problem> beyond_gpus(const Config& config, const Dataset& data,
                                   const HeadTable* heads) {
  if (!segment_problem(config, data.length(longest_sample(data)), heads)) return std::nullopt;
  return segment_problem(config, longest_document(data), heads);
}

}  // namespace

void refuse_samples_beyond_gpus(const Config& config, const Dataset& data, const HeadTable* heads) {
  if (const auto problem = beyond_gpus(config, data, heads)) fail("{}", problem->message());
}

std::string samples_beyond_gpus(const Config& config) {
  if (config.run.backend != Backend::cuda || !config.is_set(&Config::data)) return "";
  try {
    const auto problem =
        beyond_gpus(config, *open_planned_data(config), head_table_here(config).get());
    return problem ? problem->message() : "";
  } catch (const Error&) {
    return "";
  }
}

void refuse_held_out_without_loss(const Config& config, const Dataset& data,
                                  const Sampler& sampler) {
  const std::vector<std::int64_t> samples = sampler.evaluated(config.eval.samples);
  require(std::any_of(samples.begin(), samples.end(),
                      [&](std::int64_t s) { return data.loss_tokens(s) > 0; }),
          "eval.samples = {}: none of the {} held-out samples that an evaluation takes has a token "
          "that carries loss; take more of the {} held out, or look at data.mask_path and "
          "data.validation_share",
          config.eval.samples, samples.size(), sampler.validation().size());
}

void refuse_missing_held_out(const Config& config, const Dataset& data, const Sampler& sampler) {
  if (!sampler.validation().empty()) {
    if (config.eval.every_steps > 0) refuse_held_out_without_loss(config, data, sampler);
    return;
  }
  const auto needs = [&](const char* key, std::int64_t value) {
    require(value == 0,
            "{} = {}: no sample is held out (data.validation_share = {}, {} samples: a single "
            "document is trained on); set data.validation_share above 0 and give more documents",
            key, value, config.data.validation_share, sampler.training_samples());
  };
  needs("eval.every_steps", config.eval.every_steps);
  if (config.eval.generate.tokens > 0) needs("eval.generate_samples", config.eval.generate.samples);
}

void refuse_without_loss(const Dataset& data) {
  for (std::int64_t s = 0; s < data.samples(); ++s)
    if (data.loss_tokens(s) > 0) return;
  fail(
      "{}: {} (the last token of a sample carries none, nor do masked ones); look at "
      "data.mask_path and at the samples' lengths",
      data.description(), loss_share_text(data));
}

void refuse_gradient_file(const Config& config) {
  const std::string &file = config.run.dump_gradients, &weights = config.model.weights;
  if (file.empty()) return;
  std::error_code error;
  require(weights.empty() || !std::filesystem::equivalent(
                                 std::filesystem::absolute(file).parent_path(), weights, error),
          "run.dump_gradients = \"{}\" lies in the folder of model.weights; choose another one",
          file);
  try {
    check_safetensors_target(file);
  } catch (const Error& error) {
    fail("run.dump_gradients = \"{}\": {}", file, error.what());
  }
}

bool goes_by_head(const Config& config) {
  return config.attention.pattern == PatternKind::by_head &&
         config.attention.index == IndexOrigin::pattern && config.model.layers > 0;
}

std::shared_ptr<const HeadTable> head_table(const Config& config) {
  const std::string& file = config.attention.heads;
  const auto layers = static_cast<int>(config.model.layers),
             heads = static_cast<int>(config.model.query_heads);
  if (file.empty()) return std::make_shared<HeadTable>(layers, heads);
  auto table = std::make_shared<HeadTable>(read_head_table(file));
  check_head_table(*table, file, layers, heads);
  return table;
}

std::shared_ptr<const HeadTable> head_table_here(const Config& config) {
  const std::string& file = config.attention.heads;
  std::error_code ignored;
  const bool here = file.empty() || std::filesystem::is_regular_file(file, ignored);
  return goes_by_head(config) && here ? head_table(config) : nullptr;
}

namespace {

/// Whoever reads an id that the vocabulary does not have names its file and place.
void read_first_tokens(const Dataset& data) {
  std::vector<std::int32_t> tokens;
  std::int64_t left = kReadTokens;
  for (std::int64_t s = 0; s < data.samples() && left > 0; ++s) {
    tokens.resize(static_cast<std::size_t>(std::min(data.length(s), left)));
    data.tokens(s, 0, std::ssize(tokens), tokens);
    left -= std::ssize(tokens);
  }
}

/// No element is read, but every name and shape.
void open_weights(const Config& config) {
  const std::string& folder = config.model.weights;
  require(std::filesystem::is_directory(folder), "model.weights = \"{}\": no such folder", folder);
  ModelShape plain = model_shape(config);
  plain.lora = {};
  Tensor none = Tensor::empty({0}, DType::f32, host_device(), MemoryCategory::workspace);
  read_huggingface_weights(folder, parameter_table(plain, {0}), 0, 0, none);
}

/// The run folder, which `train` makes, may be meant: any can be named there (-d).
std::string gradient_folder_note(const Config& config) {
  const std::string& file = config.run.dump_gradients;
  std::error_code ignored;
  const auto folder = std::filesystem::absolute(file, ignored).parent_path();
  if (file.empty() || std::filesystem::exists(folder, ignored)) return "";
  return fmt::format(
      "run.dump_gradients = \"{}\": there is no folder {}; `train` stops unless that is its run "
      "folder",
      file, folder.string());
}

bool has_ids(const DataOptions& options) {
  return options.source == DataSource::megatron || options.source == DataSource::hdf5;
}

/// What is found of the data.  Errors: samples that cannot be trained on.
void open_data(const Config& config, OpenedFiles& found) {
  const std::unique_ptr<Dataset> data = open_dataset(data_options(config));
  require(data->vocabulary() <= config.model.vocabulary,
          "model.vocabulary = {} is smaller than the data's vocabulary of {}",
          config.model.vocabulary, data->vocabulary());
  found.longest = widest_sample(*data, RunOptions::from(config).batching.align);
  found.loss_share = loss_share(*data);
  found.data = fmt::format("{}; {}", data->description(), loss_share_text(*data));
  refuse_without_loss(*data);
  if (has_ids(data_options(config))) read_first_tokens(*data);
  refuse_samples_beyond_groups(config, *data);
  refuse_samples_beyond_gpus(config, *data, found.heads.get());
  Sampler sampler = sampler_of(config, *data);
  sampler.begin_with(curriculum(config), [&](std::int64_t s) { return data->length(s); });
  found.data += fmt::format("; {} samples for training, {} held out", sampler.training_samples(),
                            sampler.validation().size());
  if (const std::string note = short_curriculum(config, sampler); !note.empty())
    found.notes.push_back(note);
  refuse_missing_held_out(config, *data, sampler);
  refuse_missing_drift_sample(config, *data, sampler);
  if (config.eval.every_steps > 0 && config.eval.generate.tokens > 0)
    refuse_prompts_beyond_groups(config,
                                 prompt_lengths(config, sample_prompts(config, *data, sampler)));
}

}  // namespace

OpenedFiles open_files_of(const Config& config) {
  OpenedFiles found;
  const auto attempt = [&](const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& e) {
      found.problems.emplace_back(e.what());
    }
  };
  if (goes_by_head(config)) attempt([&] { found.heads = head_table(config); });
  if (config.is_set(&Config::data)) attempt([&] { open_data(config, found); });
  if (!config.model.weights.empty()) attempt([&] { open_weights(config); });
  const std::string folder_note = gradient_folder_note(config);
  if (folder_note.empty()) attempt([&] { refuse_gradient_file(config); });
  for (const std::string& note : {huggingface_note(config.model.weights), folder_note})
    if (!note.empty()) found.notes.push_back(note);
  // Other runs go on without predictions where a table cannot be read.
  const bool placed = config.batching.method == Batching::balanced;
  if (!config.profile.table.empty() && (placed || predicts_latency(config)))
    attempt([&] {
      std::vector<std::string> notes;
      plan_costs(config, notes);
    });
  if (config.attention.index == IndexOrigin::recorded)
    attempt([&] { read_indexes(config.attention.recorded); });
  if (trains_pairs(config) && !config.dpo.reference_free)
    attempt([&] {
      need_reference(config);
      if (!found.problems.empty()) return;  // it is compared with the data and the model
      const std::string note =
          read_reference(config, model_shape(config), *open_dataset(data_options(config))).note;
      if (!note.empty()) found.notes.push_back(note);
    });
  return found;
}

}  // namespace ballast
