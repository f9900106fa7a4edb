#include "app/train/generation.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "app/plan/prompts.hpp"
#include "core/base/random.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Sequences as samples; the last token of each carries the only target, so that rows to predict
/// are those with a target.
class Sequences final : public Dataset {
 public:
  Sequences(const std::vector<std::vector<std::int32_t>>& all, std::int64_t vocabulary)
      : all_(all), vocabulary_(vocabulary) {}
  std::int64_t samples() const override { return static_cast<std::int64_t>(all_.size()); }
  std::int64_t length(std::int64_t s) const override {
    return static_cast<std::int64_t>(all_.at(static_cast<std::size_t>(s)).size());
  }
  std::int64_t loss_tokens(std::int64_t) const override { return 1; }
  void tokens(std::int64_t s, std::int64_t begin, std::int64_t end,
              std::span<std::int32_t> out) const override {
    const auto first = all_.at(static_cast<std::size_t>(s)).begin();
    std::copy(first + begin, first + end, out.begin());
  }
  void targets(std::int64_t s, std::int64_t begin, std::int64_t end,
               std::span<std::int32_t> out) const override {
    for (std::int64_t i = begin; i < end; ++i)
      out[static_cast<std::size_t>(i - begin)] = i + 1 == length(s) ? 0 : -1;
  }
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::string description() const override { return "prompts"; }
  std::uint64_t fingerprint() const override { return 0; }

 private:
  const std::vector<std::vector<std::int32_t>>& all_;
  std::int64_t vocabulary_;
};

/// Local rows that carry a target.
std::vector<std::int64_t> rows_with_targets(const Tensor& targets) {
  const Tensor host = targets.to(host_device());
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < host.numel(); ++i)
    if (host.data<std::int32_t>()[i] >= 0) rows.push_back(i);
  return rows;
}

std::vector<double> row_of(const Tensor& logits, std::int64_t row) {
  const Tensor host = logits.rows(row, row + 1).to(host_device());
  std::vector<double> values(static_cast<std::size_t>(host.numel()));
  if (host.dtype() == DType::bf16) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(host.data<bf16>()[i].bits) << 16);
    return values;
  }
  dispatch_float(host.dtype(), [&](auto t) {
    std::copy_n(host.data<decltype(t)>(), values.size(), values.begin());
  });
  return values;
}

std::string text_of(const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (const std::int32_t t : tokens) text += static_cast<char>(t);
  // What is no UTF-8 becomes U+FFFD, as JSON wants it.
  const nlohmann::json json = text;
  return nlohmann::json::parse(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

nlohmann::ordered_json GeneratedText::json() const {
  nlohmann::ordered_json json;
  if (sample >= 0) json["sample"] = sample;
  if (bytes) json.update({{"prompt_text", text_of(prompt)}, {"text", text_of(tokens)}});
  json["prompt"] = prompt;
  json["tokens"] = tokens;
  json["stopped"] = stopped;
  return json;
}

nlohmann::ordered_json generated_json(const std::vector<GeneratedText>& texts) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const GeneratedText& text : texts) list.push_back(text.json());
  return list;
}

std::vector<std::string> generated_lines(const std::vector<GeneratedText>& texts) {
  constexpr std::size_t kShown = 24;  // tokens of a line
  std::vector<std::string> lines;
  for (const GeneratedText& t : texts) {
    const std::string of = t.sample >= 0 ? fmt::format("sample {}", t.sample) : "prompt";
    if (t.bytes) {
      const std::vector<std::int32_t> end(
          t.prompt.end() - static_cast<std::ptrdiff_t>(std::min(kShown, t.prompt.size())),
          t.prompt.end());
      lines.push_back(fmt::format("generated, {}: {} -> {}", of,
                                  nlohmann::json(text_of(end)).dump(),
                                  nlohmann::json(text_of(t.tokens)).dump()));
      continue;
    }
    const std::vector<std::int32_t> first(
        t.tokens.begin(),
        t.tokens.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, t.tokens.size())));
    lines.push_back(fmt::format("generated, {}: {} tokens -> {} tokens{}: {}{}", of,
                                t.prompt.size(), t.tokens.size(), t.stopped ? " and the end" : "",
                                fmt::join(first, " "),
                                first.size() < t.tokens.size() ? " ..." : ""));
  }
  return lines;
}

std::int32_t next_token(const std::vector<double>& logits, double temperature, double uniform) {
  const auto top = std::max_element(logits.begin(), logits.end());
  if (temperature <= 0) return static_cast<std::int32_t>(top - logits.begin());
  std::vector<double> share(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i)
    sum += share[i] = std::exp((logits[i] - *top) / temperature);
  double left = uniform * sum;
  for (std::size_t i = 0; i < share.size(); ++i)
    if (left -= share[i]; left < 0) return static_cast<std::int32_t>(i);
  return static_cast<std::int32_t>(top - logits.begin());  // rounding alone leads here
}

Generator::Generator(Session& session, StepPlanner& planner)
    : session_(session), planner_(planner), options_(session.config.eval.generate) {
  const bool bytes = session.config.data.source == DataSource::files;
  together(session.mesh.world, [&] {
    for (const std::string& text : options_.prompts) {
      GeneratedText& prompt = prompts_.emplace_back();
      for (const char c : text) prompt.prompt.push_back(static_cast<unsigned char>(c));
    }
    add_samples();
  });
  std::vector<std::vector<std::int32_t>> longest;
  for (GeneratedText& prompt : prompts_) {
    prompt.bytes = bytes;
    longest.push_back(prompt.prompt);
    longest.back().resize(prompt.prompt.size() + static_cast<std::size_t>(options_.tokens) - 1);
  }
  plan(longest);  // what cannot run is told before the first step
}

void Generator::add_samples() {
  const Dataset& data = *session_.dataset;
  const std::vector<SamplePrompt> samples = sample_prompts(session_.config, data, session_.sampler);
  refuse_prompts_beyond_groups(session_.config, prompt_lengths(session_.config, samples));
  for (const SamplePrompt& from : samples) {
    GeneratedText& prompt = prompts_.emplace_back();
    prompt.sample = from.sample;
    prompt.prompt.resize(static_cast<std::size_t>(from.tokens));
    data.tokens(from.sample, 0, from.tokens, prompt.prompt);
  }
}

StepPlan Generator::plan(const std::vector<std::vector<std::int32_t>>& sequences) {
  std::vector<SampleLength> lengths;
  for (std::size_t i = 0; i < sequences.size(); ++i)
    lengths.push_back(
        {static_cast<std::int64_t>(i), static_cast<std::int64_t>(sequences[i].size()), 1});
  return planner_.prompts(lengths);
}

std::vector<std::int32_t> Generator::next(const std::vector<std::vector<std::int32_t>>& sequences,
                                          const std::vector<std::size_t>& live) {
  const Sequences data(sequences, session_.options.model.vocabulary);
  const StepPlan plan = this->plan(sequences);
  const std::vector<MicroBatch> mine = plan.list(session_.mesh.at.dp);
  ChunkStores stores = session_.chunk_stores(plan);
  std::vector<double> found(sequences.size(), 0.0);
  const auto prepare = [&](int m) {
    MicroBatchWork work = session_.prepare(plan, m, 0, stores.at(m), nullptr, &data);
    work.batch.next_of = rows_with_targets(work.batch.targets);
    return work;
  };
  const auto take = [&](int m, const LocalBatch& local, const StageOutput& output) {
    for (std::size_t i = 0; i < local.next_of->size(); ++i) {
      const auto row = static_cast<std::size_t>((*local.next_of)[i]);
      const MicroBatch& micro_batch = mine[static_cast<std::size_t>(m)];
      const std::int64_t s =
          micro_batch.segments.at(static_cast<std::size_t>(local.segment[row])).sample;
      const auto at = static_cast<std::size_t>(s);
      const double uniform = random_uniform(options_.seed, stream_of("generation") + live[at],
                                            static_cast<std::uint64_t>(sequences[at].size()));
      found[at] = next_token(row_of(output.logits, static_cast<std::int64_t>(i)),
                             options_.temperature, uniform);
    }
  };
  run_stage(plan.schedule(session_.mesh.at.dp), static_cast<int>(mine.size()), session_.model,
            session_.links, {prepare, {}, take, nullptr}, nullptr);
  session_.mesh.world.all_reduce(std::span<double>(found));  // each row is on one rank
  return {found.begin(), found.end()};
}

std::int64_t Generator::tokens() const {
  std::int64_t tokens = 0;
  for (const GeneratedText& prompt : prompts_)  // a pass more has a token more
    tokens += options_.tokens * static_cast<std::int64_t>(prompt.prompt.size()) +
              options_.tokens * (options_.tokens - 1) / 2;
  return tokens;
}

std::vector<GeneratedText> Generator::run() {
  Scope scope(&session_.recorder, EventKind::validation);
  const OutsideSteps quiet(session_.recorder);
  std::vector<GeneratedText> texts = prompts_;
  std::vector<std::size_t> live(texts.size());
  std::iota(live.begin(), live.end(), std::size_t{0});
  for (std::int64_t round = 0; round < options_.tokens && !live.empty(); ++round) {
    std::vector<std::vector<std::int32_t>> sequences;
    for (const std::size_t i : live) {
      sequences.push_back(texts[i].prompt);
      sequences.back().insert(sequences.back().end(), texts[i].tokens.begin(),
                              texts[i].tokens.end());
    }
    const std::vector<std::int32_t> found = next(sequences, live);
    std::vector<std::size_t> still;
    for (std::size_t k = 0; k < live.size(); ++k) {
      GeneratedText& text = texts[live[k]];
      if (found[k] == options_.stop_token) {
        text.stopped = true;
        continue;
      }
      text.tokens.push_back(found[k]);
      still.push_back(live[k]);
    }
    live = std::move(still);
  }
  return texts;
}

}  // namespace ballast
