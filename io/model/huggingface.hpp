// Hugging Face model folders: config.json and safetensors, read into any sharding and written from
// full tensors.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/parameter_table.hpp"

namespace ballast {

/// Shape of DIR/config.json (model_type qwen2, qwen3, llama or mistral).  Errors name the file and
/// the key: missing keys, another architecture, sliding-window attention, an attention or
/// activation that this program does not compute.
ModelShape read_huggingface_config(const std::string& dir);

/// What DIR/config.json states and training does without, or "", as where there is no DIR ("").
std::string huggingface_note(const std::string& dir);

/// Mark of what DIR says of tokens: tokenizer.json, and the ids of special tokens and the size of
/// the vocabulary in config.json.  0: there is no DIR.
std::uint64_t huggingface_tokens_mark(const std::string& dir);

/// Why DIR does not name the tokens of a model that was trained from it, or "": it is gone, has
/// another mark than `mark` (0: not known), or another vocabulary than `shape`.
std::string foreign_tokens(const std::string& dir, std::uint64_t mark, const ModelShape& shape);

/// Values of the flat buffer's elements [begin, end), whose parameters are `table` in order, from
/// DIR's safetensors, into `out` [end - begin] (f32 or f64, host).  Reads those elements alone.
/// Errors: a missing tensor, one that the table does not have, or another shape than the table's,
/// by name.
void read_huggingface_weights(const std::string& dir, const std::vector<Parameter>& table,
                              std::int64_t begin, std::int64_t end, Tensor& out);

/// Writes DIR: config.json, model-XXXXX-of-XXXXX.safetensors of at most `shard_bytes` (a lone file
/// is model.safetensors), and the index.  `read(i, begin, out)` fills elements [begin, begin +
/// out.size()) of table[i].  dtype: F32 or BF16.  `base` (may be ""): the folder that
/// training began with, whose tokenizer, chat template, generation_config.json and ids
/// of special tokens go along.  Refuses a folder that holds a model already.
void write_huggingface(const std::string& dir, const ModelShape& shape,
                       const std::vector<Parameter>& table, const std::string& dtype,
                       std::int64_t shard_bytes,
                       const std::function<void(std::size_t parameter, std::int64_t begin,
                                                std::span<float> out)>& read,
                       const std::string& base = "");

}  // namespace ballast
