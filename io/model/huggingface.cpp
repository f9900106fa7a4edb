#include "io/model/huggingface.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/base/lfs_pointer.hpp"
#include "io/files/text_file.hpp"
#include "io/model/safetensors.hpp"

namespace ballast {
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// Required value of a key, with the file named in every error.
template <class T>
T need(const json& config, const std::string& file, const char* key) {
  require(config.contains(key) && !config[key].is_null(), "{}: has no \"{}\"", file, key);
  try {
    return config[key].get<T>();
  } catch (const json::exception&) {
    fail("{}: \"{}\" = {} has the wrong type", file, key, config[key].dump());
  }
}
template <class T>
T optional(const json& config, const std::string& file, const char* key, T otherwise) {
  return config.contains(key) && !config[key].is_null() ? need<T>(config, file, key) : otherwise;
}

/// A whole number within what a deck may state.
std::int64_t need_size(const json& config, const std::string& file, const char* key,
                       std::int64_t most) {
  const auto value = need<std::int64_t>(config, file, key);
  require(config[key].is_number_integer() && value > 0 && value <= most,
          "{}: \"{}\" = {} must be a whole number from 1 to {}", file, key, config[key].dump(),
          most);
  return value;
}

constexpr const char *kHead = "lm_head.weight", *kEmbedding = "model.embed_tokens.weight";
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40,
                       kDefaultContext = 32768;  // where nothing depends on it

/// What `rope`, the value of either key, says of a shape.
void apply_rope(const json& rope, const json& config, const std::string& file, ModelShape& shape) {
  shape.rope_theta = rope.contains("rope_theta") ? need<double>(rope, file, "rope_theta")
                                                 : optional(config, file, "rope_theta", 10000.0);
  for (const json& stated : {rope, config})
    require(optional(stated, file, "partial_rotary_factor", 1.0) == 1,
            "{}: partial rotary embedding is not supported", file);
  const auto length = [&](const json& in, const char* key, std::int64_t otherwise) {
    return in.contains(key) && !in[key].is_null() ? need_size(in, file, key, kMostTokens)
                                                  : otherwise;
  };
  shape.original_context = length(config, "max_position_embeddings", kDefaultContext);
  const std::string type = rope.contains("rope_type")
                               ? need<std::string>(rope, file, "rope_type")
                               : optional<std::string>(rope, file, "type", "default");
  if (type == "default") return;
  // As Transformers ranks them: the model's own key before that of its rope.
  const std::int64_t own = length(config, "original_max_position_embeddings", 0),
                     of_rope = length(rope, "original_max_position_embeddings", 0);
  require(own > 0 || of_rope > 0 || length(config, "max_position_embeddings", 0) > 0,
          "{}: {} rope, and neither \"original_max_position_embeddings\" nor "
          "\"max_position_embeddings\" says for which length the model was trained",
          file, type);
  if (own > 0 || of_rope > 0) shape.original_context = own > 0 ? own : of_rope;
  // What differs from the published definition is refused: the same weights would give other
  // logits.
  const auto expect = [&](const char* key, double value) {
    const double stated = optional(rope, file, key, value);
    require(std::abs(stated - value) < 1e-6, "{}: {} rope with \"{}\" = {} is not supported ({})",
            file, type, key, stated, value);
  };
  if (type == "yarn") {
    shape.yarn_factor = need<double>(rope, file, "factor");
    require(shape.yarn_factor >= 1, "{}: yarn rope has the factor {}, which is below 1", file,
            shape.yarn_factor);
    expect("beta_fast", 32);
    expect("beta_slow", 1);
    expect("attention_factor", 0.1 * std::log(shape.yarn_factor) + 1);
    require(optional(rope, file, "truncate", true),
            "{}: yarn rope with \"truncate\" = false is not supported", file);
    require(!(rope.contains("mscale") && rope.contains("mscale_all_dim")),
            "{}: yarn rope with \"mscale\" is not supported", file);
  } else if (type == "llama3") {
    shape.llama3_factor = need<double>(rope, file, "factor");
    shape.llama3_low = need<double>(rope, file, "low_freq_factor");
    shape.llama3_high = need<double>(rope, file, "high_freq_factor");
  } else {
    fail("{}: rope type \"{}\" is not supported (default, yarn, llama3)", file, type);
  }
}

void read_rope(const json& config, const std::string& file, ModelShape& shape) {
  // Older files keep rope_theta and rope_scaling apart, newer ones join them as rope_parameters.
  const auto object = [&](const char* key) {
    const json found = optional(config, file, key, json::object());
    require(found.is_object(), "{}: \"{}\" = {} is no object", file, key, found.dump());
    return found;
  };
  require(!config.contains("rope_parameters") || !config["rope_parameters"].is_null(),
          "{}: \"rope_parameters\" is null", file);
  const json joined = object("rope_parameters"), apart = object("rope_scaling");
  for (const auto& [name, value] : joined.items())
    require(
        !value.is_object(),
        "{}: \"rope_parameters\" states rope for {} layers on their own, which is not supported",
        file, name);
  const auto stated = [](const json& in) { return in.value("rope_theta", json()); };
  for (const auto& [name, rope] :
       {std::pair("rope_parameters", joined), std::pair("rope_scaling", apart)})
    require(stated(rope).is_null() || stated(config).is_null() || stated(rope) == stated(config),
            "{}: \"rope_theta\" = {} and that of \"{}\", {}, differ; leave the one that the "
            "weights were trained with",
            file, stated(config).dump(), name, stated(rope).dump());
  ModelShape other = shape;
  apply_rope(joined.empty() ? apart : joined, config, file, shape);
  if (joined.empty() || apart.empty()) return;
  // Which of two goes first differs between the programs that read them, so they must agree; the
  // base of the angles is taken from whoever states it.
  json whole = apart;
  if (joined.contains("rope_theta") && !config.contains("rope_theta") &&
      !whole.contains("rope_theta"))
    whole["rope_theta"] = joined["rope_theta"];
  apply_rope(whole, config, file, other);
  const auto said = [](const ModelShape& s) {
    return std::tuple(s.rope_theta, s.original_context, s.yarn_factor, s.llama3_factor,
                      s.llama3_low, s.llama3_high);
  };
  require(said(shape) == said(other),
          "{}: \"rope_parameters\" = {} and \"rope_scaling\" = {} differ in what they say; leave "
          "the one that the weights were trained with",
          file, joined.dump(), apart.dump());
}

/// DIR/config.json, or an empty object.
json config_file(const std::string& dir) {
  std::ifstream stream(dir + "/config.json");
  const json stated = json::parse(stream, nullptr, false);
  return stated.is_object() ? stated : json::object();
}

/// Transformers' class of a model_type that read_huggingface_config takes.
const char* class_of(const std::string& model_type) {
  return model_type == "qwen2"   ? "Qwen2ForCausalLM"
         : model_type == "qwen3" ? "Qwen3ForCausalLM"
         : model_type == "llama" ? "LlamaForCausalLM"
                                 : "MistralForCausalLM";
}

json config_of(const ModelShape& shape, const std::string& dtype) {
  const char* type = shape.qkv_bias ? "qwen2" : shape.qk_norm ? "qwen3" : "llama";
  json config = {{"architectures", {class_of(type)}},
                 {"model_type", type},
                 {"hidden_act", "silu"},
                 {"hidden_size", shape.hidden},
                 {"intermediate_size", shape.intermediate},
                 {"num_hidden_layers", shape.layers},
                 {"num_attention_heads", shape.query_heads},
                 {"num_key_value_heads", shape.kv_heads},
                 {"head_dim", shape.head_dim},
                 {"vocab_size", shape.vocabulary},
                 {"rms_norm_eps", shape.rms_eps},
                 {"rope_theta", shape.rope_theta},
                 {"tie_word_embeddings", shape.tied_embedding},
                 {"bos_token_id", nullptr},  // else those of Transformers' class
                 {"eos_token_id", nullptr},
                 {"max_position_embeddings", shape.original_context},
                 {"torch_dtype", dtype == "BF16" ? "bfloat16" : "float32"}};
  if (shape.yarn_factor != 1)
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", shape.yarn_factor},
                              {"original_max_position_embeddings", shape.original_context}};
  if (shape.llama3_factor != 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", shape.llama3_factor},
                              {"low_freq_factor", shape.llama3_low},
                              {"high_freq_factor", shape.llama3_high},
                              {"original_max_position_embeddings", shape.original_context}};
  // Of llama3 rope it does not follow from the factor; all models with it state this.
  if (shape.llama3_factor != 1) config["max_position_embeddings"] = 131072;
  if (shape.yarn_factor != 1)
    config["max_position_embeddings"] =
        static_cast<std::int64_t>(static_cast<double>(shape.original_context) * shape.yarn_factor);
  return config;
}

void write_json_file(const std::string& path, const json& value) {
  require_written(path, value.dump(2) + '\n');
}

/// Every layer has to see the whole context: one that slides a window over it is another model.
void require_full_attention(const json& config, const std::string& file, const std::string& type) {
  bool slides = optional(config, file, "use_sliding_window", false);
  // Mistral's window has no switch; 4096 is what Transformers takes where the file states none.
  if (type == "mistral")
    slides = !config.contains("sliding_window") || !config["sliding_window"].is_null();
  const json layers = optional(config, file, "layer_types", json::array());
  require(layers.is_array(), "{}: \"layer_types\" = {} is no list", file, layers.dump());
  for (const json& layer : layers) slides = slides || layer != "full_attention";
  require(!slides,
          "{}: sliding-window attention is not supported; of Mistral, models from v0.2 on have "
          "\"sliding_window\": null",
          file);
  require(optional(config, file, "is_causal", true),
          "{}: \"is_causal\" = false: a model whose tokens see later ones is not supported", file);
}

/// 0: the folder holds another kind of model by now.
double yarn_factor_of(const std::string& dir) {
  try {
    return read_huggingface_config(dir).yarn_factor;
  } catch (const Error&) {
    return 0;
  }
}

/// What generation needs beside weights: files as they are, and ids of config.json.
void carry_over(const std::string& base, const std::string& dir, const ModelShape& shape,
                json& config) {
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "chat_template.json", "generation_config.json", "vocab.json",
        "merges.txt", "vocab.txt", "tokenizer.model"}) {
    std::error_code error;
    if (!fs::is_regular_file(base + "/" + name, error)) continue;
    fs::copy_file(base + "/" + name, dir + "/" + name, fs::copy_options::overwrite_existing, error);
    require(!error, "{}/{}: cannot be written: {}", dir, name, error.message());
  }
  const std::string templates = "/additional_chat_templates";
  if (fs::is_directory(base + templates)) {
    std::error_code error;
    fs::copy(base + templates, dir + templates,
             fs::copy_options::recursive | fs::copy_options::overwrite_existing, error);
    require(!error, "{}{}: cannot be written: {}", dir, templates, error.message());
  }
  const json stated = config_file(base);
  if (stated.empty()) return;
  if (stated.value("model_type", json()) == "mistral" && config["model_type"] == "llama") {
    config["model_type"] = "mistral";  // the same model, whose own class assumes a window
    config["architectures"] = {class_of("mistral")};
    config["sliding_window"] = nullptr;
  }
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    if (stated.contains(key))
      config[key] = stated[key];
    else
      config.erase(key);  // those of its class
  // It does not follow from the rope, unless that was changed.
  const char* length = "max_position_embeddings";
  if (stated.contains(length) && stated[length].is_number() && config.contains("rope_scaling") &&
      yarn_factor_of(base) == shape.yarn_factor)
    config[length] = stated[length];
}

/// Beside other weights, those written there would not be the ones that are read.
void refuse_other_weights(const std::string& dir) {
  require(!fs::exists(dir + "/config.json"), "{}: holds a model already; choose an empty folder",
          dir);
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    require(!name.ends_with(".safetensors") && name != kIndexFile,
            "{}: {} is of another model, or of an export that did not end; remove it or choose an "
            "empty folder",
            dir, name);
  }
}

}  // namespace

std::uint64_t huggingface_tokens_mark(const std::string& dir) {
  if (dir.empty() || !fs::is_directory(dir)) return 0;
  const json stated = config_file(dir);
  std::string said;
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"})
    said += (stated.contains(key) ? stated[key].dump() : "none") + '\n';
  std::ifstream tokenizer(dir + "/tokenizer.json", std::ios::binary);
  said.append(std::istreambuf_iterator<char>(tokenizer), {});
  return std::max<std::uint64_t>(XXH3_64bits(said.data(), said.size()), 1);
}

std::string foreign_tokens(const std::string& dir, std::uint64_t mark, const ModelShape& shape) {
  if (!fs::is_directory(dir)) return fmt::format("{} is not here", dir);
  if (mark != 0 && mark != huggingface_tokens_mark(dir))
    return fmt::format("{} has another tokenizer or special tokens than when training began", dir);
  const json stated = config_file(dir);
  if (stated.contains("vocab_size") && stated["vocab_size"] != shape.vocabulary)
    return fmt::format("{} has a vocabulary of {} tokens and the checkpoint one of {}", dir,
                       stated["vocab_size"].dump(), shape.vocabulary);
  return "";
}

std::string huggingface_note(const std::string& dir) {
  const std::string file = dir + "/config.json", key = "attention_dropout";
  if (dir.empty()) return "";
  const json stated = config_file(dir);
  if (!stated.contains(key) || !stated[key].is_number() || stated[key] == 0) return "";
  return fmt::format("{}: {} = {}: training goes without dropout", file, key, stated[key].dump());
}

ModelShape read_huggingface_config(const std::string& dir) {
  const std::string file = dir + "/config.json";
  require(!fs::exists(file) || fs::is_regular_file(file), "{}: is no regular file", file);
  refuse_lfs_pointer(file);
  std::ifstream stream(file);
  require(stream.good(), "{}: cannot be read; a Hugging Face model folder has one", file);
  const json config = json::parse(stream, nullptr, false);
  require(!config.is_discarded(), "{}: is not valid JSON", file);
  require(
      config.is_object(),
      "{}: holds {} at its top level, where an object {{\"model_type\": ...}} belongs; take the "
      "config.json of the model's folder",
      file, config.is_array() ? "a list" : fmt::format("a {}", config.type_name()));
  const auto type = need<std::string>(config, file, "model_type");
  require(type == "qwen2" || type == "qwen3" || type == "llama" || type == "mistral",
          "{}: model_type \"{}\" is not supported (qwen2, qwen3, llama, mistral)", file, type);
  const auto activation = optional<std::string>(config, file, "hidden_act", "silu");
  require(activation == "silu", "{}: hidden_act \"{}\" is not supported (silu)", file, activation);
  require_full_attention(config, file, type);
  require(!optional(config, file, "mlp_bias", false), "{}: mlp_bias is not supported", file);
  require(type == "qwen2" || !optional(config, file, "attention_bias", false),
          "{}: attention_bias of {} (it biases the output too) is not supported", file, type);
  ModelShape shape;
  shape.preset = type + " of " + dir;
  constexpr std::int64_t kCount = 1 << 16, kWidth = 1 << 24;  // the schema's bounds
  const auto stated = [&](const char* key) {
    return config.contains(key) && !config[key].is_null();
  };
  shape.layers = need_size(config, file, "num_hidden_layers", kCount);
  shape.hidden = need_size(config, file, "hidden_size", kWidth);
  shape.intermediate = need_size(config, file, "intermediate_size", kWidth);
  shape.query_heads = need_size(config, file, "num_attention_heads", kCount);
  shape.kv_heads = stated("num_key_value_heads")
                       ? need_size(config, file, "num_key_value_heads", kCount)
                       : shape.query_heads;
  shape.head_dim = stated("head_dim") ? need_size(config, file, "head_dim", kCount)
                   : type == "qwen3"  ? 128  // of its class, where a file states none
                                      : shape.hidden / shape.query_heads;
  shape.vocabulary = need_size(config, file, "vocab_size", kWidth);
  shape.qkv_bias = type == "qwen2";
  shape.qk_norm = type == "qwen3";
  shape.tied_embedding = optional(config, file, "tie_word_embeddings", false);
  shape.rms_eps = optional(config, file, "rms_norm_eps", 1e-6);
  read_rope(config, file, shape);
  const auto list = problems(shape);
  require(list.empty(), "{}: {}", file, messages(list, "; "));
  return shape;
}

namespace {

/// A tied model's file may hold its head too, of the embedding's values: of others it would be
/// another model.
void require_tied(bool same, const std::string& dir) {
  require(same,
          "{}: {} differs from {}, which config.json ties it to; set \"tie_word_embeddings\" to "
          "false there, or take the head out",
          dir, kHead, kEmbedding);
}
template <class T>
void require_tied_head(const Safetensors& source, const std::string& dir, std::int64_t begin,
                       std::span<const T> values) {
  std::vector<T> head(std::min<std::size_t>(values.size(), 1 << 20));
  for (std::size_t at = 0; at < values.size(); at += head.size()) {
    const std::size_t n = std::min(head.size(), values.size() - at);
    source.read(kHead, begin + static_cast<std::int64_t>(at), std::span(head).first(n));
    require_tied(std::equal(head.begin(), head.begin() + static_cast<std::ptrdiff_t>(n),
                            values.begin() + static_cast<std::ptrdiff_t>(at)),
                 dir);
  }
}

}  // namespace

void read_huggingface_weights(const std::string& dir, const std::vector<Parameter>& table,
                              std::int64_t begin, std::int64_t end, Tensor& out) {
  const Safetensors source(dir);
  std::set<std::string> known;
  for (const Parameter& parameter : table) known.insert(parameter.name);
  const bool tied_head = known.insert(kHead).second && source.contains(kHead);
  for (const std::string& name : source.names())
    require(known.count(name) != 0 || name.ends_with(".rotary_emb.inv_freq"),
            "{}: holds tensor {}, which the model of its config.json does not have", dir, name);
  std::int64_t offset = 0;
  for (const Parameter& parameter : table) {
    const SafetensorsEntry& entry = source.entry(parameter.name);
    require(entry.shape == parameter.shape, "{}: tensor {} has shape [{}], the model needs [{}]",
            dir, parameter.name, fmt::join(entry.shape, ", "), fmt::join(parameter.shape, ", "));
    const bool ties = tied_head && parameter.name == kEmbedding;
    if (ties) require_tied(source.entry(kHead).shape == parameter.shape, dir);
    const std::int64_t first = std::max(begin, offset),
                       last = std::min(end, offset + parameter.numel());
    if (first < last)
      dispatch_float(out.dtype(), [&]<class T>(T) {
        source.read(
            parameter.name, first - offset,
            std::span<T>(out.data<T>() + (first - begin), static_cast<std::size_t>(last - first)));
        for (std::int64_t i = first; i < last; ++i)
          require(std::isfinite(out.data<T>()[i - begin]), "{}: tensor {}: element {} is {}", dir,
                  parameter.name, i - offset, out.data<T>()[i - begin]);
        if (ties)
          require_tied_head<T>(
              source, dir, first - offset,
              {out.data<T>() + (first - begin), static_cast<std::size_t>(last - first)});
      });
    offset += parameter.numel();
  }
}

void write_huggingface(const std::string& dir, const ModelShape& shape,
                       const std::vector<Parameter>& table, const std::string& dtype,
                       std::int64_t shard_bytes,
                       const std::function<void(std::size_t, std::int64_t, std::span<float>)>& read,
                       const std::string& base) {
  std::error_code error;
  fs::create_directories(dir, error);
  require(!error, "{}: cannot be made: {}", dir, error.message());
  refuse_other_weights(dir);
  const std::int64_t element = dtype == "BF16" ? 2 : 4;
  // Cut the table into files.
  std::vector<std::pair<std::size_t, std::size_t>> files;
  std::int64_t bytes = 0, total = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const std::int64_t size = table[i].numel() * element;
    if (files.empty() || bytes + size > shard_bytes) {
      files.emplace_back(i, i);
      bytes = 0;
    }
    files.back().second = i + 1;
    bytes += size;
    total += size;
  }
  json config = config_of(shape, dtype), weight_map = json::object();
  if (!base.empty()) carry_over(base, dir, shape, config);  // what fails does so before the weights
  std::vector<float> buffer;
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::string name =
        files.size() == 1 ? "model.safetensors"
                          : fmt::format("model-{:05}-of-{:05}.safetensors", f + 1, files.size());
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors;
    for (std::size_t i = files[f].first; i < files[f].second; ++i) {
      tensors.emplace_back(table[i].name, table[i].shape);
      weight_map[table[i].name] = name;
    }
    SafetensorsWriter writer(dir + "/" + name, tensors, dtype);
    for (std::size_t i = files[f].first; i < files[f].second; ++i) {
      constexpr std::int64_t kPiece = std::int64_t{1} << 24;
      for (std::int64_t at = 0; at < table[i].numel(); at += kPiece) {
        buffer.resize(static_cast<std::size_t>(std::min(kPiece, table[i].numel() - at)));
        read(i, at, buffer);
        writer.append(buffer);
      }
    }
    writer.finish();
  }
  if (files.size() > 1)
    write_json_file(dir + "/" + kIndexFile,
                    {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}});
  write_json_file(dir + "/config.json", config);  // last: its presence says the folder is whole
}

}  // namespace ballast
