#include "io/data/dataset.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/pairs.hpp"
#include "io/data/dataset_source.hpp"
#include "io/data/pairs.hpp"
#include "io/data/token_table.hpp"

namespace ballast {

namespace {

/// Documents of a source cut into samples, with targets made per sample.
class CutDataset final : public Dataset {
 public:
  CutDataset(std::unique_ptr<DocumentSource> source, const DataOptions& options)
      : source_(std::move(source)), options_(options) {
    require(options_.max_tokens >= 0 && options_.min_tokens >= 0 && options_.samples >= 0,
            "data.max_tokens, data.min_tokens and data.samples must not be negative");
    require(options_.max_tokens == 0 || options_.min_tokens <= options_.max_tokens,
            "data.min_tokens = {} is above data.max_tokens = {}", options_.min_tokens,
            options_.max_tokens);
    cut();
    require(samples() > 0,
            "{}: no sample is left of {} documents with data.min_tokens = {}, data.max_tokens = "
            "{}, data.long = \"{}\"",
            source_->description(), source_->documents(), options_.min_tokens, options_.max_tokens,
            name(options_.long_samples));
    require(!options_.pairs || left_out_ == 0,
            "{}: {} documents are empty, so that the others do not pair (loss.kind = \"dpo\"); "
            "remove them with their partners",
            source_->description(), left_out_);
    if (source_->masked()) loss_tokens_.assign(static_cast<std::size_t>(samples()), -1);
  }

  std::int64_t samples() const override {
    return identity_ ? source_->documents() : static_cast<std::int64_t>(pieces_.size());
  }

  std::int64_t length(std::int64_t sample) const override {
    const Piece piece = at(sample);
    const std::int64_t rest = source_->length(piece.document) - piece.begin;
    return options_.max_tokens > 0 ? std::min(rest, options_.max_tokens) : rest;
  }

  std::int64_t loss_tokens(std::int64_t sample) const override {
    const std::int64_t targets = length(sample) - 1;
    if (!source_->masked() || targets == 0) return targets;
    std::int64_t& known = loss_tokens_[static_cast<std::size_t>(sample)];
    if (known < 0) {
      const Piece piece = at(sample);
      std::vector<std::uint8_t> mask(static_cast<std::size_t>(targets));
      source_->mask(piece.document, piece.begin + 1, piece.begin + 1 + targets, mask.data());
      known = std::count_if(mask.begin(), mask.end(), [](std::uint8_t m) { return m != 0; });
    }
    return known;
  }

  void tokens(std::int64_t sample, std::int64_t begin, std::int64_t end,
              std::span<std::int32_t> out) const override {
    const Piece piece = checked(sample, begin, end, out.size());
    if (begin < end) read(piece, begin, end, out.data());
  }

  void targets(std::int64_t sample, std::int64_t begin, std::int64_t end,
               std::span<std::int32_t> out) const override {
    const Piece piece = checked(sample, begin, end, out.size());
    if (begin == end) return;
    // The sample's last token has no successor.
    const std::int64_t last = std::min(end, length(sample) - 1), count = last - begin;
    if (last < end) out.back() = -1;
    if (count == 0) return;
    read(piece, begin + 1, last + 1, out.data());
    if (!source_->masked()) return;
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(count));
    source_->mask(piece.document, piece.begin + begin + 1, piece.begin + last + 1, mask.data());
    for (std::size_t i = 0; i < mask.size(); ++i) {
      if (mask[i] == 0) out[i] = -1;
    }
  }

  std::int64_t vocabulary() const override { return source_->vocabulary(); }

  std::string description() const override {
    std::string text = fmt::format("{}; {} samples", source_->description(), samples());
    if (longer_ > 0)
      text += fmt::format("; {} documents longer than {} tokens: {}", longer_, options_.max_tokens,
                          name(options_.long_samples));
    if (longer_ > 0 && source_->masked() && options_.long_samples == LongDocuments::split)
      text += " (answers lose their prompts; ballast-data build --max-tokens keeps them together)";
    if (left_out_ > 0)
      text += fmt::format("; {} shorter than {} tokens left out", left_out_,
                          std::max<std::int64_t>(1, options_.min_tokens));
    return text;
  }

  std::uint64_t fingerprint() const override {
    return Fingerprint()
        .add(static_cast<std::int64_t>(source_->fingerprint()))
        .add(options_.max_tokens)
        .add(options_.min_tokens)
        .add(std::string(name(options_.long_samples)))
        .add(samples())
        .value();
  }

  std::int64_t document(std::int64_t sample) const override {
    return source_->origin(at(sample).document);
  }

 private:
  struct Piece {
    std::int64_t document = 0, begin = 0;
  };

  /// Lists the samples, unless they are simply all documents.
  void cut() {
    const std::int64_t documents = source_->documents(),
                       shortest = std::max<std::int64_t>(1, options_.min_tokens),
                       longest = options_.max_tokens;
    const bool split = options_.long_samples == LongDocuments::split,
               drop = options_.long_samples == LongDocuments::drop;
    const std::int64_t most =
        options_.samples > 0 ? options_.samples : std::numeric_limits<std::int64_t>::max();
    std::int64_t samples = 0, taken = 0;
    const auto for_each_piece = [&](auto&& take) {
      longer_ = left_out_ = taken = 0;
      for (std::int64_t d = 0; d < documents && taken < most; ++d) {
        const std::int64_t tokens = source_->length(d);
        const bool is_long = longest > 0 && tokens > longest;
        longer_ += is_long;
        if (is_long && drop) continue;
        std::int64_t begin = 0;
        do {
          const std::int64_t rest = tokens - begin,
                             piece = is_long ? std::min(rest, longest) : rest;
          if (piece < shortest) {
            ++left_out_;
          } else {
            take(Piece{d, begin});
            ++taken;
          }
          begin += piece;
        } while (is_long && split && begin < tokens && taken < most);
      }
    };
    for_each_piece([&](Piece) { ++samples; });
    identity_ = samples == documents && left_out_ == 0 && (longer_ == 0 || !(split || drop));
    if (identity_) return;
    pieces_.reserve(static_cast<std::size_t>(samples));
    for_each_piece([&](Piece piece) { pieces_.push_back(piece); });
  }

  Piece at(std::int64_t sample) const {
    require(sample >= 0 && sample < samples(), "sample {} of a dataset that has {}", sample,
            samples());
    return identity_ ? Piece{sample, 0} : pieces_[static_cast<std::size_t>(sample)];
  }

  Piece checked(std::int64_t sample, std::int64_t begin, std::int64_t end, std::size_t room) const {
    const Piece piece = at(sample);
    require(0 <= begin && begin <= end && end <= length(sample) &&
                room == static_cast<std::size_t>(end - begin),
            "tokens [{}, {}) into {} places of sample {} ({}), which has {} tokens", begin, end,
            room, sample, source_->place(piece.document), length(sample));
    return piece;
  }

  /// Positions count from the sample's first token; ids are checked here, once for every source.
  void read(Piece piece, std::int64_t begin, std::int64_t end, std::int32_t* out) const {
    source_->tokens(piece.document, piece.begin + begin, piece.begin + end, out);
    const std::int64_t vocabulary = source_->vocabulary();
    for (std::int64_t i = 0; i < end - begin; ++i) {
      if (out[i] < 0 || out[i] >= vocabulary) {
        fail(
            "{}: token {} has id {}, outside the vocabulary of {}; the data was made with another "
            "tokenizer, or is damaged",
            source_->place(piece.document), piece.begin + begin + i, out[i], vocabulary);
      }
    }
  }

  std::unique_ptr<DocumentSource> source_;
  DataOptions options_;
  bool identity_ = true;  ///< every document is one sample
  std::vector<Piece> pieces_;
  std::int64_t longer_ = 0, left_out_ = 0;
  mutable std::vector<std::int64_t> loss_tokens_;  ///< with a mask: counted when first asked for
};

std::unique_ptr<Dataset> open_documents(const DataOptions& options) {
  require(options.source != DataSource::files || !has_tokenizer(options.tokenizer),
          "data.source = \"files\" reads bytes, but {} has a tokenizer; `ballast-data build` makes "
          "token files for data.source = \"hdf5\"",
          options.tokenizer);
  const auto cut = [&](std::unique_ptr<DocumentSource> source) {
    return std::make_unique<CutDataset>(std::move(source), options);
  };
  switch (options.source) {
    case DataSource::files:
      return cut(open_files(options));
    case DataSource::megatron:
      return cut(open_megatron(options));
    case DataSource::hdf5:
      return cut(open_hdf5(options));
    case DataSource::lengths:
      return cut(open_lengths(options));
    case DataSource::distribution:
      return cut(open_distribution(options));
    case DataSource::needle:
      return open_needle(options);
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<Dataset> open_dataset(const DataOptions& options) {
  try {
    if (!options.pairs) return open_documents(options);
    DataOptions answers = options;
    answers.samples = 2 * options.samples;
    return pair_up(open_documents(answers));
  } catch (const std::bad_alloc&) {
    fail("data: the memory does not hold the lengths of so many samples; lower data.samples");
  }
}

SampleLength sample_length(const Dataset& dataset, std::int64_t sample, bool count_loss) {
  SampleLength length{sample, dataset.length(sample), 0, dataset.chosen_tokens(sample), 0};
  if (!count_loss) return length;
  length.loss_tokens = dataset.loss_tokens(sample);
  length.chosen_loss_tokens = dataset.chosen_loss_tokens(sample);
  return length;
}

std::int64_t longest_sample(const Dataset& dataset) {
  std::int64_t longest = 0;
  for (std::int64_t s = 1; s < dataset.samples(); ++s)
    if (dataset.length(s) > dataset.length(longest)) longest = s;
  return longest;
}

std::int64_t longest_document(const Dataset& dataset) {
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < dataset.samples(); ++s)
    for (const std::int64_t tokens : document_lengths(sample_length(dataset, s, false)))
      longest = std::max(longest, tokens);
  return longest;
}

SampleLength widest_sample(const Dataset& dataset, std::int64_t align) {
  const auto width = [&](std::int64_t s) {
    const SampleLength length = sample_length(dataset, s, false);
    return std::pair(axis_tokens(length, align), length.tokens);
  };
  std::int64_t widest = 0;
  auto most = width(widest);
  for (std::int64_t s = 1; s < dataset.samples(); ++s)
    if (const auto own = width(s); own > most) widest = s, most = own;
  return sample_length(dataset, widest);
}

bool lengths_differ(const Dataset& dataset) {
  for (std::int64_t s = 1; s < dataset.samples(); ++s)
    if (dataset.length(s) != dataset.length(0)) return true;
  return false;
}

namespace {
constexpr std::int64_t kSharedSamples = 1000;
}

double loss_share(const Dataset& dataset) {
  std::int64_t tokens = 0, loss = 0;
  for (std::int64_t s = 0; s < std::min(dataset.samples(), kSharedSamples); ++s) {
    tokens += dataset.length(s);
    loss += dataset.loss_tokens(s);
  }
  return tokens > 0 ? static_cast<double>(loss) / static_cast<double>(tokens) : 0;
}

std::string loss_share_text(const Dataset& dataset) {
  const bool all = dataset.samples() <= kSharedSamples;
  return fmt::format("{:.1f} % of the tokens {}carry loss", 100 * loss_share(dataset),
                     all ? "" : fmt::format("of the first {} samples ", kSharedSamples));
}

std::uint64_t sampled_contents(const Dataset& dataset) {
  constexpr std::int64_t kBlocks = 256, kTokens = 64;
  Fingerprint print;
  std::int32_t block[kTokens];
  const std::int64_t samples = dataset.samples(), blocks = std::min(samples, kBlocks);
  for (std::int64_t b = 0; b < blocks; ++b) {
    // Evenly spread samples, and another place in each.
    const std::int64_t sample = samples * b / blocks, length = dataset.length(sample),
                       begin = std::max<std::int64_t>(0, length - kTokens) * (b % 7) / 6,
                       count = std::min(kTokens, length - begin);
    const std::span<std::int32_t> out(block, static_cast<std::size_t>(count));
    dataset.tokens(sample, begin, begin + count, out);
    print.add(block, out.size_bytes());
    dataset.targets(sample, begin, begin + count, out);
    print.add(block, out.size_bytes());
  }
  return print.value();
}

void count_loss_tokens(Batch& batch, const Dataset& dataset) {
  std::vector<std::int32_t> targets;
  for (std::vector<MicroBatch>& list : batch.micro_batches)
    for (MicroBatch& m : list)
      for (Segment& s : m.segments) {
        if (s.begin == 0 && s.end == dataset.length(s.sample)) continue;
        targets.resize(static_cast<std::size_t>(s.end - s.begin));
        dataset.targets(s.sample, s.origin + s.begin, s.origin + s.end, targets);
        s.loss_tokens =
            std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
      }
}

}  // namespace ballast
