#include "app/train/adapter_files.hpp"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "io/files/text_file.hpp"
#include "io/model/safetensors.hpp"
#include "kernels/model/parameters.hpp"

namespace ballast {
namespace {

std::vector<Parameter> adapters_of(const ModelShape& shape) {
  std::vector<Parameter> list;
  for (const Parameter& p : parameter_table(shape))
    if (p.trainable) list.push_back(p);
  return list;
}

constexpr const char* kWeight = ".weight";

/// "....q_proj" of "....q_proj.weight".
std::string module_of(const std::string& parameter) {
  return parameter.ends_with(kWeight)
             ? parameter.substr(0, parameter.size() - std::char_traits<char>::length(kWeight))
             : parameter;
}

}  // namespace

MasterWeights::MasterWeights(const std::string& path, const std::vector<Parameter>& table)
    : file_(path) {
  for (const CheckpointDataset& d : file_.datasets())
    if (d.field == "master") datasets_.emplace(d.parameter, d);
  for (const Parameter& p : table) {
    const auto at = datasets_.find(p.name);
    require(at != datasets_.end() && at->second.shape == p.shape,
            "{}: has no parameter {} of shape {}, which the model of its deck needs", path, p.name,
            to_string(p.shape));
  }
}

void MasterWeights::read(const std::string& parameter, std::int64_t begin, std::span<float> out) {
  const CheckpointDataset& dataset = datasets_.at(parameter);
  const auto count = static_cast<std::int64_t>(out.size());
  if (dataset.type == DType::f32) return file_.read(dataset, begin, count, out.data());
  wide_.resize(out.size());  // of a run in fp64
  file_.read(dataset, begin, count, wide_.data());
  std::copy(wide_.begin(), wide_.end(), out.begin());
}

std::vector<float> MasterWeights::read(const Parameter& parameter) {
  std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
  read(parameter.name, 0, values);
  return values;
}

WeightReader base_weights(const Config& config, const ModelShape& with_adapters) {
  const std::string& folder = config.model.weights;
  ModelShape shape = with_adapters;
  shape.lora = {};
  if (folder.empty()) {
    auto initial = std::make_shared<Parameters>(parameter_table(shape), DType::f32, host_device());
    initial->initialise(config.run.seed);
    return [initial](const Parameter& p, std::int64_t begin, std::span<float> out) {
      const float* values = initial->values().data<float>() + initial->offset(p.name) + begin;
      std::copy(values, values + out.size(), out.begin());
    };
  }
  require(std::filesystem::is_directory(folder),
          "model.weights = \"{}\": no such folder; the weights beside which these adapters were "
          "trained are merged from it",
          folder);
  auto source = std::make_shared<Safetensors>(folder);
  for (const Parameter& p : parameter_table(shape))
    require(source->contains(p.name) && source->entry(p.name).shape == p.shape,
            "{}: has no tensor {} of shape {}", folder, p.name, to_string(p.shape));
  return [source](const Parameter& p, std::int64_t begin, std::span<float> out) {
    source->read(p.name, begin, out);
  };
}

std::uint64_t base_print(std::span<const float> piece, std::uint64_t print) {
  return XXH64(piece.data(), piece.size_bytes(), print);
}

std::uint64_t base_fingerprint(const ModelShape& shape, const WeightReader& base) {
  ModelShape plain = shape;
  plain.lora = {};
  std::uint64_t sum = 0;
  std::vector<float> values;
  for (const Parameter& p : parameter_table(plain)) {
    std::uint64_t print = stream_of(p.name.c_str());
    for (std::int64_t at = 0; at < p.numel(); at += kPieceElements) {
      values.resize(static_cast<std::size_t>(std::min(kPieceElements, p.numel() - at)));
      base(p, at, values);
      print = base_print(values, print);
    }
    if (!p.tied_copy) sum += print;
  }
  return sum;
}

WeightReader merged_weights(const std::string& checkpoint, const ModelShape& shape,
                            WeightReader base) {
  struct Pair {
    std::vector<float> a, b;  // of one matrix, read when its first element is asked for
  };
  const auto adapters = adapters_of(shape);
  auto masters = std::make_shared<MasterWeights>(checkpoint, adapters);
  std::map<std::string, Parameter> by_name;
  for (const Parameter& p : adapters) by_name.emplace(p.name, p);
  auto held = std::make_shared<std::pair<std::string, Pair>>();
  const double scale = shape.lora.scale();
  const std::int64_t rank = shape.lora.rank;
  return [=](const Parameter& p, std::int64_t begin, std::span<float> out) {
    base(p, begin, out);
    const std::string module = module_of(p.name);
    const auto a = by_name.find(module + ".lora_A.weight"),
               b = by_name.find(module + ".lora_B.weight");
    if (a == by_name.end()) return;
    if (held->first != module)
      *held = {module, {masters->read(a->second), masters->read(b->second)}};
    const std::int64_t in = p.shape[1];
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int64_t row = (begin + static_cast<std::int64_t>(i)) / in,
                         column = (begin + static_cast<std::int64_t>(i)) % in;
      double sum = 0;
      for (std::int64_t r = 0; r < rank; ++r)
        sum += static_cast<double>(held->second.b[static_cast<std::size_t>(row * rank + r)]) *
               static_cast<double>(held->second.a[static_cast<std::size_t>(r * in + column)]);
      out[i] = static_cast<float>(static_cast<double>(out[i]) + scale * sum);
    }
  };
}

void write_peft(const std::string& dir, const std::string& checkpoint, const Config& config,
                const ModelShape& shape, const std::string& dtype) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(dir, error);
  require(!error, "{}: cannot be made: {}", dir, error.message());
  const std::string description = dir + "/adapter_config.json";
  require(!fs::exists(description), "{}: holds adapters already; choose an empty folder", dir);
  const auto adapters = adapters_of(shape);
  MasterWeights masters(checkpoint, adapters);
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors;
  for (const Parameter& p : adapters) tensors.emplace_back("base_model.model." + p.name, p.shape);
  SafetensorsWriter writer(dir + "/adapter_model.safetensors", tensors, dtype);
  for (const Parameter& p : adapters) writer.append(masters.read(p));
  writer.finish();
  auto modules = nlohmann::ordered_json::array();
  for (const Projection projection : shape.lora.projections)
    modules.push_back(fmt::format("{}_proj", name(projection)));
  const nlohmann::ordered_json json{{"peft_type", "LORA"},
                                    {"task_type", "CAUSAL_LM"},
                                    {"base_model_name_or_path", config.model.weights},
                                    {"r", shape.lora.rank},
                                    {"lora_alpha", shape.lora.alpha},
                                    {"lora_dropout", shape.lora.dropout},
                                    {"target_modules", modules},
                                    {"bias", "none"},
                                    {"fan_in_fan_out", false},
                                    {"use_rslora", false},
                                    {"inference_mode", true}};
  require_written(description, json.dump(2) + '\n');  // last: it says that the folder is whole
}

}  // namespace ballast
