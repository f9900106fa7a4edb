// What a data set is read from and how its documents become samples.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/data/needle_task.hpp"

namespace ballast {

enum class DataSource { files, megatron, hdf5, lengths, distribution, needle };
template <>
struct EnumNames<DataSource> {
  static constexpr EnumTable<DataSource, 6> table{{{DataSource::files, "files"},
                                                   {DataSource::megatron, "megatron"},
                                                   {DataSource::hdf5, "hdf5"},
                                                   {DataSource::lengths, "lengths"},
                                                   {DataSource::distribution, "distribution"},
                                                   {DataSource::needle, "needle"}}};
};

/// What becomes of a document above max_tokens; split: pieces of max_tokens, each a sample.
enum class LongDocuments { truncate, split, drop };
template <>
struct EnumNames<LongDocuments> {
  static constexpr EnumTable<LongDocuments, 3> table{{{LongDocuments::truncate, "truncate"},
                                                      {LongDocuments::split, "split"},
                                                      {LongDocuments::drop, "drop"}}};
};

struct DataOptions {
  DataSource source = DataSource::files;
  std::vector<std::string> paths;  ///< files: files, directories (searched recursively) or globs
  std::vector<std::string> extensions;  ///< files: those to take from directories and globs; ""
                                        ///< means no extension; none given: all
  std::string
      path;  ///< megatron: path of .bin and .idx, with or without the suffix; hdf5: the file
  std::string mask_path;  ///< megatron: parallel .bin/.idx of bytes, 0 where a token is no target;
                          ///< "": every token is
  std::string lengths_file;           ///< lengths: one length in tokens a line; # begins a comment
  std::vector<std::int64_t> lengths;  ///< lengths: in place of the file where it is not empty
  std::vector<std::int64_t>
      bin_tokens;  ///< distribution: upper edge of each length bin, ascending, inclusive
  std::vector<double> bin_share;  ///< distribution: share of samples in each bin, per bin (not
                                  ///< cumulative), in proportion to their sum
  std::int64_t samples =
      0;  ///< samples to take at most, from the first on; 0: all.  distribution: how many to draw
  std::int64_t max_tokens = 0;  ///< longest sample; 0: no limit
  std::int64_t min_tokens = 1;  ///< shorter samples are left out; empty ones always are
  LongDocuments long_samples = LongDocuments::truncate;
  bool pairs = false;  ///< a sample is a pair of documents, the chosen answer and the rejected one
                       ///< (loss.kind = "dpo"); `samples` counts pairs, max_tokens limits an answer
  NeedleOptions needle;  ///< needle: the task; `samples` says how many for training, `vocabulary`
                         ///< and `seed` below hold for it too
  std::int64_t needle_held_out = 0;  ///< needle: samples for evaluation alone
  std::uint64_t seed = 0;            ///< lengths and distribution
  std::int64_t vocabulary = 0;       ///< of the model; 0: any id of 31 bits
  std::string
      tokenizer;  ///< folder whose tokenizer.json the model expects, if it has one; "": none
};

}  // namespace ballast
